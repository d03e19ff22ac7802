"""Generations: a job's state after some of its updates, kept in the memories of its ranks.

What each rank would have written into a checkpoint is its *share*. A rank keeps its own share and that of another rank,
on another machine where there is one, so that every share is there twice. A generation is whole if each of its shares
is in some living rank's memory. That is found from what members hold, and not from a word that some have heard and
others not. Two generations are kept, because ranks may be lost while copies of the newer one travel
(`stretto.survive.copies`).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import xxhash

from stretto import held
from stretto.checkpoint.load import Restored, load
from stretto.checkpoint.ranks import Ranks
from stretto.continuation import Loader
from stretto.errors import TornCheckpoint
from stretto.parallel import DataParallel
from stretto.survive.copies import Copies

_KEPT = 2
"""Generations: the newest may be unfinished on others."""


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Generation:
    """Which one it is; later ones are greater."""

    term: int
    """In which it was kept."""
    step: int
    """Committed updates."""


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What one rank held of a generation."""

    owners: int
    """How many shares the generation has."""
    digest: str
    content: bytes | memoryview

    @property
    def is_sound(self) -> bool:
        """Whether it is what it was when it was kept."""
        return _digest(self.content) == self.digest


class Memory:
    """The shares that one process holds; they outlive the job.

    Args:
        machine: Its name, equal on processes that are likely to be lost at once.
        is_first: Whether the process is a member from the beginning of the job. If it holds nothing, there is nothing.
    """

    def __init__(self, machine: str, *, is_first: bool) -> None:
        self._machine = machine
        self._knows_of_none = is_first
        """Whether no generation has been whole yet, as far as this process knows."""
        self._is_doubled = True
        """Whether this process has a sound copy of the newest generation; otherwise an older one has to stay."""
        self._shares: dict[Generation, dict[int, Share]] = {}

    @property
    def newest(self) -> Generation | None:
        """The newest generation of which this process holds a share."""
        return max(self._shares, default=None)

    @property
    def num_bytes(self) -> int:
        """How much it holds."""
        return sum(len(share.content) for shares in self._shares.values() for share in shares.values())

    def keep(
        self,
        parallel: DataParallel,
        copies: Copies,
        term: int,
        told: Any,
        *,
        loader: Loader | None = None,
        extra: Any = None,
    ) -> list[tuple[str, Any]]:
        """Keep the state of a job at rest; all ranks must call. Return every rank's machine, and what it has told.

        Args:
            parallel: The job.
            copies: Bring the copies, which are on their way after this; those before are complete.
            term: That it is in.
            told: Plain JSON, for the other ranks.
            loader: This rank's, if its position is to be kept.
            extra: Anything; rank 0's is kept.

        Raises:
            OutOfTurn: An update is under way.
            CommunicationError: A rank died, raised or fell silent; the generation before is whole.
        """
        with parallel.between_updates("keeping a state"):
            content = held.hold(
                parallel.continuation(), parallel.strategy.name, loader=loader, extra=extra, copies=False
            ).written()
            for listener in parallel.job.model.listeners:
                listener.committed_is_read()
        own = Share(parallel.world_size, _digest(content), content)
        record = [len(content), own.digest, self._machine, self._is_doubled, told]
        records = Ranks(parallel).gather("keeping a state in memory", lambda: record)
        generation = Generation(term, parallel.steps)
        self._shares[generation] = {parallel.rank: own}
        ordered = sorted(self._shares)
        is_safe = all(is_doubled for *_, is_doubled, _ in records)  # the generation before this one
        for outdated in ordered[:-_KEPT] if is_safe else ordered[1:-1]:
            del self._shares[outdated]
        self._is_doubled = parallel.world_size == 1
        self._knows_of_none = self._knows_of_none and not self._is_doubled

        def take(owner: int, copied: memoryview) -> None:
            self._knows_of_none = False
            copy = Share(parallel.world_size, records[owner][1], copied)
            self._is_doubled = self._take(generation, owner, copy)

        _give(copies, parallel.rank, content, [(length, machine) for length, _, machine, *_ in records], take)
        return [(machine, told) for _, _, machine, _, told in records]

    def load(
        self, parallel: DataParallel, copies: Copies, *, loader: Loader | None = None
    ) -> Restored | None:
        """Let a job go on from the newest generation that its ranks hold together; all ranks must call.

        None where nothing has been kept yet. Every share of the generation is there twice again after this. What is
        newer is forgotten: it is not whole, and never will be.

        Raises:
            TornCheckpoint: No generation is whole: ranks have died together with those that held their copies.
        """
        holders: dict[Generation, dict[int, list[int]]] = {}
        owners: dict[Generation, int] = {}
        told = Ranks(parallel).gather("looking for a generation in memory", self._inventory)
        for rank, (_, inventory) in enumerate(told):
            for term, step, owner, number in inventory:
                owners[Generation(term, step)] = number
                holders.setdefault(Generation(term, step), {}).setdefault(owner, []).append(rank)
        whole = [one for one, found in holders.items() if len(found) == owners[one]]
        if not whole and any(knows_of_none for knows_of_none, _ in told):
            return None
        if not whole:
            raise TornCheckpoint(
                "no generation in memory is whole: ranks have ended together with those that held copies of their "
                "shares; start the job again from its last checkpoint"
            )
        self._knows_of_none = False
        chosen = max(whole)
        self._shares = {one: shares for one, shares in self._shares.items() if one <= chosen}
        mine = [owner for owner, ranks in holders[chosen].items() if ranks[0] == parallel.rank]
        restored = load(
            parallel, [held.read_share(self._shares[chosen][owner].content) for owner in mine], loader=loader
        )
        self._is_doubled = True
        self._double(parallel, copies, chosen, holders[chosen])
        return restored

    def _double(
        self,
        parallel: DataParallel,
        copies: Copies,
        generation: Generation,
        holders: Mapping[int, Sequence[int]],
    ) -> None:
        """Give another rank a copy of those shares of a generation that one alone has.

        Args:
            parallel: The job.
            copies: Bring them.
            generation: Which.
            holders: Of each share, the ranks that have it.
        """
        shares = self._shares.setdefault(generation, {})
        alone = [owner for owner, ranks in holders.items() if list(ranks) == [parallel.rank]]
        records = [
            [owner, shares[owner].owners, shares[owner].digest, len(shares[owner].content)] for owner in alone
        ]
        told: list[Any] = Ranks(parallel).gather(
            "giving out copies of shares", lambda: [self._machine, records]
        )
        for index in range(max(len(given) for _, given in told)):
            content = shares[alone[index]].content if index < len(alone) else b""
            lengths = [(given[index][3] if index < len(given) else 0, machine) for machine, given in told]

            def take(source: int, copied: memoryview, index: int = index) -> None:
                if index < len(told[source][1]):
                    owner, owners, digest, _ = told[source][1][index]
                    self._is_doubled &= self._take(generation, owner, Share(owners, digest, copied))

            _give(copies, parallel.rank, content, lengths, take)
            copies.complete()

    def _take(self, generation: Generation, owner: int, copy: Share) -> bool:
        """Take a copy that has come, unless it is damaged; return whether it is sound."""
        is_sound = copy.is_sound
        if is_sound:
            self._shares[generation].setdefault(owner, copy)
        return is_sound

    def _inventory(self) -> tuple[bool, list[list[int]]]:
        return self._knows_of_none, [
            [one.term, one.step, owner, share.owners]
            for one, shares in self._shares.items()
            for owner, share in shares.items()
            if share.is_sound
        ]


def _give(
    copies: Copies,
    rank: int,
    content: bytes | memoryview,
    records: Sequence[tuple[int, str]],
    take: Callable[[int, memoryview], None],
) -> None:
    """Begin to give bytes to another rank, if there is one.

    Args:
        copies: Bring them.
        rank: This one.
        content: Of this rank.
        records: Of every rank, the length of its bytes, and its machine.
        take: Takes what comes to this rank: from whom, and the bytes.
    """
    if len(records) == 1:
        return
    distance = buddy_distance([machine for _, machine in records])
    source = (rank - distance) % len(records)
    copies.give(content, [length for length, _ in records], distance, partial(take, source))


def may_leave(machines: Sequence[str], wish: Sequence[int], *, together: bool) -> set[int]:
    """Return who may leave right after a state was kept, so that all of its shares stay in somebody's memory.

    The others among those that wish to may do so after the next one.

    Args:
        machines: The name of every rank's.
        wish: The ranks that wish to leave. Where nobody would be left, all may at once.
        together: Whether a machine is left by all of its ranks.
    """
    ranks = range(len(machines))
    distance = buddy_distance(machines) if len(machines) > 1 else 0
    units = [
        {rank, *(other for other in ranks if together and machines[other] == machines[rank])} for rank in wish
    ]
    if set().union(*units) == set(ranks):
        return set(ranks)
    leaving: set[int] = set()
    for unit in units:
        if all({owner, (owner + distance) % len(ranks)} - leaving - unit for owner in ranks):
            leaving |= unit
    return leaving


def buddy_distance(machines: Sequence[str]) -> int:
    """Return how far on the rank is to which each rank gives a copy: so that most are on another machine.

    Args:
        machines: The name of every rank's, of two or more.
    """

    def alike(distance: int) -> int:
        return sum(one == machines[(rank + distance) % len(machines)] for rank, one in enumerate(machines))

    return min(range(1, len(machines)), key=alike)


def _digest(content: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(content)
