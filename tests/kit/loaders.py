"""The laws of a loader of micro-batches whose position can be saved."""

import copy
import dataclasses
import functools
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.packed import pack, unpack
from stretto_lab.testing import differing

_END = object()


def take(loader: Iterable[Any], count: int) -> list[Any]:
    """Return copies of the next micro-batches: later ones may be written over earlier ones."""
    return [held(batch) for batch in islice(loader, count)]


def held(batch: Any) -> Any:
    """Return a copy of what a micro-batch holds, in values that can be compared."""
    return dataclasses.asdict(batch) if dataclasses.is_dataclass(batch) else copy.deepcopy(batch)


def rows_of(batch: Any) -> list[Any]:
    """Return the samples of a micro-batch: rows of its first tensor, as values that can be compared."""
    while not isinstance(batch, Tensor):
        batch = batch[0] if isinstance(batch, list | tuple) else next(iter(held(batch).values()))
    return [tuple(row.flatten().tolist()) for row in batch]


def loader_faults(
    make: Callable[[int, int], Any],
    per_epoch: int,
    *,
    ranks: Sequence[int] = (1, 2, 3),
    endless: bool = True,
    goes_on: bool = True,
    uses: int = 1,
    update: int = 1,
    samples_of: Callable[[Any], list[Any]] = rows_of,
    reshard: Callable[[Sequence[Any], int, int], Any] | None = None,
) -> list[str]:
    """Return which laws a loader breaks.

    Args:
        make: Returns a new loader of a rank among so many.
        per_epoch: Micro-batches of an epoch, all ranks together.
        ranks: Their numbers.
        endless: Whether epochs follow each other in one iteration.
        goes_on: Whether a second iterator goes on where the first stopped; otherwise it begins a new pass.
        uses: How often a micro-batch is handed out, by a loader that echoes.
        update: After how many micro-batches such a loader begins again with the first of them.
        samples_of: Returns what tells the samples of a micro-batch apart.
        reshard: Returns the state with which a rank of another number goes on.
    """
    broken: list[str] = []

    def same(what: str, expected: list[Any], found: list[Any]) -> None:
        broken.extend(f"{what}: {text}" for text in differing(expected, found)[:1])

    for rank, size in [(rank, each) for each in ranks for rank in range(each)]:
        seat, own = f"rank {rank} of {size}", per_epoch // size
        length = uses * own - (uses - 1) * (own % update) + (3 if endless else 0)
        whole, running = take(make(rank, size), length + 3), make(rank, size)
        batches = iter(running)
        for position in range(length):
            resumed = make(rank, size)
            resumed.load_state_dict(running.state_dict())
            same(f"{seat}, resumed at {position}", whole[position : position + 3], take(resumed, 3))
            next(batches, None)
        batches = iter(loader := make(rank, size))
        next(batches)
        state, expected = copy.deepcopy(loader.state_dict()), take(batches, 4)
        loader.load_state_dict(state)
        same(f"{seat}, gone back", expected, take(loader, 4))
        if not endless:
            broken += _faults_of_an_end(make, rank, size, uses * per_epoch + 1)
    broken += _faults_of_a_lone_rank(make, goes_on)
    epoch = functools.partial(_epoch, make, per_epoch, uses, update, samples_of)
    alone = epoch(1)
    for name, count in (("one", len(alone)), *([("another", len(epoch(1, 1)))] if endless else [])):
        if count != per_epoch:
            broken.append(f"micro-batches of {name} epoch: expected {per_epoch}, found {count}")
    for size in ranks:
        samples = list(chain.from_iterable(epoch(size)))
        if len(samples) != len(set(samples)):
            broken.append(f"an epoch on {size} ranks: expected no sample twice")
        if set(samples) != set(chain.from_iterable(alone)):
            broken.append(f"an epoch on {size} ranks: expected the samples that a lone rank sees")
    if endless and epoch(1, 1) == alone:
        broken.append("the second epoch has the order of the first")
    for before, after in ((before, after) for before in ranks for after in ranks if reshard):
        stopped = [make(rank, before) for rank in range(before)]
        for loader in stopped:
            take(loader, 3)
        states, found = [loader.state_dict() for loader in stopped], []
        for rank in range(after):
            resumed = make(rank, after)
            resumed.load_state_dict(reshard(states, rank, after))
            found += take(resumed, 1)
        expected = take(make(0, 1), before * 3 + after)[before * 3 :]
        same(f"from {before} to {after} ranks", *(sorted(one, key=repr) for one in (expected, found)))
    return broken


def _epoch(
    make: Any, per_epoch: int, uses: int, update: int, samples_of: Any, size: int, number: int = 0
) -> list[list[Any]]:
    """Return the samples of an epoch's micro-batches at their first use, ranks in turn."""
    shares = [
        (batch for index, batch in enumerate(make(rank, size)) if index // update % uses == 0)
        for rank in range(size)
    ]
    turns = [next(shares[turn % size], None) for turn in range(per_epoch * (number + 1))]
    return [samples_of(batch) for batch in turns[per_epoch * number :] if batch is not None]


def _faults_of_a_lone_rank(make: Callable[[int, int], Any], goes_on: bool) -> list[str]:
    """The order depends on nobody who asks, and states and micro-batches stay as they were."""
    broken: list[str] = []

    def same(what: str, expected: list[Any], found: list[Any]) -> None:
        broken.extend(f"{what}: {text}" for text in differing(expected, found)[:1])

    loader = make(0, 1)
    first = take(loader, 6)
    if goes_on:
        loader = make(0, 1)
        same("two loops of 2 and 3", first[:5], take(loader, 2) + take(loader, 3))
    loader = make(0, 1)
    batches = iter(loader)
    take(batches, 2)
    state, stored = loader.state_dict(), pack(loader.state_dict(), "the state")
    take(batches, 2)
    for what, one in (("stored and read", unpack(stored, "the state")), ("before the loader went on", state)):
        resumed = make(0, 1)
        resumed.load_state_dict(one)
        same(f"resumed from a state {what}", first[2:5], take(resumed, 3))
    asked, found = make(0, 1), []
    for batch in islice(asked, 5):
        asked.state_dict()
        found.append(held(batch))
        asked.state_dict()
    same("asked for its state in between", first[:5], found)
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        same(f"with seed {seed} in the process", first, take(make(0, 1), 6))
    together = [iter(make(0, 1)) for _ in range(2)]
    for row in first:
        same("beside another loader", [row, row], [held(next(loader)) for loader in together])
    same(
        "batches kept while the loader goes on",
        first[:4],
        [held(batch) for batch in list(islice(make(0, 1), 4))],
    )
    return broken


def _faults_of_an_end(make: Callable[[int, int], Any], rank: int, size: int, most: int) -> list[str]:
    """Asked after its last micro-batch a pass ends, each time; a new one begins at its state there."""
    loader = make(rank, size)
    batches = iter(loader)
    given, broken = len(take(batches, most)), []
    if (ends := sum(next(batches, _END) is _END for _ in range(3))) != 3:
        broken.append(
            f"ends found by asking three times after {given} micro-batches: expected 3, found {ends}"
        )
    if hasattr(loader, "__len__") and len(loader) != given:
        broken.append(f"micro-batches of a loader whose len() is {len(loader)}: found {given}")
    resumed = make(rank, size)
    resumed.load_state_dict(copy.deepcopy(loader.state_dict()))
    texts = differing(take(loader, given), take(resumed, given))
    return broken + [f"rank {rank} of {size}, a pass after the end: {text}" for text in texts[:1]]
