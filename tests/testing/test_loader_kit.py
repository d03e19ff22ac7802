"""The recipes' loaders keep the laws of loaders."""

import copy
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stretto.echo import EchoLoader, EchoOptions, Even
from stretto_lab.recipes.batches import MicroBatches, reshard
from stretto_lab.recipes.blocks import Packed, Streams
from stretto_lab.recipes.corpus import Text
from stretto_lab.recipes.digits_resnet import DigitsResNet
from stretto_lab.recipes.stdlib_gpt import StdlibGPT
from stretto_lab.recipes.task import TaskConfig
from stretto_lab.recipes.text import Subwords
from tests.kit.loaders import loader_faults

SAMPLES, SIZE = 23, 3
PER_EPOCH = SAMPLES // SIZE
BYTES = Subwords.trained((), 257)


class Rows:
    """Every sample is a row of its own number."""

    def __len__(self) -> int:
        return SAMPLES

    def batch(self, indices: Tensor) -> Tensor:
        return indices.unsqueeze(1).repeat(1, 2)


def batches_of(rank: int, world_size: int) -> MicroBatches[Any]:
    return MicroBatches(Rows(), SIZE, rank=rank, world_size=world_size, seed=5)


@cache
def built(config: TaskConfig, rank: int, world_size: int) -> MicroBatches[Any]:
    """Return a recipe's loader, which nobody advances."""
    return config.build(rank, world_size, seed=5, updates=None).loader


def recipes(config: TaskConfig, rank: int, world_size: int) -> MicroBatches[Any]:
    return copy.copy(built(config, rank, world_size))


class Documents:
    """Every document is a parcel of one block of 8 tokens, its number and its end: so micro-batches never share one."""

    def __len__(self) -> int:
        return 70

    def __getitem__(self, indices: list[int]) -> dict[str, list[str]]:
        return {"text": [f"{index:07}" for index in indices]}


def packed(rank: int, world_size: int) -> Packed:
    streams = Streams(Documents(), "text", BYTES)
    return Packed(streams, length=8, size=1, rank=rank, world_size=world_size, seed=5)


def echoed(rank: int, world_size: int, options: EchoOptions | None = None) -> EchoLoader[Any]:
    return EchoLoader(batches_of(rank, world_size), Even(2), options=options or EchoOptions())


class Passes:
    """A loader that begins a new pass with every iterator, and counts passes at their ends."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.epoch, self.done, self.goes_on = rank, world_size, 0, 0, False

    def __len__(self) -> int:
        return len(range(self.rank, 7, self.world_size))

    def __iter__(self) -> Iterator[Tensor]:
        self.done, self.goes_on = self.done if self.goes_on else 0, False
        order = np.random.default_rng(self.epoch).permutation(7)[self.rank :: self.world_size].tolist()
        while self.done < len(order):
            self.done += 1
            yield torch.full((2, 2), order[self.done - 1])
        self.epoch, self.done = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.done, self.goes_on = state["epoch"], state["done"], True


def echoed_passes(rank: int, world_size: int) -> EchoLoader[Any]:
    return EchoLoader(Passes(rank, world_size), Even(2))


STDLIB = StdlibGPT(size="0.1m", context=64, batch=100, data=Text(megabytes=0.05))
PASSES: dict[str, Any] = {
    "endless": False,
    "goes_on": False,
    "samples_of": lambda batch: [int(batch[0, 0])],
}
SOUND: dict[str, tuple[Callable[[int, int], Any], int, dict[str, Any]]] = {
    "micro-batches": (batches_of, PER_EPOCH, {"ranks": (1, 2, 3, 4), "reshard": reshard}),
    "digits": (partial(recipes, DigitsResNet(batch=200)), 1438 // 200, {"reshard": reshard}),
    "stdlib": (partial(recipes, STDLIB), -1, {"reshard": reshard}),
    "packed": (
        packed,
        70,
        {
            "reshard": reshard,
            "samples_of": lambda batch: [BYTES.decode(row) for row in batch.inputs.tolist()],
        },
    ),
    "echoed": (echoed, PER_EPOCH, {"goes_on": False, "uses": 2}),
    "echoed updates": (
        partial(echoed, options=EchoOptions(micro_batches=2)),
        PER_EPOCH,
        {"goes_on": False, "uses": 2, "update": 2},
    ),
    "passes": (Passes, 7, PASSES),
    "echoed passes": (echoed_passes, 7, {**PASSES, "uses": 2}),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_loader_of_ours_keeps_the_laws(name: str) -> None:
    make, per_epoch, claims = SOUND[name]
    per_epoch = built(STDLIB, 0, 1).per_epoch if per_epoch < 0 else per_epoch
    assert loader_faults(make, per_epoch, **claims) == []
