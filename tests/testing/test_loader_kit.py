"""The recipes' loaders pass the kit for loaders, and each broken one fails the checks that it should."""

import copy
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stretto.echo import EchoLoader, EchoOptions, Even
from stretto.errors import ConformanceFailed
from stretto_lab.recipes.batches import MicroBatches, reshard
from stretto_lab.recipes.blocks import Packed, Streams
from stretto_lab.recipes.corpus import Text
from stretto_lab.recipes.digits_resnet import DigitsResNet
from stretto_lab.recipes.stdlib_gpt import StdlibGPT
from stretto_lab.recipes.task import TaskConfig
from stretto_lab.recipes.text import BytePairs
from stretto_lab.testing import LoaderConformance

SAMPLES, SIZE = 23, 3
BYTES = BytePairs((), 257)


class Rows:
    """Every sample is a row of its own number."""

    def __len__(self) -> int:
        return SAMPLES

    def batch(self, indices: Tensor) -> Tensor:
        return indices.unsqueeze(1).repeat(1, 2)


class TestMicroBatches(LoaderConformance):
    per_epoch = SAMPLES // SIZE
    world_sizes = (1, 2, 3, 4)
    reshards = True
    kind: type[MicroBatches[Any]] = MicroBatches

    def make_loader(self, rank: int, world_size: int) -> MicroBatches[Any]:
        return self.kind(Rows(), SIZE, rank=rank, world_size=world_size, seed=5)

    def reshard(self, states: Sequence[Any], rank: int, world_size: int) -> Any:
        return reshard(states, rank, world_size)


class TestLoaderWithAnEnd(TestMicroBatches):
    endless = False

    def make_loader(self, rank: int, world_size: int) -> MicroBatches[Any]:
        end = self.per_epoch
        return MicroBatches(Rows(), SIZE, rank=rank, world_size=world_size, seed=5, micro_batches=end)


@cache
def built(config: TaskConfig, rank: int, world_size: int) -> MicroBatches[Any]:
    """Return a recipe's loader, which nobody advances."""
    return config.build(rank, world_size, seed=5, updates=None).loader


class TestDigitsLoader(TestMicroBatches):
    config: TaskConfig = DigitsResNet(batch=200)
    per_epoch = 1438 // 200

    def make_loader(self, rank: int, world_size: int) -> MicroBatches[Any]:
        return copy.copy(built(self.config, rank, world_size))


class TestStdlibLoader(TestDigitsLoader):
    config = StdlibGPT(size="0.1m", context=64, batch=100, data=Text(megabytes=0.05))

    @property
    def per_epoch(self) -> int:
        return built(self.config, 0, 1).per_epoch


class Documents:
    """Every document is a parcel of one block of 8 tokens, its number and its end: so micro-batches never share one."""

    def __len__(self) -> int:
        return 70

    def __getitem__(self, indices: list[int]) -> dict[str, list[str]]:
        return {"text": [f"{index:07}" for index in indices]}


class TestPackedLoader(LoaderConformance):
    per_epoch = 70
    reshards = True

    def make_loader(self, rank: int, world_size: int) -> Packed:
        streams = Streams(Documents(), "text", BYTES)
        return Packed(streams, length=8, size=1, rank=rank, world_size=world_size, seed=5)

    def samples_of(self, batch: Any) -> list[str]:
        return [BYTES.decode(row) for row in batch.inputs.tolist()]

    def reshard(self, states: Sequence[Any], rank: int, world_size: int) -> Any:
        return reshard(states, rank, world_size)


class TestEchoLoader(TestMicroBatches):
    goes_on = False
    uses = 2
    reshards = False

    def make_loader(self, rank: int, world_size: int) -> EchoLoader[Any]:
        return EchoLoader(super().make_loader(rank, world_size), Even(2))


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
        self.end()

    def end(self) -> None:
        self.epoch, self.done = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.done, self.goes_on = state["epoch"], state["done"], True


class TestPasses(LoaderConformance):
    per_epoch = 7
    endless = goes_on = False
    kind: type[Passes] = Passes

    def make_loader(self, rank: int, world_size: int) -> Any:
        return self.kind(rank, world_size)

    def samples_of(self, batch: Any) -> list[int]:
        return [int(batch[0, 0])]


class TestEchoedPasses(TestPasses):
    uses = 2

    def make_loader(self, rank: int, world_size: int) -> Any:
        return EchoLoader(self.kind(rank, world_size), Even(2))


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


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (CountsEndsNowhere, "rank 0 of 1, a pass after the end: expected as micro-batch 0"),
        (LiesAboutItsLength, "micro-batches of a loader whose len() is 8: expected 8, found 7"),
        (ComesBack, "ends found by asking three times after 7 micro-batches: expected 3, found 0"),
    ],
)
def test_a_loader_whose_end_is_none_fails_the_check_of_ends(kind: type[Passes], message: str) -> None:
    kit = TestPasses()
    kit.kind = kind
    with pytest.raises(ConformanceFailed, match=re.escape(message)):
        kit.test_a_pass_ends_once_and_its_end_is_a_place_to_go_on_from()


class TestEchoLoaderOfUpdates(TestEchoLoader):
    update = 2

    def make_loader(self, rank: int, world_size: int) -> EchoLoader[Any]:
        options = EchoOptions(micro_batches=2)
        return EchoLoader(TestMicroBatches.make_loader(self, rank, world_size), Even(2), options=options)


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
    (
        ForgetsItsPosition,
        "test_resumed_at_every_position",
        "from 1 on, resumed there: expected as micro-batch 0",
    ),
    (ForgetsItsPosition, "test_a_state_can_be_stored", "resumed from a stored state"),
    (CountsTooLate, "test_resumed_at_every_position", "from 1 on, resumed there"),
    (CountsTooLate, "test_a_second_iterator", "two loops of 2 and 3 micro-batches"),
    (AddsUpPositions, "test_loading_replaces", "rank 0 of 1, gone back"),
    (RepeatsASample, "test_ranks_share_every_epoch", "expected no sample twice, found 1 of 21 again"),
    (IgnoresItsRank, "test_ranks_share_every_epoch", "one epoch on 2 ranks: expected no sample twice"),
    (KeepsOneOrder, "test_epochs_follow", "with shuffles = True: found the same order"),
    (AsksTheProcess, "test_the_order_does_not_depend", "with seed 1 in the process"),
    (HandsOutItsState, "test_a_state_can_be_stored", "from a state taken before the loader went on"),
    (WritesOverBatches, "test_a_batch_stays_as_it_was", "batches kept while the loader goes on"),
    (MovesWhenAsked, "test_asking_for_the_state", "asked for its state in between"),
    (StopsAfterAnEpoch, "test_epochs_follow", "micro-batches of epoch 1: expected 7, found 0"),
]


@pytest.mark.parametrize(
    ("kind", "check", "message"), BROKEN, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_broken_loader_fails_the_check_that_names_its_fault(
    kind: type[MicroBatches[Any]], check: str, message: str
) -> None:
    kit = TestMicroBatches()
    kit.kind = kind
    (name,) = (name for name in kit.checks() if name.startswith(check))
    with pytest.raises(ConformanceFailed, match=re.escape(message)):
        getattr(kit, name)()


class ForgetsTheTotal(TestMicroBatches):
    __test__ = False

    def reshard(self, states: Sequence[Any], rank: int, world_size: int) -> Any:
        begin = self.make_loader(rank, world_size).state_dict()
        return {**begin, "consumed": states[0]["consumed"]}


def test_a_wrong_reshard_shows_between_different_numbers_of_ranks_only() -> None:
    ((check, message),) = ForgetsTheTotal().failures().items()
    assert check == "test_another_number_of_ranks_goes_on_with_the_unseen"
    assert "from 1 to 2 ranks" in message
