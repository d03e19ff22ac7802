"""Where ranks meet: every collective of a group is one meeting, to which all ranks come with equal terms.

Where ranks meet: the n-th collective of a group is one meeting, to which all its ranks must come with equal terms.

Real clusters punish a rank that calls something else with a hang or with wrong numbers. Here it is an error at the
moment of the call, on every rank.

The handle of a collective on a virtual cluster.
"""

import dataclasses
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from stretto.errors import CollectivesDisagree, PeerFailed
from stretto.virtual.clock import Schedule, Task
from stretto.virtual.movement import Call, move
from stretto.virtual.network import Wires
from stretto.virtual.trace import Standing, Trace, Transfer, standings


class Meeting:
    """One collective of one group."""

    def __init__(self, group: str, sequence: int, schedule: Schedule) -> None:
        self.group = group
        self.sequence = sequence
        self.calls: dict[int, Call] = {}
        """By rank, in the order in which the ranks came."""
        self.over_ns: int | None = None
        """When the last byte has arrived; None until all ranks have come."""
        self.waiting: list[Task] = []
        self._schedule = schedule

    def __str__(self) -> str:
        return f"{next(iter(self.calls.values())).terms}, collective {self.sequence} of {self.group}"

    @property
    def is_over(self) -> bool:
        """Whether waiting for it would take no time."""
        return self.over_ns is not None and self._schedule.now_ns >= self.over_ns

    def wait(self) -> None:
        """Let the current task go on when the collective is over.

        Raises:
            CommunicationError: The run has failed.
        """
        if self.over_ns is None:
            self.waiting.append(self._schedule.current)
            self._schedule.park(self)
        else:
            self._schedule.sleep_until(self.over_ns)


@dataclasses.dataclass(frozen=True, slots=True)
class Surroundings:
    """What all groups of a run share."""

    world_size: int
    schedule: Schedule
    wires: Wires
    trace: Trace


class Hall:
    """All meetings of one group.

    Args:
        name: Of the group, in messages and in the trace.
        around: What it shares with the other groups of the run.
    """

    def __init__(self, name: str, around: Surroundings) -> None:
        self.name = name
        self._around = around
        self._entered = [0] * around.world_size
        self._open: dict[int, Meeting] = {}
        self._left_by: int | None = None
        self._siblings: list[Hall] = []
        self._siblings_asked = [0] * around.world_size

    def sibling(self, rank: int) -> "Hall":
        """Return the hall of the next group that is made out of this one: the n-th call gets the n-th on any rank."""
        position = self._siblings_asked[rank]
        self._siblings_asked[rank] += 1
        if position == len(self._siblings):
            self._siblings.append(Hall(f"{self.name}.{position}", self._around))
        return self._siblings[position]

    def enter(self, rank: int, call: Call) -> Meeting:
        """Bring `call` to the rank's next meeting.

        Raises:
            CollectivesDisagree: Another rank has come to this meeting on other terms; every rank raises it.
            PeerFailed: A rank has left the group.
        """
        schedule = self._around.schedule
        self._check_left(rank)
        sequence = self._entered[rank]
        self._entered[rank] += 1
        meeting = self._open.get(sequence)
        if meeting is None:
            meeting = self._open[sequence] = Meeting(self.name, sequence, schedule)
        meeting.calls[rank] = call
        if not _agree(meeting.calls, rank, call):
            error = self._disagreement(meeting)
            schedule.fail(lambda: CollectivesDisagree(*error))
            raise CollectivesDisagree(*error)
        if len(meeting.calls) == self._around.world_size:
            del self._open[sequence]
            self._hold(meeting)
        return meeting

    def leave(self, rank: int) -> None:
        """Let the others wait no longer: `rank` has given the group up."""
        if self._left_by is not None:
            return
        self._left_by = rank
        schedule = self._around.schedule
        for meeting in self._open.values():
            for task in meeting.waiting:
                if task.waits_for is meeting:
                    schedule.wake(task, schedule.now_ns)

    def wait(self, rank: int, meeting: Meeting) -> None:
        """See `Meeting.wait`.

        Raises:
            PeerFailed: A rank has left the group before it came to this meeting.
        """
        if meeting.over_ns is None:
            self._check_left(rank)
        meeting.wait()
        if meeting.over_ns is None:
            self._check_left(rank)

    def _check_left(self, rank: int) -> None:
        if self._left_by is not None:
            raise PeerFailed(f"rank {rank}: rank {self._left_by} has given up {self.name} after an error")

    def _hold(self, meeting: Meeting) -> None:
        """Perform a collective to which all ranks have come."""
        around = self._around
        entered = tuple(meeting.calls)
        calls = [meeting.calls[rank] for rank in range(around.world_size)]
        move(calls)
        sent = [call.sent_bytes for call in calls]
        now_ns = around.schedule.now_ns
        meeting.over_ns = around.wires.carry(now_ns, sent, calls[0].pattern)
        around.trace.records.append(
            Transfer(
                group=self.name,
                sequence=meeting.sequence,
                what=str(calls[0].terms),
                sent_bytes=sum(sent),
                entered=entered,
                start_ns=now_ns,
                stop_ns=meeting.over_ns,
            )
        )
        # Its tensors may go; whoever holds the work still needs to know when it is over.
        meeting.calls = {0: dataclasses.replace(calls[0], inputs=(), outputs=())}
        for task in meeting.waiting:
            around.schedule.wake(task, meeting.over_ns)

    def _disagreement(self, meeting: Meeting) -> tuple[str, tuple[Standing, ...]]:
        schedule = self._around.schedule
        rows = []
        for row in standings(schedule.tasks, schedule.now_ns):
            call = meeting.calls.get(row.rank)
            doing = f"has not come ({row.doing})" if call is None else f"came with {_describe(call)}"
            rows.append(dataclasses.replace(row, doing=doing))
        what = f"collective {meeting.sequence} of {self.name}: expected the same call from all ranks"
        return what, tuple(rows)


def _agree(calls: dict[int, Call], rank: int, call: Call) -> bool:
    """Whether `call` fits those that came before it."""
    first = next(iter(calls.values()))
    if call.terms != first.terms:
        return False
    if not any(other.input_splits or other.output_splits for other in (first, call)):
        return True
    return all(_rows(call, rank, other, number) for number, other in calls.items())


def _rows(call: Call, rank: int, other: Call, number: int) -> bool:
    """Whether two ranks of an all-to-all expect of each other what each one sends."""
    uneven = all(one.input_splits and one.output_splits for one in (call, other))
    if not uneven:
        return False
    return (
        call.input_splits[number] == other.output_splits[rank]
        and call.output_splits[number] == other.input_splits[rank]
    )


def _describe(call: Call) -> str:
    splits = f", sending {list(call.input_splits)} rows" if call.input_splits else ""
    return f"{call.terms}{splits}"


class VirtualWork(dist.Work):
    """A collective under way; waiting for it takes virtual time only.

    A timeout is no use: a collective that cannot complete is an error at once.
    """

    def __init__(self, hall: Hall, meeting: Meeting, rank: int, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._hall = hall
        self._meeting = meeting
        self._rank = rank
        self._outputs = list(outputs)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Let virtual time pass until the collective is over.

        Raises:
            CollectivesDisagree: Ranks called different collectives.
            Deadlock: Not all ranks will ever come.
            PeerFailed: A rank raised.
        """
        self._hall.wait(self._rank, self._meeting)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` takes no time."""
        return self._meeting.is_over

    def is_success(self) -> bool:
        """As `is_completed`: what fails, fails the whole run."""
        return self._meeting.is_over

    def exception(self) -> Exception | None:
        """None."""
        return None

    def result(self) -> list[Tensor]:
        """The output tensors."""
        return self._outputs

    def get_future(self) -> Future[Any]:
        """Wait, and return a completed future of the output tensors.

        Torch waits for futures in C++, out of reach of virtual time. So whoever asks for one waits on the spot:
        stock DDP computes the right values on a virtual cluster, and hides nothing.
        """
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self._outputs)
        return future
