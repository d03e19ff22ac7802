"""The kit for resumable loaders: the order of the data is always the same, also after a loader is resumed."""

import copy
import dataclasses
import random
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from stretto.errors import ConformanceFailed
from stretto.packed import pack, unpack
from stretto_lab.testing.conformance import Conformance, expect

_END = object()


class LoaderConformance(Conformance):
    """Checks a loader of micro-batches whose position can be saved: `__iter__`, `state_dict`, `load_state_dict`.

        class TestMyLoader(LoaderConformance):
            per_epoch = 7
            def make_loader(self, rank, world_size):
                return MyLoader(data, seed=0, rank=rank, world_size=world_size)

    Loaders are compared by what their micro-batches hold (`content_of`).
    """

    per_epoch: ClassVar[int]
    """Micro-batches of one epoch, all ranks together."""
    world_sizes: ClassVar[Sequence[int]] = (1, 2, 3)
    """Among how many ranks the data are dealt."""
    endless: ClassVar[bool] = True
    """Whether epochs follow each other in one iteration; otherwise it ends with the first."""
    goes_on: ClassVar[bool] = True
    """Whether a second iterator goes on where the first stopped; otherwise it begins a new pass."""
    uses: ClassVar[int] = 1
    """How often micro-batches are handed out, by a loader that echoes."""
    update: ClassVar[int] = 1
    """Micro-batches after which such a loader begins again with the first of them: those of an update. What there is at
    the end of an epoch and fills no update is handed out once."""
    shuffles: ClassVar[bool] = True
    """Whether every epoch has an order of its own."""
    reshards: ClassVar[bool] = False
    """Whether a run may go on with another number of ranks; then `reshard` says how."""

    def make_loader(self, rank: int, world_size: int) -> Any:
        """Return a new loader of one rank, at its start; the same data and seed every time."""
        raise NotImplementedError("a kit for loaders needs make_loader(rank, world_size)")

    def samples_of(self, batch: Any) -> Iterable[Hashable]:
        """Return what tells the samples of a micro-batch apart; by default its rows."""
        return rows_of(batch)

    def reshard(self, states: Sequence[Any], rank: int, world_size: int) -> Any:
        """Return the state with which `rank` of `world_size` goes on from the states of all former ranks."""
        raise NotImplementedError("a loader that reshards needs reshard(states, rank, world_size)")

    def test_resumed_at_every_position_it_goes_on_as_if_uninterrupted(self) -> None:
        """Saved after every micro-batch of more than an epoch, loaded by a new loader."""
        for rank, world_size in self._seats():
            own = self.per_epoch // world_size
            length = self.uses * own - (self.uses - 1) * (own % self.update) + (3 if self.endless else 0)
            whole = self._take(self.make_loader(rank, world_size), length + 3)
            running = self.make_loader(rank, world_size)
            batches = iter(running)
            for position in range(length):
                resumed = self.make_loader(rank, world_size)
                resumed.load_state_dict(running.state_dict())
                self._same(
                    f"rank {rank} of {world_size}, micro-batches from {position} on, resumed there",
                    whole[position : position + 3],
                    self._take(resumed, 3),
                )
                next(batches, None)

    def test_a_pass_ends_once_and_its_end_is_a_place_to_go_on_from(self) -> None:
        """Asked after its last micro-batch it ends, and asked again too; a new pass begins at its state there."""
        if self.endless:
            return
        for rank, world_size in self._seats():
            loader, name = self.make_loader(rank, world_size), f"rank {rank} of {world_size}"
            batches = iter(loader)
            given = len(self._take(batches, self.uses * self.per_epoch + 1))
            ends = sum(next(batches, _END) is _END for _ in range(3))
            expect(f"{name}, ends found by asking three times after {given} micro-batches", 3, ends)
            if (length := _length_of(loader)) is not None:
                expect(f"{name}, micro-batches of a loader whose len() is {length}", length, given)
            resumed = self.make_loader(rank, world_size)
            resumed.load_state_dict(copy.deepcopy(loader.state_dict()))
            self._same(f"{name}, a pass after the end", self._take(loader, given), self._take(resumed, given))

    def test_loading_replaces_whatever_was_there(self) -> None:
        """A loader that has gone on by itself returns to what it is told."""
        for rank, world_size in self._seats():
            loader = self.make_loader(rank, world_size)
            batches = iter(loader)
            next(batches)
            state = copy.deepcopy(loader.state_dict())
            expected = self._take(batches, 4)
            loader.load_state_dict(state)
            self._same(f"rank {rank} of {world_size}, gone back", expected, self._take(loader, 4))

    def test_a_second_iterator_goes_on_where_the_first_stopped(self) -> None:
        """A loop that is left and entered again sees every micro-batch once."""
        if not self.goes_on:
            return
        whole = self._take(self.make_loader(0, 1), 5)
        loader = self.make_loader(0, 1)
        self._same("two loops of 2 and 3 micro-batches", whole, self._take(loader, 2) + self._take(loader, 3))

    def test_a_state_can_be_stored_and_is_not_changed_by_going_on(self) -> None:
        """Through `torch.save` and back; a state is a record, not a view of the loader."""
        loader = self.make_loader(0, 1)
        batches = iter(loader)
        self._take(batches, 2)
        state = loader.state_dict()
        stored = pack(state, "the state")
        self._take(batches, 2)
        resumed = self.make_loader(0, 1)
        resumed.load_state_dict(unpack(stored, "the state"))
        later = self.make_loader(0, 1)
        later.load_state_dict(state)
        expected = self._take(self.make_loader(0, 1), 5)[2:]
        self._same("resumed from a stored state", expected, self._take(resumed, 3))
        self._same("resumed from a state taken before the loader went on", expected, self._take(later, 3))

    def test_asking_for_the_state_changes_nothing(self) -> None:
        """Asked before, between and twice: the order is the same."""
        asked = self.make_loader(0, 1)
        found = []
        asked.state_dict()
        for batch in islice(asked, 5):
            asked.state_dict()
            asked.state_dict()
            found.append(content_of(batch))
        self._same("asked for its state in between", self._take(self.make_loader(0, 1), 5), found)

    def test_the_order_does_not_depend_on_who_asks(self) -> None:
        """Neither on the random states of the process, nor on another loader that runs beside it."""
        expected = self._take(self.make_loader(0, 1), 6)
        states = torch.get_rng_state(), np.random.get_state(), random.getstate()
        try:
            for seed in (1, 2):
                torch.manual_seed(seed)
                np.random.seed(seed)
                random.seed(seed)
                self._same(
                    f"with seed {seed} in the process", expected, self._take(self.make_loader(0, 1), 6)
                )
        finally:
            torch.set_rng_state(states[0])
            np.random.set_state(states[1])
            random.setstate(states[2])
        together = [iter(self.make_loader(0, 1)) for _ in range(2)]
        found = [[content_of(next(loader)) for loader in together] for _ in range(6)]
        for column in range(2):
            self._same("beside another loader", expected, [row[column] for row in found])

    def test_a_batch_stays_as_it_was(self) -> None:
        """Later micro-batches must not be written over earlier ones, which may still be in use."""
        batches = list(islice(self.make_loader(0, 1), 4))
        self._same("batches kept while the loader goes on", self._take(self.make_loader(0, 1), 4),
                   [content_of(batch) for batch in batches])  # fmt: skip

    def test_ranks_share_every_epoch_without_overlap(self) -> None:
        """All ranks together see what a lone rank sees, each sample of an epoch once."""
        alone = self._epoch(1)
        expect("micro-batches of one epoch that a lone rank sees", self.per_epoch, len(alone))
        for world_size in self.world_sizes:
            samples = list(chain.from_iterable(self._epoch(world_size)))
            twice = len(samples) - len(set(samples))
            if twice:
                raise ConformanceFailed(
                    f"one epoch on {world_size} ranks: expected no sample twice, found {twice} of {len(samples)} again"
                )
            others = set(chain.from_iterable(alone)) ^ set(samples)
            if others:
                raise ConformanceFailed(
                    f"one epoch on {world_size} ranks: expected the samples that a lone rank sees, found {len(others)} "
                    "that only one of them sees"
                )

    def test_epochs_follow_each_other_in_orders_of_their_own(self) -> None:
        """Each sample once per epoch; another order in the next, unless the loader says that it keeps one."""
        if not self.endless:
            return
        first, second = self._epoch(1, 0), self._epoch(1, 1)
        for number, epoch in enumerate((first, second)):
            expect(f"micro-batches of epoch {number}", self.per_epoch, len(epoch))
            samples = list(chain.from_iterable(epoch))
            expect(f"different samples in epoch {number}", len(samples), len(set(samples)))
        if (first != second) != self.shuffles:
            kept = "the same order" if first == second else "another order"
            raise ConformanceFailed(
                f"the second epoch, with shuffles = {self.shuffles}: found {kept} as the first"
            )

    def test_another_number_of_ranks_goes_on_with_the_unseen(self) -> None:
        """Where it is promised: the next micro-batches of all ranks are the next of the one order."""
        if not self.reshards:
            return
        for before in self.world_sizes:
            for after in self.world_sizes:
                self._expect_unseen(before, after)

    def _expect_unseen(self, before: int, after: int) -> None:
        each = 3
        stopped = [self.make_loader(rank, before) for rank in range(before)]
        for loader in stopped:
            self._take(loader, each)
        states = [loader.state_dict() for loader in stopped]
        found = []
        for rank in range(after):
            resumed = self.make_loader(rank, after)
            resumed.load_state_dict(self.reshard(states, rank, after))
            found += self._take(resumed, 1)
        expected = self._take(self.make_loader(0, 1), before * each + after)[before * each :]
        self._same(f"from {before} to {after} ranks", sorted(expected, key=repr), sorted(found, key=repr))

    def _seats(self) -> list[tuple[int, int]]:
        return [(rank, world_size) for world_size in self.world_sizes for rank in range(world_size)]

    def _take(self, loader: Iterable[Any], count: int) -> list[Hashable]:
        return [content_of(batch) for batch in islice(loader, count)]

    def _epoch(self, world_size: int, number: int = 0) -> list[list[Hashable]]:
        """Return the samples of every micro-batch of an epoch, in the order in which ranks take them in turn."""
        shares = [self.make_loader(rank, world_size) for rank in range(world_size)]
        loaders = [self._first_uses(share) for share in shares]
        turns = (next(loaders[turn % world_size], None) for turn in range(self.per_epoch * (number + 1)))
        batches = list(turns)[self.per_epoch * number :]
        return [list(self.samples_of(batch)) for batch in batches if batch is not None]

    def _first_uses(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the micro-batches that are handed out for the first time."""
        for position, batch in enumerate(loader):
            if position // self.update % self.uses == 0:
                yield batch

    def _same(self, what: str, expected: Sequence[Hashable], found: Sequence[Hashable]) -> None:
        if len(expected) != len(found):
            raise ConformanceFailed(f"{what}: expected {len(expected)} micro-batches, found {len(found)}")
        for number, (left, right) in enumerate(zip(expected, found, strict=True)):
            if left != right:
                raise ConformanceFailed(
                    f"{what}: expected as micro-batch {number} {_shortened(left)}, found {_shortened(right)}"
                )


def _length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def content_of(batch: Any) -> Hashable:
    """Return what a micro-batch holds, as values that can be compared; tensors with dtype and shape."""
    if isinstance(batch, Tensor):
        return (str(batch.dtype), tuple(batch.shape), tuple(batch.flatten().tolist()))
    if isinstance(batch, np.ndarray):
        return content_of(torch.from_numpy(batch))
    if isinstance(batch, Mapping):
        return tuple((key, content_of(value)) for key, value in batch.items())
    if isinstance(batch, list | tuple):
        return tuple(content_of(value) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return tuple(content_of(getattr(batch, field.name)) for field in dataclasses.fields(batch))
    return batch if isinstance(batch, Hashable) else repr(batch)


def rows_of(batch: Any) -> list[Hashable]:
    """Return the rows of the first tensor in a micro-batch, or the entries of a list of plain values."""
    if isinstance(batch, Tensor):
        return [content_of(row) for row in batch]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple) and batch:
        return rows_of(batch[0]) if isinstance(batch[0], Tensor | Mapping | list | tuple) else list(batch)
    return [content_of(batch)]


def _shortened(content: Hashable) -> str:
    text = repr(content)
    return text if len(text) <= 80 else f"{text[:80]}..."
