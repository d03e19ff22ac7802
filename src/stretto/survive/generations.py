"""Generations: a job's state after some of its updates, kept in the memories of its ranks.

A rank's *share* is its part of a checkpoint. A rank keeps its own share and the share of another rank, on another
machine if possible, so every share exists twice. A generation is complete if each of its shares is in some living
rank's memory. Members find that from the shares that they hold, not from a message that may have reached only some. Two
generations are kept, because ranks may be lost while copies of the newer one are sent (`stretto.survive.copies`).

Note [Lost at once]
    A share exists twice, so that one remains after a loss. Without a folder, the end of a process loses its shares.
    With a folder it loses nothing, and only the end of a machine does: a share needs no copy on its own machine.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.checkpoint.load import Restored, load
from stretto.checkpoint.ranks import Ranks
from stretto.continuation import Loader
from stretto.errors import CheckpointError, StrettoError, TornCheckpoint
from stretto.parallel import DataParallel
from stretto.share import hold, read_share
from stretto.survive.copies import Copies
from stretto.survive.folder import Folder
from stretto.survive.shares import Generation, Share

_KEPT = 2
"""Number of kept generations, because the newest may be incomplete on other ranks."""


class Memory:
    """The shares that one process holds; they outlive the job.

    Args:
        machine: The machine's name, equal on processes that are likely to be lost at once.
        is_first: Whether the process is a member from the beginning of the job. Then an empty memory means that no
            state exists.
        folder: Folder for shares, so that they outlive the process too; None keeps them only in the process.
    """

    def __init__(self, machine: str, *, is_first: bool, folder: Folder | None = None) -> None:
        self._machine = machine
        self._folder = folder
        self._knows_of_none = is_first
        """Whether, as far as this process knows, no generation has been complete yet."""
        self._is_doubled = True
        """Whether this process has a sound copy of the newest generation; otherwise an older one is kept."""
        self._term, self._key = 0, ""
        """Term and key of the generations to keep."""
        self._failure: CheckpointError | None = None
        """Why a copy could not be written to the folder; all ranks learn this when the next state is kept."""
        self._shares: dict[Generation, dict[int, Share]] = {}
        for generation, owner, share in () if folder is None else folder.shares():
            self._shares.setdefault(generation, {})[owner] = share

    @property
    def newest(self) -> Generation | None:
        """The newest generation with a share in this process."""
        return max(self._shares, default=None)

    def keep(
        self,
        parallel: DataParallel,
        copies: Copies,
        told: Any,
        *,
        loader: Loader | None = None,
        extra: Any = None,
    ) -> list[tuple[str, Any]]:
        """Keep the state of a job between updates; all ranks must call it. Return every rank's machine and message.

        Args:
            parallel: The job.
            copies: Sends the copies, which are in flight after this call; the copies before are complete.
            told: Plain JSON, for the other ranks.
            loader: This rank's loader, if its position is to be kept.
            extra: Any value; rank 0's is kept.

        Raises:
            OutOfTurn: An update is in progress.
            CheckpointError: A folder has no room on some rank, or had none for a copy.
            CommunicationError: A rank died, raised or fell silent; the generation before is whole.
        """
        with parallel.between_updates("keeping a state"):
            continuation = parallel.continuation()
            state = continuation.write()
            held = hold(continuation, parallel.strategy.name, state, loader, extra, copies=False)
            written = held.written()
            own = Share(parallel.world_size, written.digest, written.joined())
            for listener in parallel.job.model.listeners:
                listener.committed_is_read()
        generation = Generation(self._term, parallel.steps, self._key)

        def put_own() -> list[Any]:
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            self._drop([generation])  # kept once more at the same update
            self._put(generation, parallel.rank, own)
            return [len(own.content), own.digest, self._machine, self._is_doubled, told]

        outdated = sorted(self._shares.keys() - {generation})
        try:
            records = Ranks(parallel).gather("keeping a state in memory", put_own)
        except StrettoError:
            self._drop([generation])  # it is not whole, and never will be
            raise
        is_safe = all(is_doubled for *_, is_doubled, _ in records)  # the generation before this one
        self._drop(outdated[: 1 - _KEPT] if is_safe else outdated[1:])
        if is_safe and outdated and self._folder is not None:
            self._folder.note_whole()
        machines = [machine for _, _, machine, *_ in records]
        to = [] if self._are_lost_at_once(machines) else buddies(machines)
        awaited = {owner for owner, other in enumerate(to) if other == parallel.rank}
        self._is_doubled = not awaited
        self._knows_of_none = self._knows_of_none and bool(awaited)

        def take(owner: int, copied: memoryview) -> None:
            self._knows_of_none = False
            copy = Share(parallel.world_size, records[owner][1], copied)
            if self._take(generation, owner, copy):
                awaited.discard(owner)
            self._is_doubled = not awaited

        if to:
            copies.give(own.content, [length for length, *_ in records], to, take)
        return [(machine, told) for _, _, machine, _, told in records]

    def load(
        self, parallel: DataParallel, copies: Copies, *, loader: Loader | None = None, at_least: int = 0
    ) -> Restored | None:
        """Load the newest generation that the ranks hold together into a job; all ranks must call it.

        It returns None if nothing has been kept yet, or nothing after `at_least` updates. Afterwards every share of the
        generation exists twice again. Newer generations are dropped: they are not whole, and never will be. Every state
        kept after this is newer than all states of any rank.

        Raises:
            TornCheckpoint: No generation is whole: ranks have died together with the ranks that held their copies.
        """
        holders: dict[Generation, dict[int, list[int]]] = {}
        owners: dict[Generation, int] = {}
        told = Ranks(parallel).gather("looking for a generation in memory", self._told)
        for rank, (*_, inventory) in enumerate(told):
            for term, step, key, owner, number in inventory:
                owners[Generation(term, step, key)] = number
                holders.setdefault(Generation(term, step, key), {}).setdefault(owner, []).append(rank)
        self._term, self._key = 1 + max((one.term for one in holders), default=-1), told[0][1]
        whole = [one for one, found in holders.items() if len(found) == owners[one]]
        was_whole = any(was_whole for _, _, _, was_whole, _ in told)
        if not whole and not was_whole and any(knows_of_none for knows_of_none, *_ in told):
            self._drop(list(self._shares))
            return None
        if not whole:
            raise TornCheckpoint(
                "no generation in memory is whole: some ranks ended together with the ranks that held copies "
                "of their shares; start the job again from its last checkpoint"
            )
        self._knows_of_none = False
        chosen = max(whole)
        if chosen.step < at_least:
            self.forget()
            return None
        self._drop([one for one in self._shares if one > chosen])
        # Of the ranks that hold a share, the one of its number reads it, whose it likely was.
        found = holders[chosen].items()
        readers = {owner: owner if owner in ranks else ranks[owner % len(ranks)] for owner, ranks in found}
        mine = [owner for owner, reader in readers.items() if reader == parallel.rank]
        restored = load(
            parallel,
            [read_share(self._shares[chosen][owner].content, f"the share of rank {owner}") for owner in mine],
            loader=loader,
        )
        self._is_doubled = True
        self._double(parallel, copies, chosen, holders[chosen], [machine for _, _, machine, *_ in told])
        return restored

    def forget(self) -> None:
        """Drop all shares, because the job is done or continues from another state."""
        self._drop(list(self._shares))
        if self._folder is not None:
            self._folder.forget()

    def _double(
        self,
        parallel: DataParallel,
        copies: Copies,
        generation: Generation,
        holders: Mapping[int, Sequence[int]],
        machines: Sequence[str],
    ) -> None:
        """Send another rank a copy of each share of a generation that could be lost at once.

        Args:
            parallel: The job.
            copies: Sends them.
            generation: The generation.
            holders: By share: the ranks that have it.
            machines: By rank: the name of its machine.
        """
        if self._are_lost_at_once(machines):
            return
        shares = self._shares.setdefault(generation, {})
        alone = [
            owner
            for owner, ranks in holders.items()
            if ranks[0] == parallel.rank and self._are_lost_at_once([machines[rank] for rank in ranks])
        ]
        records = [
            [owner, shares[owner].owners, shares[owner].digest, len(shares[owner].content)] for owner in alone
        ]
        told: list[Any] = Ranks(parallel).gather("sending copies of shares", lambda: records)
        to = buddies(machines)
        for index in range(max(map(len, told))):
            content = shares[alone[index]].content if index < len(alone) else memoryview(b"")
            lengths = [given[index][3] if index < len(given) else 0 for given in told]

            def take(source: int, copied: memoryview, index: int = index) -> None:
                if index < len(told[source]):
                    owner, owners, digest, _ = told[source][index]
                    self._is_doubled &= self._take(generation, owner, Share(owners, digest, copied))

            copies.give(content, lengths, to, take)
            copies.complete()

    def _take(self, generation: Generation, owner: int, copy: Share) -> bool:
        """Keep a copy that has arrived, unless it is damaged; return whether it is sound."""
        is_sound = copy.is_sound
        if is_sound and owner not in self._shares[generation]:
            try:
                self._put(generation, owner, copy)
            except CheckpointError as error:
                self._failure = error
                return False
        return is_sound

    def _put(self, generation: Generation, owner: int, share: Share) -> None:
        if self._folder is not None:
            share = self._folder.write(generation, owner, share)
        self._shares.setdefault(generation, {})[owner] = share

    def _drop(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            for owner, share in self._shares.pop(generation, {}).items():
                if self._folder is not None:
                    self._folder.drop(generation, owner, share)

    def _are_lost_at_once(self, machines: Sequence[str]) -> bool:
        """Return whether ranks of these machines may be lost at once; see Note [Lost at once]."""
        return len(machines if self._folder is None else set(machines)) == 1

    def _told(self) -> list[Any]:
        """Return the values that all ranks need from this rank to find a complete generation."""
        inventory = [
            [one.term, one.step, one.key, owner, share.owners]
            for one, shares in self._shares.items()
            for owner, share in shares.items()
            if share.is_sound
        ]
        was_whole = self._folder is not None and self._folder.was_whole
        return [self._knows_of_none, secrets.token_hex(4), self._machine, was_whole, inventory]


def may_leave(machines: Sequence[str], wish: Sequence[int], *, together: bool) -> set[int]:
    """Return the ranks that may leave right after a state was kept, such that all of its shares stay in some memory.

    The other ranks that wish to leave may do so after the next state.

    Args:
        machines: By rank: the name of its machine.
        wish: The ranks that wish to leave. If no rank would remain, all may leave at once.
        together: Whether all ranks of a machine leave together.
    """
    ranks = range(len(machines))
    to = buddies(machines)
    units = [
        {rank, *(other for other in ranks if together and machines[other] == machines[rank])} for rank in wish
    ]
    if set().union(*units) == set(ranks):
        return set(ranks)
    leaving: set[int] = set()
    for unit in units:
        if all({owner, to[owner]} - leaving - unit for owner in ranks):
            leaving |= unit
    return leaving


def buddies(machines: Sequence[str]) -> list[int]:
    """Return the rank to which each rank sends a copy: on another machine if there is one, evenly distributed.

    Args:
        machines: By rank: the name of its machine. A single rank keeps its own copy.
    """
    given = [0] * len(machines)
    to = []
    for rank, machine in enumerate(machines):
        others = [(rank + distance) % len(machines) for distance in range(1, len(machines))]
        away = [other for other in others if machines[other] != machine]
        to.append(min(away or others or [rank], key=given.__getitem__))
        given[to[-1]] += 1
    return to
