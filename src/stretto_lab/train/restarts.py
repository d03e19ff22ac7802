"""Restarts: a run that ended because of damage continues from its last checkpoint, without the ranks that caused it.

A checkpoint of a guarded run is free of damage that guards can see: they check the saved values, and a checkpoint is
compared with its checksums when it is read.
"""

import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path

from stretto import checkpoint
from stretto.errors import ConfigError, WorkerFailed
from stretto.guards.left_out import to_leave_out
from stretto_lab.faults import FaultPlan
from stretto_lab.train.configuration import RunConfig, TaskT
from stretto_lab.train.handle import check_run
from stretto_lab.train.launch import Ranks, train
from stretto_lab.train.outcome import Outcome
from stretto_lab.train.quarantine import note_damage
from stretto_lab.train.state import checkpoints_of


def train_on(ranks: Ranks, run: RunConfig[TaskT], log: Callable[[str], None]) -> Outcome:
    """Train `run`, and after damage resume from its last checkpoint, at most `run.restarts` times.

    Args:
        ranks: All ranks of the first attempt.
        run: The run; its folder exists.
        log: Called with one line of text at every restart.

    Raises:
        WorkerFailed: A rank failed for another reason, too often, or cannot be started again by this process.
    """
    try:
        return train(ranks, run, shows_progress=True)
    except WorkerFailed as failure:
        if not failure.damages:
            raise
        left_out = to_leave_out(failure.damages, ranks.world_size)
        remaining = None if left_out is None or run.restarts == 0 else ranks.without(left_out)
        going_on = None if left_out is None or remaining is None else _without(left_out, run, remaining)
        if ranks.is_first:
            latest = checkpoint.latest(checkpoints_of(run))
            note_damage(
                Path(str(run.run_dir)),
                str(failure),
                failure.damages,
                world_size=ranks.world_size,
                left_out=left_out or (),
                goes_on_with=None if going_on is None else going_on.workers,
                begins_at=None if latest is None else latest.name,
            )
        if left_out is None or remaining is None or going_on is None:
            raise
        log(f"{failure}\n{_in_words(run, left_out, going_on, ranks.world_size)}")
    return train_on(remaining, going_on, log)


def _without(left_out: Collection[int], run: RunConfig[TaskT], remaining: Ranks) -> RunConfig[TaskT] | None:
    """Return the run of the remaining ranks; None if its settings need the excluded ranks."""
    before = remaining.world_size + len(left_out)
    going_on = dataclasses.replace(
        run,
        workers=remaining.world_size,
        ranks_per_node=ranks_per_node(run.ranks_per_node, before, left_out),
        faults=FaultPlan(run.faults).going_on(left_out).faults,
        noise=None if run.noise is None else run.noise.going_on(left_out),
        slow={
            rank - sum(other < rank for other in left_out): factor
            for rank, factor in run.slow.items()
            if rank not in left_out
        },
        resume=True,
        restarts=run.restarts - 1,
    )
    try:
        check_run(going_on, remaining.world_size)
    except ConfigError:  # a strategy whose workers are nodes
        return None
    return going_on


def ranks_per_node(before: int | None, world_size: int, left_out: Collection[int]) -> int | None:
    """Return the number of ranks per node without some ranks; None if nodes would differ in size.

    Args:
        before: Ranks of each node.
        world_size: Number of ranks before.
        left_out: Excluded ranks.
    """
    nodes = [] if before is None else [range(rank, rank + before) for rank in range(0, world_size, before)]
    are_whole = all(len(set(node) & set(left_out)) in (0, len(node)) for node in nodes)
    return before if are_whole else None


def _in_words(
    run: RunConfig[TaskT], left_out: Collection[int], going_on: RunConfig[TaskT], before: int
) -> str:
    latest = checkpoint.latest(checkpoints_of(run))
    begin = "from the beginning, because there is no checkpoint" if latest is None else f"from {latest.name}"
    without = f" without rank {', '.join(map(str, left_out))}" if left_out else ", with the same ranks"
    workers = f"{going_on.workers} of {before} workers"
    if going_on.ranks_per_node != run.ranks_per_node:
        workers += f", no longer summed in nodes of {run.ranks_per_node}, which are no longer whole"
    return f"resuming {begin}{without}: {workers}, {going_on.restarts} more restarts"
