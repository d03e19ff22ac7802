"""The data of a run, and the state that it saves besides model and optimizer."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, cast

from torch import distributed as dist

from stretto import checkpoint
from stretto.echo import EchoLoader, EchoOptions, Even, Plan
from stretto.echo.text import parse_plan
from stretto.errors import TornCheckpoint
from stretto.parallel import DataParallel
from stretto.records import Incident
from stretto.survive import Term
from stretto_lab.recipes import ResumableLoader, Task, reshard
from stretto_lab.recipes.task import Batch
from stretto_lab.train.budget import Budget
from stretto_lab.train.configuration import RunConfig, TaskT, Training
from stretto_lab.train.handle import Handle
from stretto_lab.train.outcome import Evaluation
from stretto_lab.train.slow_loader import SlowLoader, SlowStore
from stretto_lab.virtual import VirtualGroup, VirtualStore

KEPT = 3
"""Number of kept checkpoints of a run, the latest ones."""


def loader_of(
    run: RunConfig[TaskT],
    loader: ResumableLoader[Batch],
    rank: int,
    group: dist.ProcessGroup | None = None,
    budget: Budget | None = None,
) -> ResumableLoader[Batch]:
    """Return the task's loader, slowed down and echoed as the run says.

    A slow loader is read ahead in the background even without an echo, as a loader with workers is: an echo must gain
    something over a loop that already overlaps.

    Args:
        run: The run.
        loader: The task's loader.
        rank: This rank.
        group: The group of all ranks; on a virtual group a slow loader takes virtual time.
        budget: The length for an echo's schedule that names no steps.
    """
    if run.echo == "none" and run.slow_loader == "none":
        return loader
    return EchoLoader(
        slowed(run, loader, rank, group), _plan(run, budget), options=EchoOptions(seed=run.seed)
    )


def slowed(
    run: Training[TaskT],
    loader: ResumableLoader[Batch],
    rank: int,
    group: dist.ProcessGroup | None = None,
) -> ResumableLoader[Batch]:
    """Return the task's loader, slowed down if the run says so; see `loader_of` for the arguments."""
    store = SlowStore.parse(run.slow_loader)
    if store is None:
        return loader
    seed = run.seed + rank
    if isinstance(group, VirtualGroup):
        # It passes attributes of the loader on, such as `state_dict`.
        return cast(ResumableLoader[Batch], VirtualStore(loader, group, store.durations(seed)))
    return SlowLoader(loader, store, seed)


def reshard_loader(
    states: Sequence[dict[str, Any]], rank: int, world_size: int, update: int | None = None
) -> dict[str, Any]:
    """Return the loader state for `rank` of `world_size`, from the states of all ranks of the saved run.

    As `recipes.reshard`. Batches that an echo still holds are dropped with their remaining uses.
    """
    if "position" not in states[0]:
        return reshard(states, rank, world_size, update)
    after = reshard([state["after"] for state in states], rank, world_size, update)
    position = {**states[0]["position"], "in_epoch": False}
    return {**states[0], "position": position, "held": [], "before": after, "after": after, "batches": None}


def _plan(run: RunConfig[TaskT], budget: Budget | None) -> Plan:
    return Even(1) if run.echo == "none" else parse_plan(run.echo, None if budget is None else budget.updates)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """The progress of a run: its beginning, or the state in a checkpoint."""

    step: int | None = None
    """Number of committed updates in the checkpoint; None for a new run."""
    training_seconds: float = 0.0
    """Training time so far."""
    samples: int | None = None
    """Samples at first use so far, if the run has a budget of samples."""
    evaluations: tuple[Evaluation, ...] = ()
    """All evaluations, including the one before the first update."""
    incidents: tuple[Incident, ...] = ()
    """An incident for every damaged checkpoint that this process did not use; not saved."""
    notes: tuple[str, ...] = ()
    """Notes on what could not be restored exactly; not saved."""

    def extra(self) -> dict[str, Any]:
        """Return the saved state in addition to model, optimizer and loader."""
        extra = dataclasses.asdict(self)
        del extra["incidents"], extra["notes"]
        return extra

    @classmethod
    def restore(
        cls, run: RunConfig[TaskT], task: Task, parallel: Handle, memory: Term | None, total: int | None
    ) -> Self:
        """Load the state in the ranks' memory, or the last good checkpoint, if there is one; all ranks must call it.

        Args:
            run: The run's configuration.
            task: The task; its model and loader are loaded.
            parallel: The task's job.
            memory: The state in memory, if the job survives lost ranks.
            total: Micro-batches of all ranks together in an update, if ranks may have unequally many.

        Raises:
            TornCheckpoint: There are checkpoints, and all are damaged; or no state in memory is complete.
        """
        if memory is None:
            return cls._from_files(run, task, parallel, total)
        begun: list[Self] = []
        restored = memory.go_on(
            savable(parallel),
            loader=task.loader,
            extra=lambda: begun[0].extra(),
            begin=lambda: begun.append(cls._from_files(run, task, parallel, total)),
        )
        return begun[0] if restored is None else cls._of(restored, task, parallel, (), total)

    @classmethod
    def _from_files(cls, run: RunConfig[TaskT], task: Task, parallel: Handle, total: int | None) -> Self:
        paths = checkpoint.newest_first(checkpoints_of(run)) if run.resume else []
        if not paths:
            return cls(notes=("no checkpoint yet: the run begins at update 0",) if run.resume else ())
        damaged: list[Path] = []
        for path in paths:
            try:  # a damaged one is found by all ranks alike, before anything has changed
                restored = checkpoint.load(savable(parallel), path, loader=task.loader)
            except TornCheckpoint:
                damaged.append(path)
                if path == paths[-1]:
                    raise
            else:
                break
        incidents = tuple(
            Incident(
                step=restored.step,
                guard="checkpoint",
                site="checkpoint",
                part=one.name,
                ranks=(),
                action=f"went back to {path.name}",
            )
            for one in damaged
        )
        return cls._of(restored, task, parallel, incidents, total)

    @classmethod
    def _of(
        cls,
        restored: checkpoint.Restored,
        task: Task,
        parallel: Handle,
        incidents: tuple[Incident, ...],
        total: int | None,
    ) -> Self:
        if len(restored.loader_states) != parallel.world_size:
            states = restored.loader_states
            task.loader.load_state_dict(reshard_loader(states, parallel.rank, parallel.world_size, total))
        extra: dict[str, Any] = dict(restored.extra)
        evaluations = tuple(Evaluation(**one) for one in extra.pop("evaluations"))
        found = {"evaluations": evaluations, "incidents": incidents, "notes": restored.notes}
        step = restored.step or None  # what was kept before the first update is the beginning
        return cls(**{**extra, **found, "step": step})


def checkpoints_of(run: RunConfig[TaskT]) -> Path:
    """Return the folder of a run's checkpoints."""
    return Path(str(run.run_dir), "checkpoints")


def savable(parallel: Handle) -> DataParallel:
    """Return the job as a `DataParallel`, which can be saved; raise TypeError for a stock method."""
    if not isinstance(parallel, DataParallel):
        raise TypeError(f"only DataParallel can be saved, not {type(parallel).__name__}")
    return parallel
