"""The trace of a run: every rank's work in virtual time; and every rank's state at a failure.

`Trace` has one record per piece of work and per collective, in the order of time. `rank_statuses` has one row per rank,
for errors about all ranks.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import xxhash

from stretto import errors
from stretto_lab.virtual.clock import Schedule, Task


class Span(NamedTuple):
    """One piece of work of one rank."""

    rank: int
    work: str
    """Kind of work, such as micro-batch or step."""
    start_ns: int
    stop_ns: int


class Transfer(NamedTuple):
    """One collective of all ranks of a group."""

    group: str
    sequence: int
    """Position among the group's collectives, from 0."""
    what: str
    """Operation, elements and dtype."""
    sent_bytes: int
    """Bytes sent by all ranks together."""
    entered: tuple[int, ...]
    """The ranks in the order of their calls."""
    start_ns: int
    """Time of the last rank's call."""
    stop_ns: int
    """Time of completion."""


class Trace:
    """The records of one run."""

    def __init__(self) -> None:
        self.records: list[Span | Transfer] = []

    def lines(self) -> Iterator[str]:
        """Yield every record as one line of JSON."""
        for record in self.records:
            yield json.dumps({"record": type(record).__name__.lower(), **record._asdict()})

    def digest(self) -> str:
        """Return a hexadecimal xxh3 digest of all lines: equal for equal runs."""
        digest = xxhash.xxh3_128()
        for line in self.lines():
            digest.update(line.encode())
        return digest.hexdigest()

    def write(self, path: Path) -> None:
        """Write the lines to a file."""
        path.write_text("".join(f"{line}\n" for line in self.lines()))


# What every rank does at a failure

LANE = "its communication lane"
"""Text for a program that waits for its lane's result."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """The state of one rank at the moment of a failure."""

    rank: int
    doing: str
    """The event that it waits for, or that it computes or has returned."""
    since_ns: int
    """Start of this state, in virtual nanoseconds."""
    line: str
    """The user's line that its program runs, as `file:line in function`; empty after the program's end."""

    def __str__(self) -> str:
        place = f", at {self.line}" if self.line else ""
        return f"rank {self.rank}: {self.doing}, since {self.since_ns / 1e6:.6f} ms{place}"


def rank_statuses(schedule: Schedule) -> list[RankStatus]:
    """Return the current state of every rank, in rank order."""
    programs = {task.rank: task for task in schedule.tasks if not task.is_lane}
    # Of a rank's lanes, the last one belongs to its present job.
    lanes = {task.rank: task for task in schedule.tasks if task.is_lane and not task.has_ended}
    return [_rank_status(programs[rank], lanes.get(rank), schedule.now_ns) for rank in sorted(programs)]


def _rank_status(program: Task, lane: Task | None, now_ns: int) -> RankStatus:
    if program.has_ended:
        return RankStatus(rank=program.rank, doing="has returned", since_ns=program.waits_since_ns, line="")
    line = _user_line(program.frame)
    if program.waits_for is None:
        return RankStatus(rank=program.rank, doing="is computing", since_ns=now_ns, line=line)
    if lane is not None and lane.waits_for is not None and str(program.waits_for) == LANE:
        doing, since_ns = f"its communication lane waits for {lane.waits_for}", lane.waits_since_ns
    else:
        doing, since_ns = f"waits for {program.waits_for}", program.waits_since_ns
    return RankStatus(rank=program.rank, doing=doing, since_ns=since_ns, line=line)


_LIBRARY = (
    f"{Path(errors.__file__).parent}/",
    *(f"{Path(__file__).parents[1] / name}/" for name in ("faults", "observe", "virtual")),
    f"{Path(torch.__file__).parent}/",
    *(str(sys.modules[name].__file__) for name in ("threading", "contextlib")),
)
"""Code below a user's program. Other parts of the lab use the library as such a program does."""


def _user_line(frame: FrameType | None) -> str:
    """Return the innermost line outside the library; if there is none, the innermost of all."""
    innermost = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_LIBRARY, "<")):
            return _describe(frame)
        frame = frame.f_back
    return "" if innermost is None else _describe(innermost)


def _describe(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
