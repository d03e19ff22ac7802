"""The random states of a process: generators of PyTorch, NumPy and Python, from which a forward pass may draw.

`random_states` copies it, to be kept or saved. `RandomStatesByRank` gives each rank of one process its own state.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_states(device: torch.device) -> dict[str, Any]:
    """Return copies of the states of torch, of `device`, of NumPy and of Python; checkpoints hold this dict."""
    own = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in its stub
    is_usual = isinstance(own, np.random.MT19937)  # NumPy warns where another is asked for a tuple
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": np.random.get_state() if is_usual else np.random.get_state(legacy=False),
        "python": random.getstate(),
    }


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore `states`; the state of a device only if `device` is of its type."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])


def written_random_states(device: torch.device) -> dict[str, Any]:
    """Return `random_states` as checkpoints hold them: hundreds of words in a tensor, which is quick to pack."""
    states = random_states(device)
    version, words, *gauss = states["python"]
    states["python"] = [version, torch.tensor(words), *gauss]
    if isinstance(states["numpy"], tuple):  # a generator that the user has chosen returns a dictionary
        name, words, *rest = states["numpy"]
        states["numpy"] = [name, torch.from_numpy(words.astype(np.int64)), *rest]
    return states


def read_random_states(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `random_states` from which `written_random_states` was made."""
    states = dict(written)
    version, words, *gauss = states["python"]
    states["python"] = version, tuple(words.tolist()), *gauss
    if isinstance(states["numpy"], list):
        name, words, *rest = states["numpy"]
        states["numpy"] = name, words.numpy().astype(np.uint32), *rest
    return states


@contextmanager
def kept_random_states(device: torch.device) -> Iterator[None]:
    """Restore the random states of the host and `device` after the block."""
    states = random_states(device)
    try:
        yield
    finally:
        restore_random_states(states, device)


class RandomStatesByRank:
    """The states of torch, NumPy and Python of several ranks that alternate in one process.

    A rank starts as if it were seeded with its number, regardless of earlier draws of the process, so that a program
    without a seed is reproducible too. NumPy's generator is exchanged as an object, in 0.2 µs instead of 130 for
    copying its state, because ranks alternate at every collective.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, ...]] = {}
        self._before = _exchangeable_states()
        self._rank: int | None = None

    def hand_to(self, rank: int) -> None:
        """Restore the states of `rank`, and keep those of the current rank."""
        if rank == self._rank:
            return
        if self._rank is not None:
            self._kept[self._rank] = _exchangeable_states()
        self._rank = rank
        if rank in self._kept:
            _exchange(*self._kept[rank])
            return
        torch.default_generator.manual_seed(rank)
        np.random.set_bit_generator(np.random.MT19937(rank))  # type: ignore[attr-defined]  # not in its stub
        random.seed(rank)

    def give_back(self) -> None:
        """Restore the process's own states."""
        _exchange(*self._before)


def _exchangeable_states() -> tuple[Any, ...]:
    numpy_generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in its stub
    return torch.default_generator.get_state(), numpy_generator, random.getstate()


def _exchange(torch_state: torch.Tensor, numpy_generator: Any, python_state: tuple[Any, ...]) -> None:
    torch.default_generator.set_state(torch_state)
    np.random.set_bit_generator(numpy_generator)  # type: ignore[attr-defined]  # not in its stub
    random.setstate(python_state)
