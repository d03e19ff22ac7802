"""Matches the ranks' calls of collectives: the n-th calls of a group's ranks must agree.

On a real cluster, a rank with a different call makes the others hang, or gives them wrong numbers. Here it is an error
at the moment of the call, on every rank.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from stretto.errors import CollectivesDisagree, PeerFailed
from stretto.groups.collectives import Call
from stretto_lab.virtual.clock import Schedule, Task
from stretto_lab.virtual.movement import move, reduction_name
from stretto_lab.virtual.network import Wires
from stretto_lab.virtual.trace import RankStatus, Trace, Transfer, rank_statuses


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """The properties of a collective that all ranks' calls must share."""

    operation: str
    numels: tuple[int, ...]
    """Elements of every tensor in a rank's call; empty if ranks may pass different numbers."""
    dtypes: tuple[str, ...]
    root: int | None
    reduction: str | None

    def __str__(self) -> str:
        sizes = ", ".join(str(numel) for numel in self.numels)
        parts = [
            self.operation,
            f"of {sizes} elements" if self.numels else "",
            f"in {', '.join(dict.fromkeys(self.dtypes))}" if self.dtypes else "",
            f"with root {self.root}" if self.root is not None else "",
            f"by {self.reduction}" if self.reduction is not None else "",
        ]
        return " ".join(part for part in parts if part)


def terms_of(call: Call) -> Terms:
    """Return the properties that the other ranks' calls must share with `call`."""
    operation = call.operation
    # A gather and a scatter have no other form than that of lists.
    is_listed = call.method.is_listed and not operation.has_root
    return Terms(
        operation=f"{operation.name} of lists" if is_listed else operation.name,
        numels=() if call.has_splits else tuple([tensor.numel() for tensor in call.sized]),
        dtypes=tuple([str(tensor.dtype).removeprefix("torch.") for tensor in call.sized]),
        root=call.root if operation.has_root else None,
        reduction=reduction_name(call) if operation.reduces else None,
    )


class Rendezvous:
    """A collective in progress: the point where the ranks' calls meet.

    Args:
        terms: The properties of the first rank's call.
        group: The group's name.
        sequence: Position among the group's collectives, from 0.
    """

    def __init__(self, terms: Terms, group: str, sequence: int) -> None:
        self.terms = terms
        self.group = group
        self.sequence = sequence
        self.calls: dict[int, Call] = {}
        """Calls by rank, in the order of arrival; cleared once the collective has been performed."""
        self.waiting: list[Task] = []
        self.over_ns: int | None = None
        """The time at which the last byte arrives; None until all ranks have called."""

    def __str__(self) -> str:
        return f"{self.terms}, collective {self.sequence} of {self.group}"


@dataclasses.dataclass(frozen=True, slots=True)
class RunContext:
    """The state that all groups of one run share."""

    world_size: int
    schedule: Schedule
    wires: Wires
    trace: Trace


class CollectiveMatcher:
    """Matches the calls of one group's ranks. Ranks are numbered as in the group.

    Args:
        name: The group's name in messages and in the trace.
        context: The state that all groups of the run share.
        ranks: The group's ranks, as the run numbers them, in the order of the group.
        left_by: The ranks that have already left it.
    """

    def __init__(
        self, name: str, context: RunContext, ranks: Sequence[int], left_by: int | None = None
    ) -> None:
        self.name = name
        self.context = context
        self.ranks = tuple(ranks)
        self._calls_made = [0] * len(ranks)
        self._open: dict[int, Rendezvous] = {}
        self._left_by = left_by
        self._siblings: dict[tuple[int, ...], list[CollectiveMatcher]] = {}
        """By ranks, as the run numbers them: other groups of these ranks."""
        self._siblings_asked: Counter[tuple[int, tuple[int, ...]]] = Counter()

    def sibling(self, rank: int, members: Sequence[int] | None = None) -> "CollectiveMatcher":
        """Return the matcher of another group of the same ranks, or of some of them.

        The n-th call with the same members returns the same matcher to all of them.
        """
        ranks = self.ranks if members is None else tuple(self.ranks[member] for member in members)
        position = self._siblings_asked[rank, ranks]
        self._siblings_asked[rank, ranks] += 1
        siblings = self._siblings.setdefault(ranks, [])
        if position == len(siblings):
            whose = "" if ranks == self.ranks else f" of ranks {', '.join(map(str, ranks))}"
            left_by = self._left_by if self._left_by in ranks else None
            siblings.append(CollectiveMatcher(f"{self.name}.{position}{whose}", self.context, ranks, left_by))
        return siblings[position]

    def enter(self, call: Call) -> Rendezvous:
        """Add a rank's next call to its rendezvous; the last rank's call performs the collective.

        Raises:
            CollectivesDisagree: Another rank has made a different call; every rank raises it.
            PeerFailed: A rank has left the group.
        """
        rank = call.rank
        self._raise_if_left(rank)
        terms = terms_of(call)
        sequence = self._calls_made[rank]
        self._calls_made[rank] += 1
        rendezvous = self._open.get(sequence)
        if rendezvous is None:
            rendezvous = self._open[sequence] = Rendezvous(terms, self.name, sequence)
        rendezvous.calls[rank] = call
        if terms != rendezvous.terms or not _splits_agree(call, rendezvous.calls):
            error = self._disagreement(rendezvous)
            self.context.schedule.fail(lambda: CollectivesDisagree(*error))
            raise CollectivesDisagree(*error)
        if len(rendezvous.calls) == len(self.ranks):
            del self._open[sequence]
            self._perform(rendezvous)
        return rendezvous

    def wait(self, rank: int, rendezvous: Rendezvous) -> None:
        """Let the current task, a task of `rank`, wait until the collective is complete.

        Raises:
            CommunicationError: The run has failed.
            PeerFailed: A rank has left the group without this call.
        """
        schedule = self.context.schedule
        if rendezvous.over_ns is not None:
            schedule.sleep_until(rendezvous.over_ns)
            return
        self._raise_if_left(rank)
        rendezvous.waiting.append(schedule.current)
        schedule.park(rendezvous)
        if rendezvous.over_ns is None:
            self._raise_if_left(rank)

    def leave(self, rank: int) -> None:
        """Release the waits of other ranks for `rank`, which has left the group."""
        if self._left_by is not None:
            return
        self._left_by = self.ranks[rank]
        schedule = self.context.schedule
        for rendezvous in self._open.values():
            for task in rendezvous.waiting:
                if task.waits_for is rendezvous:
                    schedule.wake(task, schedule.now_ns)

    @property
    def left_by(self) -> int | None:
        """The first rank that left the group, as the run numbers ranks; None if none has."""
        return self._left_by

    def lose(self, rank: int) -> None:
        """End every wait for a rank, as the run numbers ranks, in this group and all groups made from it."""
        if rank in self.ranks:
            self.leave(self.ranks.index(rank))
        for siblings in self._siblings.values():
            for sibling in siblings:
                sibling.lose(rank)

    def _raise_if_left(self, rank: int) -> None:
        if self._left_by is not None:
            raise PeerFailed(
                f"rank {self.ranks[rank]}: rank {self._left_by} has ended {self.name} after an error"
            )

    def _perform(self, rendezvous: Rendezvous) -> None:
        """Perform a collective that all ranks have called."""
        context = self.context
        entered = tuple(self.ranks[rank] for rank in rendezvous.calls)
        calls = [rendezvous.calls[rank] for rank in range(len(self.ranks))]
        move(calls)
        sent = [call.sent_bytes for call in calls]
        now_ns = context.schedule.now_ns
        parts = [call.part_bytes for call in calls] if calls[0].has_splits else None
        pattern = calls[0].operation.pattern
        rendezvous.over_ns = context.wires.carry(now_ns, sent, pattern, parts, self.ranks)
        context.trace.records.append(
            Transfer(
                group=self.name,
                sequence=rendezvous.sequence,
                what=str(rendezvous.terms),
                sent_bytes=sum(sent),
                entered=entered,
                start_ns=now_ns,
                stop_ns=rendezvous.over_ns,
            )
        )
        rendezvous.calls = {}  # lets the tensors go: whoever holds the work asks only when it is over
        for task in rendezvous.waiting:
            context.schedule.wake(task, rendezvous.over_ns)

    def _disagreement(self, rendezvous: Rendezvous) -> tuple[str, tuple[RankStatus, ...]]:
        """Return the arguments of a `CollectivesDisagree`."""
        rows = []
        calls = {self.ranks[rank]: call for rank, call in rendezvous.calls.items()}
        for row in rank_statuses(self.context.schedule):
            call = calls.get(row.rank)
            if row.rank not in self.ranks:
                doing = row.doing
            elif call is None:
                doing = f"has not come ({row.doing})"
            else:
                splits = f", sending {list(call.input_splits)} rows" if call.input_splits else ""
                doing = f"came with {terms_of(call)}{splits}"
            rows.append(dataclasses.replace(row, doing=doing))
        what = f"collective {rendezvous.sequence} of {self.name}: expected the same call from all ranks"
        return what, tuple(rows)


def _splits_agree(call: Call, calls: Mapping[int, Call]) -> bool:
    """Return whether each rank of an all-to-all sends the number of rows that its receivers expect."""
    if not call.has_splits:  # then none has: their terms would be others
        return True
    return all(
        all([call.input_splits, call.output_splits, other.input_splits, other.output_splits])
        and call.input_splits[rank] == other.output_splits[call.rank]
        and call.output_splits[rank] == other.input_splits[call.rank]
        for rank, other in calls.items()
    )
