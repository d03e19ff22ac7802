"""What a run saves beside model and optimizer, and how it goes on from there."""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from stretto import checkpoint
from stretto.errors import TornCheckpoint
from stretto.parallel import DataParallel
from stretto.recipes import Task
from stretto.records import Verdict
from stretto.train.configuration import RunConfig, TaskT
from stretto.train.data import reshard_loader
from stretto.train.handle import Handle
from stretto.train.outcome import Evaluation


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """What has happened before this process: nothing, or what the checkpoint says."""

    step: int | None = None
    """Committed updates of the checkpoint; None for a new run."""
    updates_fed: float = 0.0
    """Updates for which every rank has handed out its micro-batches; a fraction where that of the next has begun."""
    training_seconds: float = 0.0
    """Training time."""
    evaluations: tuple[Evaluation, ...] = ()
    """All looks at the held-out samples, the one before the first update among them."""
    verdicts: tuple[Verdict, ...] = ()
    """One for every damaged checkpoint that this process has passed over."""

    def save(self, run: RunConfig[TaskT], task: Task, parallel: Handle) -> None:
        """Write a checkpoint; all ranks must call, right after an update, with the past that it is then."""
        extra = dataclasses.asdict(self)
        del extra["verdicts"]
        extra["scheduler"] = None if task.scheduler is None else task.scheduler.state_dict()
        checkpoint.save(
            _savable(parallel),
            checkpoints_of(run),
            loader=task.loader,
            extra=extra,
            keep=run.checkpoints_kept,
        )

    @classmethod
    def restore(cls, run: RunConfig[TaskT], task: Task, parallel: Handle) -> Self:
        """Continue from the last good checkpoint where the run says so and there is one; all ranks must call.

        Raises:
            TornCheckpoint: There are checkpoints, and all of them are damaged.
        """
        paths = list(checkpoint.complete(checkpoints_of(run))) if run.resume else []
        if not paths:
            return cls()
        restored = _load_first_sound(paths, task, parallel)
        if len(restored.loader_states) != parallel.world_size:
            states = restored.loader_states
            task.loader.load_state_dict(reshard_loader(states, parallel.rank, parallel.world_size))
        extra: dict[str, Any] = dict(restored.extra)
        scheduler = extra.pop("scheduler")
        if task.scheduler is not None:
            task.scheduler.load_state_dict(scheduler)
        evaluations = tuple(Evaluation(**one) for one in extra.pop("evaluations"))
        verdicts = tuple(
            Verdict(
                step=restored.step,
                guard="checkpoint",
                site="checkpoint",
                part=path.name,
                ranks=(),
                action=f"went back to {restored.path.name}",
            )
            for path in paths[: paths.index(restored.path)]
        )
        return cls(**{**extra, "step": restored.step, "evaluations": evaluations, "verdicts": verdicts})


def _load_first_sound(paths: Sequence[Path], task: Task, parallel: Handle) -> checkpoint.Restored:
    for path in paths[:-1]:
        with contextlib.suppress(TornCheckpoint):  # found by all ranks alike, before anything has changed
            return checkpoint.load(_savable(parallel), path, loader=task.loader)
    return checkpoint.load(_savable(parallel), paths[-1], loader=task.loader)


def checkpoints_of(run: RunConfig[TaskT]) -> Path:
    """Return the folder of a run's checkpoints."""
    return Path(str(run.run_dir), "checkpoints")


def _savable(parallel: Handle) -> DataParallel:
    if not isinstance(parallel, DataParallel):
        raise TypeError(f"only DataParallel can be saved, not {type(parallel).__name__}")
    return parallel
