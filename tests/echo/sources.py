"""Loaders that a test holds in its hand."""

import queue
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset


class Numbers:
    """A loader with a state, whose batches say which they are and which pass they belong to."""

    def __init__(self, length: int, *, remembers: bool = True) -> None:
        self.length = length
        self.passes = 0
        self.position = 0
        if remembers:
            self.state_dict = self._state_dict
            self.load_state_dict = self._load_state_dict

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < self.length:
            self.position += 1
            yield torch.tensor([1000 * self.passes + self.position - 1])
        self.position = 0
        self.passes += 1

    def _state_dict(self) -> dict[str, int]:
        return {"position": self.position, "passes": self.passes}

    def _load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.passes = state["position"], state["passes"]


class Tap:
    """A loader that gives what the test pours in: nothing is ready before, and everything after."""

    def __init__(self) -> None:
        self._poured: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def pour(self, *batches: Any) -> None:
        """Let these be read, in order; an exception is raised by the reader."""
        for batch in batches:
            self._poured.put(batch)

    def close(self) -> None:
        """Let the data end."""
        self._poured.put(self)

    def __iter__(self) -> Iterator[Any]:
        while (batch := self._poured.get(timeout=30)) is not self:
            if isinstance(batch, BaseException):
                raise batch
            yield batch


class Squares(Dataset[Tensor]):
    """A map-style dataset; item `fails_at` raises, and at item `dies_at` its worker does."""

    def __init__(self, length: int, fails_at: int = -1, dies_at: int = -1) -> None:
        self.length = length
        self.fails_at = fails_at
        self.dies_at = dies_at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if index == self.fails_at:
            raise OSError(f"sample {index} cannot be read")
        if index == self.dies_at:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(float(index * index))


class Stream(IterableDataset[Tensor]):
    """An iterable dataset."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.length):
            yield torch.tensor(float(index))
