"""All options of a run: recipe, workers, and the arms of a comparison.

Options             how `DataParallel` works
Training            recipe and length
  Job               on real workers
    RunConfig       one run, with its files
    CompareConfig   several strategies
    DiagnoseConfig  a few steps
  SimulateConfig    on a virtual cluster (`stretto_lab.train.simulation`)
"""

import dataclasses
import math
from typing import Any, Generic, Literal, Self, TypeVar

from stretto.echo.text import parse_plan
from stretto.engine import Clock, Options
from stretto.errors import ConfigError
from stretto.fields import check_at_least, is_count
from stretto.groups import Link
from stretto.guards.text import parse_guards
from stretto_lab.faults import Fault
from stretto_lab.recipes import TaskConfig
from stretto_lab.train.arms import AUTO, Arm, parse_arm, parse_arms
from stretto_lab.train.slow_loader import SlowStore

TaskT = TypeVar("TaskT", bound=TaskConfig)

DEFAULT_UPDATES = 240
"""Default length of a run."""
DEFAULT_PATIENCE = 600.0
"""Seconds after which a run gives up if only a loss would end it."""


def part_of(record: Any, kind: type) -> dict[str, Any]:
    """Return the fields of `record` that belong to `kind`, its class or a parent class, by name."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(kind)}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Training(Options, Generic[TaskT]):
    """The recipe and its training, together with the options of `DataParallel`."""

    task: TaskT
    """Model, data and optimizer, as the recipe returns them."""
    seed: int = 0
    """Seed of the initial parameters and all draws, including the order of the data. Not negative."""
    updates: int | None = None
    """Committed updates after which the run ends; None for no limit."""
    samples: int | None = None
    """Samples after which the run ends, instead of updates; it counts samples of all ranks at their first use, so
    repeated batches are free. Schedules stretch over them. The run ends with the first update at or beyond this number;
    if communication is hidden, under a clock or an echo, one update later."""
    micro_batches: int = 4
    """Micro-batches per rank and update; the batch is this number times the ranks times the recipe's own batch."""
    clock: Clock | None = None
    """MIN,MAX micro-batches per rank and round, by the clock instead of a fixed number: a rank accumulates until the
    last exchange has ended. Strategies that do not overlap use `micro_batches`."""
    guards: tuple[str, ...] = ()
    """Watch values: standard, or replica, rest, audit; several with commas between them, settings after colons, as
    rest,audit:rate=0.01. standard means all guards that fit the strategy, and `verified`. See the page guards."""
    echo: str = "none"
    """Use batches again: even, bernoulli, ready or auto; in other updates, while the next batches are being loaded.
    Settings follow after colons, as in even:uses=2.5 or with a schedule bernoulli:p=cosine(1,0.25). See the page echo,
    and `stretto diagnose` first."""
    slow_loader: str = "none"
    """Make loading slow: MS[,decode][,jitter=CV] per micro-batch; the loader waits, or with decode it keeps a core
    busy."""
    evaluate_every: int | None = 100
    """Updates between evaluations of the held-out loss, besides the evaluations before and after the run; None for
    these two alone."""

    def __post_init__(self) -> None:
        Options.__post_init__(self)  # a bare super() does not find its class in a slotted dataclass
        check_at_least(self, seed=0, updates=1, samples=1, micro_batches=1, evaluate_every=1)
        if self.updates is not None and self.samples is not None:
            raise ConfigError(
                f"updates={self.updates} and samples={self.samples}: expected one length of the run; remove the other"
            )
        if self.samples is not None:
            samples_of(self.task)
        parse_guards(self.guards)
        SlowStore.parse(self.slow_loader)
        if self.echo != "none":
            parse_plan(self.echo, self.planned_updates if self.samples is None else 1)

    @property
    def options(self) -> Options:
        """The options of `DataParallel`."""
        return Options(**part_of(self, Options))

    @property
    def planned_updates(self) -> int | None:
        """Committed updates after which the run ends; None if only time or loss end it."""
        return self.updates


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job(Training[TaskT]):
    """The recipe, its real workers, and its end."""

    workers: int | None = None
    """Local processes to start; None starts one per CUDA device, or 2 on CPUs. Under a launcher such as torchrun its
    ranks count instead."""
    shard: int = 1
    """Consecutive workers that hold one model together, sharded by FSDP2; the strategy trains across such nodes. 1
    means that every worker holds a whole model. See the page sharded."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; auto uses CUDA if every local worker has its own device."""
    updates: int | None = None
    """Updates after which the run ends; 240 if nothing else ends it. Learning-rate schedules stretch over them."""
    seconds: float | None = None
    """Training time after which the run ends, without evaluations and checkpoints."""
    to_loss: float | None = None
    """Held-out loss that ends the run, once two evaluations in a row are at or below it. If nothing else is set to end
    the run, it gives up after 600 s of training."""
    link: str = "none"
    """Slow link to train over, as 1gbit or 50mbit,2ms; throttles Gloo, needs no root."""
    slow: dict[int, float] = dataclasses.field(default_factory=dict)
    """Ranks to slow down: with 3=2.5,7=1.2 rank 3 takes 2.5 times as long for a micro-batch. It waits for the
    additional time and does not compute; factors of at least 1."""

    def __post_init__(self) -> None:
        Training.__post_init__(self)
        if too_fast := [
            f"{rank}={factor:g}" for rank, factor in self.slow.items() if not 1 <= factor < math.inf
        ]:
            raise ConfigError(
                f"slow={too_fast[0]}: a rank can only be made slower: expected a factor of at least 1"
            )
        check_at_least(self, workers=1, shard=1)
        if self.seconds is not None and not self.seconds > 0:
            raise ConfigError(f"seconds must be positive, found {self.seconds}")
        if self.to_loss is not None and math.isnan(self.to_loss):
            raise ConfigError(f"to_loss must be a number that a loss can reach, found {self.to_loss}")
        if self.to_loss is not None and self.evaluate_every is None:
            raise ConfigError("to_loss needs evaluations: set evaluate_every")
        Link.parse(self.link)

    @property
    def planned_updates(self) -> int | None:
        """Committed updates after which the run ends; None if only time or loss end it."""
        others = (self.samples, self.seconds, self.to_loss)
        return DEFAULT_UPDATES if self.updates is None and others == (None, None, None) else self.updates

    @property
    def planned_seconds(self) -> float | None:
        """Training time after which the run ends; None if time does not end it."""
        others = (self.updates, self.samples, self.seconds)
        return DEFAULT_PATIENCE if self.to_loss is not None and others == (None, None, None) else self.seconds

    def fitted_to(self, arm: Arm) -> Self:
        """Return this job with formats that suit this arm; other arms may share the job."""
        return dataclasses.replace(
            self,
            wire=arm.settings.get("wire", self.wire),
            changes=self.changes if arm.sends_changes else None,
        )

    def run_of(self, arm: Arm) -> "RunConfig[TaskT]":
        """Return the run of one arm: this job's settings, replaced by the arm's settings.

        Raises:
            ConfigError: The arm sets an option that the job does not have or a value that is not allowed, or another
                wire than the job.
        """
        changes = dict(arm.settings)
        if self.wire not in (changes.get("wire", self.wire), Options().wire):
            raise ConfigError(
                f"wire={self.wire!r} and strategy={arm.text!r}: expected one wire; remove the other"
            )
        if "lr" in changes:
            changes["task"] = _with_rate(self.task, changes.pop("lr"))
        if "micro_batches" in changes:
            changes.setdefault("clock", None)
        if not arm.overlaps:
            changes["clock"] = None
        shared = part_of(self, RunConfig if isinstance(self, RunConfig) else Job)
        return RunConfig(**{**shared, **changes, "strategy": arm.text})


def samples_of(task: TaskConfig) -> int:
    """Return how many samples a micro-batch of a task has.

    Raises:
        ConfigError: The task's options do not say so.
    """
    batch: Any = getattr(task, "batch", None)
    if not is_count(batch, 1):
        raise ConfigError(
            f"{type(task).__name__} has no option batch, the number of samples of a micro-batch: expected a "
            "number of updates instead of samples"
        )
    return int(batch)


def _with_rate(task: TaskT, rate: float) -> TaskT:
    if not dataclasses.is_dataclass(task) or "lr" not in {field.name for field in dataclasses.fields(task)}:
        raise ConfigError(f"{type(task).__name__} has no field lr that an arm could set")
    return dataclasses.replace(task, lr=rate)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(Job[TaskT]):
    """One training run, with its files."""

    strategy: str = "zero1"
    """auto, ddp, zero1, dpu, wp, acco, average, local, diloco, paft-sync or paft-dyn; its settings follow after colons,
    as in acco:first=1 or average:4:wire=int4. auto uses the choice of `stretto plan`."""
    run_dir: str | None = None
    """Folder for configuration, records, TensorBoard events and checkpoints; None makes a new folder in runs/."""
    strikes: int | None = 3
    """Number of updates with damage from the same rank or link after which the job continues without it; None for no
    limit."""
    restarts: int = 3
    """How often local workers restart from the last checkpoint, after damage that is frequent or cannot be repaired,
    without the ranks that caused it; 0 for never."""
    survive: bool = False
    """Continue when a local worker dies, from the memory of the other workers, and start a new worker to replace it; at
    most `restarts` times. See the page survive."""
    faults: tuple[Fault, ...] = ()
    """Faults to inject as a rehearsal: SITE:rank=R[:instant=N][:lasts=sticky]..., as masters:rank=1:instant=3, or with
    rank=all; see the page guards."""
    resume: bool = False
    """Resume the run in --run-dir from its last good checkpoint, or start it there. `stretto resume` repeats the other
    options too."""
    checkpoint_every: int | None = 50
    """Updates between checkpoints, of which the latest three are kept; None for no checkpoints."""
    tensorboard: bool = True
    """Write TensorBoard events."""

    def __post_init__(self) -> None:
        Job.__post_init__(self)
        check_at_least(self, checkpoint_every=1, restarts=0)
        if self.strategy != AUTO:
            parse_arm(self.strategy)
        if self.resume and self.run_dir is None:
            raise ConfigError("resume needs the folder of the run to continue: set run_dir")
        of_ranks = {"faults": self.faults, "noise": self.noise is not None and self.noise.ranks is not None}
        if self.survive and (asked := [name for name, names_ranks in of_ranks.items() if names_ranks]):
            raise ConfigError(
                f"survive does not work with {' and '.join(asked)}, which name ranks: survivors get new "
                "numbers; remove one of the options"
            )

    @property
    def saves_every(self) -> int | None:
        """Updates between checkpoints; None if there are none, or no folder for them."""
        return None if self.run_dir is None else self.checkpoint_every


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DiagnoseConfig(Job[TaskT]):
    """Whether a job waits for its data, and how much an echo would gain; runs a few real steps, and discards them."""

    strategy: str = "zero1"
    """ddp, zero1, dpu, wp, acco, average, local, diloco, paft-sync or paft-dyn; it decides what the steps communicate,
    and whether the communication is hidden."""
    batches: int = 32
    """Micro-batches per measurement, rounded up to whole updates; it measures the loader alone, the step alone, and
    both."""

    def __post_init__(self) -> None:
        Job.__post_init__(self)
        check_at_least(self, batches=1)
        parse_arm(self.strategy)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompareConfig(Job[TaskT]):
    """Several strategies, one after another on the same link, in several repeats."""

    strategies: tuple[str, ...] = ("compute", "ddp", "zero1", "dpu", "wp", "acco")
    """Arms: of train, compute, torch-ddp, torch-ddp-bf16, torch-ddp-powersgd, torch-ddp-zero, torch-local-sgd,
    torch-fsdp2, or your own as FILE.py:NAME; with commas between them. Settings of one arm follow after colons:
    wp:wire=bf16:lr=2e-3, acco:clock=1,8, torch-local-sgd:interval=20. The arms of train are its strategies; compute
    never communicates; the others are methods of PyTorch."""
    repeats: int = 1
    """How often every arm runs; all arms run once before any runs again, and the seed grows by one for each repeat."""
    out: str = "runs/comparison"
    """Folder for compare.json, which is written again after every run."""
    faults: tuple[Fault, ...] = ()
    """Faults to inject in every run: SITE:rank=R[:instant=N][:lasts=sticky]..., as masters:rank=1:instant=3, or with
    rank=all; see the page guards."""
    evaluate_every: int | None = 10
    """Updates between evaluations of the held-out loss, with the clock stopped; None evaluates only before and after a
    run."""

    def __post_init__(self) -> None:
        Job.__post_init__(self)
        check_at_least(self, repeats=1)
        if not self.strategies:
            raise ConfigError("strategies is empty: a comparison needs at least one strategy")
        parse_arms(self.strategies)
