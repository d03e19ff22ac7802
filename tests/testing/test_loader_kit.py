"""The recipes' loaders keep the laws of loaders, and each broken one breaks the law that it should."""

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
from stretto_lab.recipes.text import BytePairs
from tests.kit.loaders import loader_faults

SAMPLES, SIZE = 23, 3
PER_EPOCH = SAMPLES // SIZE
BYTES = BytePairs((), 257)


class Rows:
    """Every sample is a row of its own number."""

    def __len__(self) -> int:
        return SAMPLES

    def batch(self, indices: Tensor) -> Tensor:
        return indices.unsqueeze(1).repeat(1, 2)


def batches_of(
    rank: int, world_size: int, kind: type[MicroBatches[Any]] = MicroBatches, **options: Any
) -> MicroBatches[Any]:
    return kind(Rows(), SIZE, rank=rank, world_size=world_size, seed=5, **options)


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

    lies = 0

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.epoch, self.done, self.goes_on = rank, world_size, 0, 0, False

    def __len__(self) -> int:
        return len(range(self.rank, 7, self.world_size)) + self.lies

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
    "micro-batches with an end": (
        partial(batches_of, micro_batches=PER_EPOCH),
        PER_EPOCH,
        {"endless": False},
    ),
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


class CountsEndsNowhere(Passes):
    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict({**state, "epoch": 0})


class LiesAboutItsLength(Passes):
    lies = 1


class ComesBack(Passes):
    def __iter__(self) -> Any:
        return ComingBack(super().__iter__(), self)


class ComingBack:
    """An iterator that begins anew when it is asked behind its end."""

    def __init__(self, batches: Iterator[Tensor], loader: Passes) -> None:
        self.batches, self.loader = batches, loader

    def __iter__(self) -> "ComingBack":
        return self

    def __next__(self) -> Tensor:
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = Passes.__iter__(self.loader)
            raise


class ForgetsItsPosition(MicroBatches[Any]):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class CountsTooLate(MicroBatches[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.samples.batch(self._indices(self.position))
            self.consumed += 1


class AddsUpPositions(MicroBatches[Any]):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.consumed += state["consumed"]


class RepeatsASample(MicroBatches[Any]):
    def _indices(self, position: int) -> Tensor:
        indices = super()._indices(position).clone()
        if position % self.per_epoch == 4:
            indices[-1] = super()._indices(position - 1)[0]
        return indices


class IgnoresItsRank(MicroBatches[Any]):
    @property
    def position(self) -> int:
        return self._deal.place(self._deal.index(0, self.consumed))


class KeepsOneOrder(MicroBatches[Any]):
    def _indices(self, position: int) -> Tensor:
        return super()._indices(position % self.per_epoch)


class AsksTheProcess(MicroBatches[Any]):
    def _indices(self, position: int) -> Tensor:
        epoch, index = divmod(position, self.per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, torch.from_numpy(np.random.permutation(SAMPLES)))
        return self._order[1][index * self.size : (index + 1) * self.size]


class HandsOutItsState(MicroBatches[Any]):
    def state_dict(self) -> dict[str, Any]:
        self.__dict__["state"] = self.__dict__.get("state", {})
        self.__dict__["state"].update(super().state_dict())
        return self.__dict__["state"]

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.state_dict()
            yield batch


class WritesOverBatches(MicroBatches[Any]):
    def __iter__(self) -> Iterator[Any]:
        buffer = torch.empty(SIZE, 2, dtype=torch.int64)
        for batch in super().__iter__():
            yield buffer.copy_(batch)


class MovesWhenAsked(MicroBatches[Any]):
    def state_dict(self) -> dict[str, Any]:
        self.consumed += 1
        return super().state_dict()


class StopsAfterAnEpoch(MicroBatches[Any]):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch
            if self.position >= self.per_epoch:
                return


BROKEN = [
    (CountsEndsNowhere, "rank 0 of 1, a pass after the end"),
    (LiesAboutItsLength, "micro-batches of a loader whose len() is 8: found 7"),
    (ComesBack, "ends found by asking three times after 7 micro-batches: expected 3, found 0"),
    (ForgetsItsPosition, "rank 0 of 1, resumed at 1: 0:"),
    (ForgetsItsPosition, "resumed from a state stored and read"),
    (CountsTooLate, "rank 0 of 1, resumed at 1:"),
    (CountsTooLate, "two loops of 2 and 3"),
    (AddsUpPositions, "rank 0 of 1, gone back"),
    (RepeatsASample, "an epoch on 1 ranks: expected no sample twice"),
    (IgnoresItsRank, "an epoch on 2 ranks: expected no sample twice"),
    (KeepsOneOrder, "the second epoch has the order of the first"),
    (AsksTheProcess, "with seed 1 in the process"),
    (HandsOutItsState, "resumed from a state before the loader went on"),
    (WritesOverBatches, "batches kept while the loader goes on"),
    (MovesWhenAsked, "asked for its state in between"),
    (StopsAfterAnEpoch, "micro-batches of another epoch: expected 7, found 0"),
]


@pytest.mark.parametrize(("kind", "words"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_loader_breaks_the_law_that_names_its_fault(kind: Any, words: str) -> None:
    if issubclass(kind, Passes):
        faults = loader_faults(kind, 7, ranks=(1, 2), **PASSES)
    else:
        faults = loader_faults(partial(batches_of, kind=kind), PER_EPOCH, ranks=(1, 2))
    assert any(text.startswith(words) for text in faults), faults


def test_a_wrong_reshard_shows_between_different_numbers_of_ranks_only() -> None:
    def forgets_the_total(states: Any, rank: int, world_size: int) -> Any:
        return {**batches_of(rank, world_size).state_dict(), "consumed": states[0]["consumed"]}

    faults = loader_faults(batches_of, PER_EPOCH, reshard=forgets_the_total)
    assert faults[0].startswith("from 1 to 2 ranks")
    assert all(text.startswith("from ") for text in faults)
