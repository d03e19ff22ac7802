"""The trace of a run: what both lanes of a rank did, and when.

Every rank has a file of its own with one line per update: the spans that ended since the line before, by lane.

    {"step": 7, "at": 1700000000000000, "compute": [["micro-batch", 0, 5000], ...], "communication": [...], ...}

A span is its kind, its begin in microseconds after `at`, and its length in microseconds. `at` is in microseconds since
1970, so that the lines of all ranks have one clock, as good as the machines' clocks agree; on a virtual cluster it is
virtual time. The spans come from hooks around some calls of the job. They are put there from outside, so that a job
without a trace passes nothing of it.

Note [What a span is]
    micro-batch            forward and backward pass of one micro-batch, until it is counted
    data                   the loop waits for the next batch
    exposed                the compute lane waits for the communication lane
    leaving                the last backward pass of a round whose gradients leave as they come, and until take-off
    reduce, step, gather,  an effect of the strategy is performed, with the waiting for other ranks
    preview, average, ...
    guard                  what guards do on either lane
    evaluation, checkpoint

    Spans are the host's time. A GPU may begin later and be busy for longer than the call that has started its work.
"""

import functools
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from stretto.disk import writing_to
from stretto.engine.round import Listener, LossFunction
from stretto.json_lines import JsonLines
from stretto.parallel import DataParallel
from stretto.records import Update
from stretto.strategies import contract
from stretto_lab.observe.records import Observer

FOLDER = "traces"
"""Of a run: it holds the files of all ranks."""
LEAST_SECONDS = 10e-6
"""Spans shorter than this are left out: they would fill the file and be too narrow to see."""

_GUARDED = ("round_ends", "landing_begins", "installed", "committed_is_read")
"""What guards do on the compute lane."""
_INSTANT = (contract.Boundary, contract.Look, contract.Postpone)
"""Effects that do no work."""
Lane = Literal["compute", "communication"]


def trace_file(folder: Path, rank: int) -> Path:
    """Return where the trace of a rank lies in the folder of a run."""
    return folder / FOLDER / f"rank-{rank}.jsonl"


class Trace(Observer):
    """Records what one rank does, and writes it after every update.

    Args:
        path: The file.
        resumed_from: Committed updates of the checkpoint that the run continues from; later lines are dropped.
        now: The clock, in seconds.
        epoch: Seconds from 1970 to the zero of that clock; 0 for a virtual one.
        peak_bytes: Returns the most memory that was in use so far.
    """

    def __init__(
        self,
        path: Path,
        resumed_from: int | None,
        *,
        now: Callable[[], float],
        epoch: float,
        peak_bytes: Callable[[], int],
    ) -> None:
        with writing_to(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = JsonLines(path, keep_until=resumed_from)
        self._now = now
        self._epoch = epoch
        self._peak_bytes = peak_bytes
        self._step = resumed_from or 0
        # The lanes may be two threads; what one appends is never what the other one takes.
        self._spans: dict[Lane, deque[tuple[str, float, float]]] = {
            "compute": deque(),
            "communication": deque(),
        }

    def begins(self, loop: Any) -> None:
        """Put the hooks around the calls of the loop and its job."""
        parallel = loop.handle
        if isinstance(parallel, DataParallel):
            self._follow(parallel)
        self._time_calls(loop, "evaluate", "compute", "evaluation")
        self._time_calls(loop, "save", "compute", "checkpoint")

    def updated(self, update: Update, training_seconds: float) -> None:
        self._step = update.step
        self._write()

    def close(self) -> None:
        """Write what is left, and close the file."""
        if any(self._spans.values()):
            self._write()
        self._lines.close()

    def note(self, lane: Lane, kind: str, started: float) -> None:
        """Record what began at `started` and ends now."""
        ended = self._now()
        if ended - started >= LEAST_SECONDS:
            self._spans[lane].append((kind, started, ended))

    def timed(self, function: Callable[..., Any], lane: Lane, kind: str) -> Callable[..., Any]:
        """Return `function` with a record of each of its calls."""

        @functools.wraps(function)
        def with_record(*args: Any, **named: Any) -> Any:
            started = self._now()
            try:
                return function(*args, **named)
            finally:
                self.note(lane, kind, started)

        return with_record

    def _time_calls(self, holder: Any, name: str, lane: Lane, kind: str) -> None:
        setattr(holder, name, self.timed(getattr(holder, name), lane, kind))

    def _follow(self, parallel: DataParallel) -> None:
        """Record what both lanes of a job do from now on."""
        compute = parallel.job.compute
        compute.model.listeners.append(_MicroBatches(self, self._now))
        self._time_calls(compute, "wait_for_lane", "compute", "exposed")
        self._time_calls(parallel.feeding.input, "take", "compute", "data")
        comm, replica = parallel.job.comm, parallel.job.replica
        for guard in compute.model.listeners:
            for name in () if isinstance(guard, _MicroBatches) else _GUARDED:
                self._time_calls(guard, name, "compute", "guard")
        comm._performers = {
            effect: perform if effect in _INSTANT else self.timed(perform, "communication", _kind_of(effect))
            for effect, perform in comm._performers.items()
        }
        left_at: list[float] = []
        depart, reduce = replica.depart, self.timed(replica.reduce, "communication", "reduce")

        def departing(*args: Any) -> Any:
            left_at.append(self._now())
            return depart(*args)

        def reducing(round: Any) -> Any:
            if left_at:
                self.note("communication", "leaving", left_at.pop())
            return reduce(round)

        setattr(replica, "depart", departing)  # noqa: B010  # a method of this one object, replaced
        setattr(replica, "reduce", reducing)  # noqa: B010  # as above

    def _write(self) -> None:
        taken = {lane: [spans.popleft() for _ in range(len(spans))] for lane, spans in self._spans.items()}
        first = min((started for spans in taken.values() for _, started, _ in spans), default=self._now())
        lanes: dict[str, Any] = {
            lane: [
                (kind, round((started - first) * 1e6), round((ended - started) * 1e6))
                for kind, started, ended in spans
            ]
            for lane, spans in taken.items()
        }
        at = round((self._epoch + first) * 1e6)
        self._lines.write({"step": self._step, "at": at, **lanes, "peak_bytes": self._peak_bytes()})


class _MicroBatches(Listener):
    """Hears of a job's micro-batches."""

    def __init__(self, trace: Trace, now: Callable[[], float]) -> None:
        self._trace = trace
        self._now = now
        self._began: float | None = None

    def micro_batch_begins(self, loss_function: LossFunction, batch: object) -> None:
        self._began = self._now()

    def micro_batch_counted(self, weight: float, samples: int, fresh_samples: int) -> None:
        if self._began is not None:
            self._trace.note("compute", "micro-batch", self._began)
            self._began = None


def _kind_of(effect: type) -> str:
    """Return the name of a strategy's effect; all others are guards'."""
    return effect.__name__.lower() if effect.__module__ == contract.__name__ else "guard"
