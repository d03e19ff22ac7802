"""Micro-batches in one seeded global order, dealt to the ranks in turn; a saved state continues at any of them.

Seed and epoch give a permutation of the samples. The micro-batches of an epoch are consecutive runs of `size` samples;
an incomplete last run is left out. Epochs follow each other without end. Of `W` ranks, rank `r` takes the
micro-batches `r, r + W, r + 2W, ...` of this order. So an update of `m` micro-batches, all ranks together, sees the
same samples at every world size that divides `m`.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from stretto import errors

Batch = TypeVar("Batch")
BatchOut = TypeVar("BatchOut", covariant=True)


class Samples(Protocol[BatchOut]):
    """A fixed set of samples, read by index."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> BatchOut:
        """Return the samples `indices` (int64, one dimension) as one micro-batch, in new storage."""
        ...


class MicroBatches(Generic[Batch]):
    """One rank's share of the global order.

    Args:
        samples: What the micro-batches are made of.
        size: Samples per micro-batch.
        rank: This rank, from 0.
        world_size: Number of ranks that share the order.
        seed: Decides the order; not negative, equal on every rank.
        micro_batches: Length of the global order, all ranks together; None never ends. Where the world size
            does not divide it, the first ranks get one more.
        workers: Processes that call `samples.batch` ahead of the loop; 0 calls it in the loop. The order and the
            saved states are the same. An iterator with workers goes its own way: begin another, or load a state, only
            where it is left.

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
        micro_batches: int | None = None,
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
        self.world_size = world_size
        self.seed = seed
        self.micro_batches = micro_batches
        self.workers = workers
        self.per_epoch = len(samples) // size
        self.consumed = 0
        self._order = (-1, torch.empty(0, dtype=torch.int64))

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._read_ahead() if self.workers else self._read():
            self.consumed += 1  # before the batch is given out: a state saved while it is in use counts it
            yield batch

    def _read(self) -> Iterator[Batch]:
        while self.micro_batches is None or self.position < self.micro_batches:
            yield self.samples.batch(self._indices(self.position))

    def _read_ahead(self) -> Iterable[Batch]:
        places = itertools.count(self.position, self.world_size)
        end = self.micro_batches
        return DataLoader(
            _Reading(self.samples),  # type: ignore[arg-type]  # DataLoader needs __getitem__ alone
            sampler=map(self._indices, itertools.takewhile(lambda place: end is None or place < end, places)),
            batch_size=None,
            num_workers=self.workers,
            # A rank comes from a fork server, and would start another one, which imports everything anew.
            multiprocessing_context="fork",
            generator=torch.Generator(),  # or it would draw from the model's, once per start
        )

    @property
    def position(self) -> int:
        """Index of this rank's next micro-batch in the global order."""
        return self.rank + self.consumed * self.world_size

    def state_dict(self) -> dict[str, Any]:
        """Return how far this rank is, and what the order depends on."""
        return {
            "seed": self.seed,
            "per_epoch": self.per_epoch,
            "world_size": self.world_size,
            "rank": self.rank,
            "consumed": self.consumed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the saved loader of this rank stopped.

        Raises:
            ConfigError: The state belongs to another order, rank or world size (`reshard` it first).
        """
        found = self.state_dict()
        differing = [key for key in found if key != "consumed" and state.get(key) != found[key]]
        if differing:
            saved = ", ".join(f"{key} {state.get(key)}" for key in differing)
            here = ", ".join(f"{key} {found[key]}" for key in differing)
            raise errors.ConfigError(
                f"rank {self.rank}: the saved data order does not continue here: saved with {saved}, "
                f"now {here}; use the same seed, data and micro-batch size, and `reshard` for other ranks"
            )
        self.consumed = int(state["consumed"])

    def _indices(self, position: int) -> Tensor:
        epoch, index = divmod(position, self.per_epoch)
        if self._order[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.samples))
            self._order = (epoch, torch.from_numpy(order))
        return self._order[1][index * self.size : (index + 1) * self.size]


@dataclass(frozen=True, slots=True)
class _Reading(Generic[Batch]):
    """What a worker process has of the data."""

    samples: Samples[Batch]

    def __getitem__(self, indices: Tensor) -> Batch:
        return self.samples.batch(indices)


def reshard(states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """Return the loader state for `rank` of `world_size`, from the saved states of all ranks.

    At the same world size it is that rank's own state. At another one, the new ranks continue after the first
    `sum(consumed)` micro-batches of the global order. These are exactly the unseen ones if all ranks had consumed
    equally many; otherwise a few are seen twice, and as many are left out. Where micro-batches are cut from parcels of
    documents (`stretto_lab.recipes.blocks`), a parcel that was begun is read again from its beginning.

    Args:
        states: `state_dict()` of every rank of the saved run, in rank order.
        rank: The rank that continues.
        world_size: Number of ranks that continue.

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
    total = sum(state["consumed"] for state in states)
    # Of the positions rank, rank + world_size, ... those below `total` are consumed.
    consumed = len(range(rank, total, world_size))
    begun = {"given": 0} if "given" in states[0] else {}
    return {**states[0], **begun, "rank": rank, "world_size": world_size, "consumed": consumed}
