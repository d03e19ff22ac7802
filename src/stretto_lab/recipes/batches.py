"""Micro-batches in one seeded global order, dealt to the ranks in rotation; a saved state can resume at any of them.

Seed and epoch give a permutation of the samples. The micro-batches of an epoch are consecutive runs of `size`
samples; an incomplete last run is skipped. Epochs follow each other without end. Of `W` ranks, rank `r` takes the
micro-batches `r, r + W, r + 2W, ...` of this order. So an update of `m` micro-batches, all ranks together, sees the
same samples at every world size that divides `m`. If it does not, ranks share the micro-batches of every update one
after another.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from stretto import errors
from stretto_lab.lifeline import end_with_parent

Batch = TypeVar("Batch")
BatchOut = TypeVar("BatchOut", covariant=True)


class Samples(Protocol[BatchOut]):
    """A fixed set of samples, read by index."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> BatchOut:
        """Return the samples `indices` (int64, one dimension) as one micro-batch, in new storage."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Deal:
    """The remaining places of the global order, and the rank for each."""

    world_size: int
    """Number of ranks."""
    update: int
    """Micro-batches of all ranks together after which the rotation starts again at rank 0."""
    frontier: int = 0
    """The first place that no rank has passed."""
    skipped: tuple[int, ...] = ()
    """Places before the frontier whose micro-batches were not used: in an earlier deal some ranks were further than
    others."""

    def place(self, index: int) -> int:
        """Return the place of a remaining micro-batch, counted in order."""
        return self.skipped[index] if index < len(self.skipped) else self.frontier + index - len(self.skipped)

    def leaves(self, place: int) -> bool:
        """Return whether no rank has taken the micro-batch at this place."""
        return place >= self.frontier or place in self.skipped

    def index(self, rank: int, taken: int) -> int:
        """Return the place of the micro-batch that a rank takes after `taken` others, among the remaining ones."""
        updates, turn = divmod(taken, len(range(rank, self.update, self.world_size)))
        return updates * self.update + rank + turn * self.world_size

    def again(self, consumed: Sequence[int], world_size: int, update: int) -> "Deal":
        """Return the deal of the remaining micro-batches after every rank has consumed its number."""
        following = [self.index(rank, taken) for rank, taken in enumerate(consumed)]
        begin = min(following)  # all before it was taken by whoever had it
        taken = {
            index
            for rank, count in enumerate(consumed)
            for index in itertools.takewhile(
                lambda index: index >= begin, (self.index(rank, one) for one in range(count - 1, -1, -1))
            )
        }
        end = max(len(self.skipped), begin, *(index + 1 for index in taken))
        return Deal(
            world_size=world_size,
            update=update,
            frontier=self.frontier + end - len(self.skipped),
            skipped=tuple(self.place(index) for index in range(begin, end) if index not in taken),
        )


class MicroBatches(Generic[Batch]):
    """One rank's share of the global order, without end.

    Args:
        samples: What the micro-batches are made of.
        size: Samples per micro-batch.
        rank: This rank, from 0.
        world_size: Number of ranks that share the order.
        seed: Decides the order; not negative, equal on every rank.
        workers: Processes that call `samples.batch` ahead of the loop; 0 calls it in the loop. The order and the
            saved states are the same. An iterator with workers runs ahead: begin another iterator, or load a state,
            only after its end.

    Raises:
        ConfigError: There are fewer samples than one micro-batch needs, or a number is out of its range.
    """

    def __init__(
        self,
        samples: Samples[Batch],
        size: int,
        *,
        rank: int,
        world_size: int,
        seed: int,
        workers: int = 0,
    ) -> None:
        if size < 1 or len(samples) < size:
            raise errors.ConfigError(
                f"a micro-batch of {size} samples cannot be drawn from {len(samples)} samples: "
                "it must be at least 1 and at most all of them"
            )
        if not 0 <= rank < world_size:
            raise errors.ConfigError(f"rank {rank} is not one of the {world_size} ranks 0..{world_size - 1}")
        if seed < 0:
            raise errors.ConfigError(f"the seed of the data order must not be negative, found {seed}")
        self.samples = samples
        self.size = size
        self.rank = rank
        self.seed = seed
        self.workers = workers
        self.per_epoch = len(samples) // size
        self.consumed = 0
        self._deal = Deal(world_size=world_size, update=world_size)
        self._order = (-1, torch.empty(0, dtype=torch.int64))

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._read_ahead() if self.workers else self._read():
            self.consumed += 1  # before the batch is given out: a state saved while it is in use counts it
            yield batch

    def at(self, rank: int, world_size: int) -> "MicroBatches[Batch]":
        """Return the same order from its beginning for another rank and world size; nothing is read or built."""
        return MicroBatches(
            self.samples, self.size, rank=rank, world_size=world_size, seed=self.seed, workers=self.workers
        )

    def _read(self) -> Iterator[Batch]:
        while True:
            yield self.samples.batch(self._indices(self.position))

    def _read_ahead(self) -> Iterable[Batch]:
        return DataLoader(
            _Reading(self.samples),  # type: ignore[arg-type]  # DataLoader needs __getitem__ alone
            sampler=map(self._indices, map(self._place, itertools.count(self.consumed))),
            batch_size=None,
            num_workers=self.workers,
            worker_init_fn=_begin_reading,
            # A rank comes from a fork server, and would start another one, which imports everything anew.
            multiprocessing_context="fork",
            generator=torch.Generator(),  # or it would draw from the model's, once per start
        )

    @property
    def position(self) -> int:
        """Index of this rank's next micro-batch in the global order."""
        return self._place(self.consumed)

    def _place(self, taken: int) -> int:
        return self._deal.place(self._deal.index(self.rank, taken))

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of this rank, and the settings of the order."""
        return {
            "seed": self.seed,
            "per_epoch": self.per_epoch,
            "world_size": self._deal.world_size,
            "rank": self.rank,
            "consumed": self.consumed,
            "deal": asdict(self._deal),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the saved loader of this rank stopped.

        Raises:
            ConfigError: The state belongs to another order, rank or world size (`reshard` it first).
        """
        found = self.state_dict()
        differing = [key for key in found if key not in ("consumed", "deal") and state.get(key) != found[key]]
        if differing:
            saved = ", ".join(f"{key} {state.get(key)}" for key in differing)
            here = ", ".join(f"{key} {found[key]}" for key in differing)
            raise errors.ConfigError(
                f"rank {self.rank}: the saved data order does not continue here: saved with {saved}, "
                f"now {here}; use the same seed, data and micro-batch size, and `reshard` for other ranks"
            )
        self.consumed = int(state["consumed"])
        self._deal = _deal_of(state)

    def _indices(self, position: int) -> Tensor:
        epoch, index = divmod(position, self.per_epoch)
        if self._order[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.samples))
            self._order = (epoch, torch.from_numpy(order))
        return self._order[1][index * self.size : (index + 1) * self.size]


def _begin_reading(number: int) -> None:
    """Start a process that reads ahead, and end it with its rank; PyTorch alone would take up to five seconds."""
    end_with_parent()


@dataclass(frozen=True, slots=True)
class _Reading(Generic[Batch]):
    """A worker process's copy of the data."""

    samples: Samples[Batch]

    def __getitem__(self, indices: Tensor) -> Batch:
        return self.samples.batch(indices)


def _deal_of(state: dict[str, Any]) -> Deal:
    deal = state["deal"]
    return Deal(**{**deal, "skipped": tuple(deal["skipped"])})


def reshard(
    states: Sequence[dict[str, Any]], rank: int, world_size: int, update: int | None = None
) -> dict[str, Any]:
    """Return the loader state for `rank` of `world_size`, from the saved states of all ranks.

    At the same world size this is the rank's own state. At another world size, the new ranks take exactly the
    micro-batches that no rank had taken, in order, even if some ranks were further than others.

    Args:
        states: `state_dict()` of every rank of the saved run, in rank order.
        rank: The rank that continues.
        world_size: Number of ranks that continue.
        update: Micro-batches of all ranks together in an update, if ranks have unequally many; None if they have
            equally many.

    Raises:
        ConfigError: The states are not those of all ranks of one run, in rank order.
    """
    orders = {(state["seed"], state["per_epoch"], state["world_size"]) for state in states}
    ranks = [state["rank"] for state in states]
    if len(orders) != 1 or ranks != list(range(states[0]["world_size"])):
        raise errors.ConfigError(
            f"expected the loader states of all ranks of one run in rank order, found ranks {ranks} with "
            f"(seed, micro-batches per epoch, world size) {sorted(orders)}"
        )
    if world_size == len(states):
        return dict(states[rank])
    consumed = [state["consumed"] for state in states]
    deal = _deal_of(states[0]).again(consumed, world_size, update or world_size)
    told = sorted(tuple(one) for state in states for one in state.get("begun", ()))
    # Who gave most, tells last.
    begun = [[place, given] for place, given in dict(told).items() if deal.leaves(place)]
    return {
        **states[0],
        **({"begun": begun} if "begun" in states[0] else {}),
        "rank": rank,
        "world_size": world_size,
        "consumed": 0,
        "deal": asdict(deal),
    }
