"""The files of a run, which `stretto report` reads: for your own loops, and for the command line.

`config.json` describes the run. `updates.jsonl`, `evaluations.jsonl`, `memory.jsonl` and `incidents.jsonl` hold one
JSON object per line. `tensorboard/` has a curve for each number.
"""

import math
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from stretto.disk import folder_of, writing_to
from stretto.errors import ConfigError, MissingExtra, UsageError
from stretto.fields import shown
from stretto.groups import own_rank
from stretto.json_lines import JsonLines, append_json_line, read_json_lines, replace_json
from stretto.machine import describe_environment, most_bytes
from stretto.parallel import DataParallel
from stretto.records import Incident, Update


class RunFiles:
    """Writes the records of a run; memory.jsonl gets a line whenever an update raises the peak of memory.

    Args:
        folder: The folder.
        resumed_from: Committed updates of the checkpoint from which the run resumes: later updates and evaluations are
            removed, incidents stay. None starts all files again.
        peak_bytes: Returns the peak memory so far on this rank.
    """

    def __init__(self, folder: Path, resumed_from: int | None, peak_bytes: Callable[[], int]) -> None:
        with ExitStack() as opened:  # one that is damaged must not leave the others open
            self._updates, self._evaluations, self._memory = (
                opened.enter_context(closing(JsonLines(folder / f"{name}.jsonl", keep_until=resumed_from)))
                for name in ("updates", "evaluations", "memory")
            )
            opened.pop_all()
        self._incidents = folder / "incidents.jsonl"
        self._peak_bytes = peak_bytes
        self._most_bytes = 0

    def updated(self, update: Update, training_seconds: float) -> None:
        """Write an update, `training_seconds` of training after the start of the run, and its incidents."""
        for incident in update.incidents:
            self.noticed(incident)
        self._updates.write({**update.as_json(), "training_seconds": training_seconds})
        # A file of its own, because the others are equal to the last byte when a simulation is made again.
        if (peak_bytes := self._peak_bytes()) > self._most_bytes:
            self._most_bytes = peak_bytes
            self._memory.write({"step": update.step, "peak_bytes": peak_bytes})

    def noticed(self, incident: Incident) -> None:
        """Write damage that was found outside an update."""
        append_json_line(self._incidents, incident.as_json())

    def evaluated(self, step: int, heldout_loss: float, training_seconds: float) -> None:
        """Write the held-out loss after `step` committed updates."""
        self._evaluations.write(
            {"step": step, "heldout_loss": heldout_loss, "training_seconds": training_seconds}
        )

    def close(self) -> None:
        self._updates.close()
        self._evaluations.close()
        self._memory.close()


class Curves:
    """Writes one TensorBoard curve per number of an update, over committed updates.

    Args:
        folder: The folder for event files.
        resumed_from: Committed updates of the checkpoint from which the run resumes: TensorBoard hides later records.
            None for a new run.

    Raises:
        MissingExtra: `tensorboard` is not installed.
    """

    def __init__(self, folder: Path, resumed_from: int | None) -> None:
        purge_step = None if resumed_from is None else resumed_from + 1
        self._writer = _summary_writer()(str(folder), purge_step=purge_step)

    def updated(self, update: Update, training_seconds: float) -> None:
        """Write an update's numbers."""
        curves = {
            "train/loss": update.loss,
            "train/gradient_norm": update.gradient_norm,
            "speed/samples_per_second": update.samples / update.seconds,
            "speed/exposed_share": update.exposed_seconds / update.seconds,
            "speed/lane_share": update.lane_seconds / update.seconds,
            "speed/sent_bytes": update.sent_bytes,
            "data/wait_share": update.wait_seconds / update.seconds,
        }
        if math.isfinite(update.learning_rates[0]):
            curves["train/learning_rate"] = update.learning_rates[0]
        if update.fresh + update.echoed:
            curves["data/fresh_share"] = update.fresh / (update.fresh + update.echoed)
        if math.isfinite(update.first_use_loss):
            curves["train/first_use_loss"] = update.first_use_loss
        for name, found in (
            ("noise", update.noise),
            ("divergence", update.divergence),
            ("interval", update.interval),
        ):
            if found is not None:
                curves[f"averages/{name}"] = found
        for name, value in curves.items():
            self._writer.add_scalar(name, value, update.step)

    def noticed(self, incident: Incident) -> None:
        """Do nothing: curves do not show damage."""

    def evaluated(self, step: int, heldout_loss: float, training_seconds: float) -> None:
        """Write the held-out loss after `step` committed updates."""
        self._writer.add_scalar("heldout/loss", heldout_loss, step)
        self._writer.add_scalar("heldout/training_seconds", training_seconds, step)

    def close(self) -> None:
        self._writer.close()


class Recorder:
    """Writes the folder of a run from your own loop: the records that `stretto train` writes.

        with stretto.Recorder("runs/mine", parallel, tensorboard=True) as recorder:
            for batch in parallel.feed(loader, on_update=recorder):
                parallel.backward(loss_function(model(batch)))
            parallel.finish()

    All ranks construct one, and rank 0 writes. `stretto report runs/mine` makes a page of the folder. A job that
    resumes from a checkpoint continues in the same folder: later records are removed. A job that starts again replaces
    the files.

    Args:
        folder: The run's folder; it is made if it does not exist.
        job: The job to record; without it the rank comes from `torch.distributed` or a launcher, and the folder does
            not name the strategy.
        tensorboard: Write events for TensorBoard too.
        settings: Settings to show on the page: learning rate, width, data.

    Raises:
        MissingExtra: TensorBoard is not installed.
        DiskError: The folder cannot be written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        job: DataParallel | None = None,
        *,
        tensorboard: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if job is not None and not isinstance(job, DataParallel):
            raise ConfigError(f"Recorder(job={shown(job)}): expected a DataParallel, or None")
        if not isinstance(settings, Mapping | None):
            raise ConfigError(f"Recorder(settings={shown(settings)}): expected values by name, or None")
        self._folder = folder_of(folder, "Recorder(folder)")
        self._job = job
        self._tensorboard = tensorboard
        self._settings = dict(settings or {})
        self._is_writing = (own_rank() if job is None else job.rank) == 0
        self._writers: list[RunFiles | Curves] = []
        self._before = 0.0
        """Seconds of training before the checkpoint from which the job resumed."""
        self._begun = time.perf_counter()
        self._held = 0.0
        self._step = 0
        self._has_begun = False
        if tensorboard:
            _summary_writer()  # a missing package is told before the training
        if self._is_writing:
            with writing_to(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, update: Update) -> None:
        """Record an update; this is what `feed(on_update=...)` calls."""
        if not isinstance(update, Update):
            raise UsageError(f"{self._folder}: expected an Update to record, found {shown(update)}")
        self._begin(update.step - 1)
        self._step = update.step
        for writer in self._writers:
            writer.updated(update, self._seconds)

    def evaluated(self, heldout_loss: float, step: int | None = None) -> None:
        """Record a held-out loss.

        Args:
            heldout_loss: The loss at the committed parameters.
            step: Number of committed updates before it; None uses the job's number, or the last update's.

        Raises:
            UsageError: The number of updates is unknown.
        """
        if step is None and self._job is None and not self._has_begun:
            raise UsageError(
                "evaluated() before the first update: expected step=, or the job when this was made"
            )
        if step is None:
            step = self._step if self._job is None else self._job.steps
        given: Any = heldout_loss.detach() if isinstance(heldout_loss, torch.Tensor) else heldout_loss
        try:
            step, heldout_loss = operator.index(step), float(given)
        except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise UsageError(
                f"{self._folder}: evaluated({shown(heldout_loss)}, step={shown(step)}): expected a loss, and a number "
                "of updates"
            ) from error
        self._begin(step)
        for writer in self._writers:
            writer.evaluated(step, heldout_loss, self._seconds)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Do not count the block, such as an evaluation or a checkpoint, as training time; blocks do not nest."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._held += time.perf_counter() - begun

    def close(self) -> None:
        """Close the files, after the incidents that guards found after the last update."""
        if self._job is not None and self._has_begun:
            for incident in self._job.late_incidents:
                for writer in self._writers:
                    writer.noticed(incident)
        for writer in self._writers:
            writer.close()
        self._writers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _seconds(self) -> float:
        """Training time so far."""
        return self._before + time.perf_counter() - self._begun - self._held

    def _begin(self, done: int) -> None:
        """Open the files for the first record, after `done` updates; records of later updates are removed."""
        if self._has_begun:
            if self._is_writing and not self._writers:
                raise UsageError(f"{self._folder}: the recorder was closed; expected no record after that")
            return
        self._has_begun = True
        if not self._is_writing:
            return
        self._before = _seconds_until(self._folder, done)
        replace_json(self._folder / "config.json", self._config())
        self._writers.append(RunFiles(self._folder, done or None, lambda: most_bytes(_current_device())))
        if self._tensorboard:
            self._writers.append(Curves(self._folder / "tensorboard", done or None))

    def _config(self) -> dict[str, Any]:
        """Return the run's configuration, under the names that `stretto train` uses."""
        config = {"task": self._settings, "environment": describe_environment(_current_device())}
        if self._job is None:
            return {**config, "strategy": "unknown"}
        return {
            **config,
            "strategy": self._job.strategy.name,
            "resolved_strategy": repr(self._job.strategy),
            "wire": self._job.options.wire,
            "workers": self._job.world_size,
            "guards": [guard.name for guard in self._job.guards],
            "parameters": sum(parameter.numel() for parameter in self._job.model.parameters()),
        }


def _current_device() -> torch.device:
    is_on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.device("cuda", torch.cuda.current_device()) if is_on_cuda else torch.device("cpu")


def _seconds_until(folder: Path, step: int) -> float:
    """Return the training time of the last update that a folder keeps; 0 if it keeps none."""
    kept = [one for one in read_json_lines(folder / "updates.jsonl") if one.get("step", math.inf) <= step]
    return float(kept[-1]["training_seconds"]) if kept else 0.0


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtra("tensorboard", "cli", "writing TensorBoard events") from error
    return SummaryWriter
