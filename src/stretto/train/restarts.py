"""Restarts: a run that damage has ended goes on from its last checkpoint, without those the damage is laid to.

Guards look at what is saved, and what is read is compared with its digests: a checkpoint of a guarded run holds no
damage that they see.
"""

import dataclasses
import platform
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from stretto import checkpoint
from stretto.errors import CorruptionError, Quarantined, WorkerFailed
from stretto.faults import FaultPlan
from stretto.guards.strikes import blame
from stretto.observe import append_json_line
from stretto.records import Incident
from stretto.train.configuration import RunConfig, TaskT
from stretto.train.launch import Ranks
from stretto.train.outcome import Outcome
from stretto.train.past import checkpoints_of

FILE = "quarantine.jsonl"
"""One object for every time that damage has ended the run."""


def train_on(ranks: Ranks, run: RunConfig[TaskT], tell: Callable[[str], None]) -> Outcome:
    """Train `run`, and after damage go on from its last checkpoint, `run.restarts` times at most.

    Args:
        ranks: Whom to begin with.
        run: What to do; its folder is there.
        tell: Says a line to the user.

    Raises:
        WorkerFailed: A rank failed for another reason, or once too often, or is not for this process to start again.
    """
    try:
        return ranks.train(run, shows_progress=True)
    except WorkerFailed as failure:
        if not failure.damages:
            raise
        left_out = to_leave_out(failure.damages, ranks.world_size)
        remaining = None if left_out is None or run.restarts == 0 else ranks.without(left_out)
        if ranks.is_first:
            _record(run, failure, ranks, left_out or (), remaining)
        if left_out is None or remaining is None:
            raise
        tell(f"{failure}\n{_in_words(run, left_out, remaining)}")
    faults = FaultPlan(run.faults).going_on(left_out).faults
    going_on = dataclasses.replace(
        run, workers=remaining.world_size, faults=faults, resume=True, restarts=run.restarts - 1
    )
    return train_on(remaining, going_on, tell)


def to_leave_out(damages: Sequence[CorruptionError], world_size: int) -> tuple[int, ...] | None:
    """Return the ranks that a run goes on without; None where it cannot go on.

    These are the ranks that damage is laid to, and of a link that it is laid to the sender. Where they are all ranks,
    the same ones go on, unless they have been repaired as often as allowed.
    """
    culprits = blame({link for damage in damages for link in damage.links}).values()
    senders = {culprit if isinstance(culprit, int) else culprit[0] for culprit in culprits}
    named = senders.union(*(damage.ranks for damage in damages))
    if len(named) < world_size:
        return tuple(sorted(named))
    return None if any(isinstance(damage, Quarantined) for damage in damages) else ()


def _record(
    run: RunConfig[TaskT],
    failure: WorkerFailed,
    ranks: Ranks,
    left_out: Collection[int],
    remaining: Ranks | None,
) -> None:
    found = dict.fromkeys(incident for damage in failure.damages for incident in damage.incidents)
    latest = checkpoint.latest(checkpoints_of(run))
    append_json_line(
        Path(str(run.run_dir), FILE),
        {
            "error": type(failure.damages[0]).__name__,
            "cause": str(failure),
            "host": platform.node(),
            "world_size": ranks.world_size,
            "named": sorted({rank for damage in failure.damages for rank in damage.ranks}),
            "links": sorted({link for damage in failure.damages for link in damage.links}),
            "left_out": list(left_out),
            "goes_on_with": None if remaining is None else remaining.world_size,
            "checkpoint": None if latest is None else latest.name,
            "incidents": [incident.as_json() for incident in found if isinstance(incident, Incident)],
        },
    )


def _in_words(run: RunConfig[TaskT], left_out: Collection[int], remaining: Ranks) -> str:
    latest = checkpoint.latest(checkpoints_of(run))
    begin = "from the beginning, for want of a checkpoint" if latest is None else f"from {latest.name}"
    without = f" without rank {', '.join(map(str, left_out))}" if left_out else ", with the same ranks"
    workers = f"{remaining.world_size} of {run.workers} workers"
    return f"going on {begin}{without}: {workers}, {run.restarts - 1} more restarts"
