"""All options of a run: recipe, workers, and the arms of a comparison.

Options             how `DataParallel` works
  Training          recipe and length
    Job             on real workers
      RunConfig     once, with its files
      CompareConfig by several strategies
      DiagnoseConfig for a few steps
    SimulateConfig  on a virtual cluster (`stretto_lab.train.simulation`)
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
"""Seconds after which a run that only a loss would end gives up."""


def part_of(record: Any, kind: type) -> dict[str, Any]:
    """Return the fields that `record` has from `kind`, which is its class or a parent of that, by name."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(kind)}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Training(Options, Generic[TaskT]):
    """The recipe and its training, together with the options of `DataParallel`."""

    task: TaskT
    """Model, data and optimizer: what the recipe returned."""
    seed: int = 0
    """Decides initial parameters and all draws; the order of the data among them. Not negative."""
    updates: int | None = None
    """Committed updates after which the run ends; None for no limit."""
    samples: int | None = None
    """Samples after which the run ends, instead of updates; those of all ranks at their first use, so that echoes are
    free. Schedules stretch over them. It ends with the first update at or beyond; where communication is hidden, under
    a clock or an echo, one later."""
    micro_batches: int = 4
    """Micro-batches per rank and update; the batch is this times the ranks times the recipe's own batch."""
    clock: Clock | None = None
    """MIN,MAX micro-batches per rank and round, by the clock instead of a fixed number: a rank accumulates until
    the last exchange is through. Strategies that do not overlap keep to `micro_batches`."""
    guards: tuple[str, ...] = ()
    """Watch values: standard, or replica, rest, audit; several with commas between them, settings after colons, as
    rest,audit:rate=0.01. standard is all that fits the strategy, and `verified`. See the page guards."""
    echo: str = "none"
    """Use batches again: even, bernoulli, ready or auto; in other updates, while the next ones are on their way.
    Settings follow after colons, as in even:uses=2.5 or with a schedule bernoulli:p=cosine(1,0.25). See the page echo,
    and `stretto diagnose` first."""
    slow_loader: str = "none"
    """Make loading slow: MS[,decode][,jitter=CV] per micro-batch, waiting, or with decode keeping a core busy."""
    evaluate_every: int | None = 100
    """Updates between evaluations of the held-out loss, besides the evaluations before and after the run; None for
    these two alone.
    """

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
        """The part that `DataParallel` takes."""
        return Options(**part_of(self, Options))

    @property
    def planned_updates(self) -> int | None:
        """Committed updates after which the run ends, or None where only time or loss end it."""
        return self.updates


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job(Training[TaskT]):
    """The recipe, its real workers, and its end."""

    workers: int | None = None
    """Local processes to start; None is one per CUDA device, or 2 on processors. Ranks that a launcher such as torchrun
    has started count instead."""
    shard: int = 1
    """Consecutive workers that hold one model together, cut by FSDP2; the strategy trains across such nodes. 1 lets
    every worker hold a whole model. See the page sharded."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; auto takes CUDA where every local worker finds its own device."""
    updates: int | None = None
    """Updates after which the run ends; 240 if nothing else ends it. Learning-rate schedules stretch over them."""
    seconds: float | None = None
    """Training time after which the run ends; evaluations and checkpoints do not count."""
    to_loss: float | None = None
    """Held-out loss that ends the run; two evaluations in a row are at or below it. Where nothing else is set that ends
    it, the run gives up after 600 s of training."""
    link: str = "none"
    """Slow link to train over, as 1gbit or 50mbit,2ms; throttles Gloo, no root needed."""
    slow: dict[int, float] = dataclasses.field(default_factory=dict)
    """Ranks that are made slow: with 3=2.5,7=1.2 rank 3 takes 2.5 times as long for a micro-batch. It waits for the
    rest of that time and does not compute; factors of at least 1."""

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
        """Committed updates after which the run ends, or None where only time or loss end it."""
        others = (self.samples, self.seconds, self.to_loss)
        return DEFAULT_UPDATES if self.updates is None and others == (None, None, None) else self.updates

    @property
    def planned_seconds(self) -> float | None:
        """Training time after which the run ends, or None where time does not end it."""
        others = (self.updates, self.samples, self.seconds)
        return DEFAULT_PATIENCE if self.to_loss is not None and others == (None, None, None) else self.seconds

    def fitted_to(self, arm: Arm) -> Self:
        """Return this job, which other arms share or which came before its arm, with formats that go with this one."""
        return dataclasses.replace(
            self,
            wire=arm.settings.get("wire", self.wire),
            changes=self.changes if arm.sends_changes else None,
        )

    def run_of(self, arm: Arm) -> "RunConfig[TaskT]":
        """Return the run of one arm: what this job says of a run, but for what the arm sets itself.

        Raises:
            ConfigError: The arm sets what the job does not have, or what cannot be, or another wire than the job.
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
        ConfigError: Its options do not say.
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
    """auto, ddp, zero1, dpu, wp, acco, average, local, diloco, paft-sync or paft-dyn; its own settings follow after
    colons, as in acco:first=1 or average:4:wire=int4. auto takes the choice of `stretto plan`.
    """
    run_dir: str | None = None
    """Folder of the run, instead of a new folder in runs/; configuration, records, TensorBoard events and
    checkpoints."""
    strikes: int | None = 3
    """Once damage was attributed to the same rank or link in this many updates, the job continues without it; None for
    no limit."""
    restarts: int = 3
    """Times that local workers continue from the last checkpoint after damage that cannot be repaired, or that came too
    often, without those it is attributed to; 0 for none."""
    survive: bool = False
    """Continue when a local worker dies, from the memories of the others, and start a new worker to replace it;
    `restarts` times at most. See the page survive."""
    faults: tuple[Fault, ...] = ()
    """Damage done on purpose, to rehearse: SITE:rank=R[:instant=N][:lasts=sticky]..., as masters:rank=1:instant=3, or
    with rank=all; see the page guards."""
    resume: bool = False
    """Continue the run in --run-dir, or begin it there; from its last good checkpoint. `stretto resume` repeats the
    other options too."""
    checkpoint_every: int | None = 50
    """Updates between checkpoints, of which the latest three stay; None for none."""
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
        """Updates between checkpoints; None where there are none, for want of a folder too."""
        return None if self.run_dir is None else self.checkpoint_every


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DiagnoseConfig(Job[TaskT]):
    """Whether a job waits for its data, and what an echo would gain: a few real steps, nothing is kept."""

    strategy: str = "zero1"
    """ddp, zero1, dpu, wp, acco, average, local, diloco, paft-sync or paft-dyn; what the steps communicate, and whether
    it is hidden."""
    batches: int = 32
    """Micro-batches to measure each time, rounded up to whole updates; the loader alone, the step alone, both."""

    def __post_init__(self) -> None:
        Job.__post_init__(self)
        check_at_least(self, batches=1)
        parse_arm(self.strategy)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompareConfig(Job[TaskT]):
    """Several strategies side by side: one after another on the same link, then all again."""

    strategies: tuple[str, ...] = ("compute", "ddp", "zero1", "dpu", "wp", "acco")
    """Arms: of train, compute, torch-ddp, torch-ddp-bf16, torch-ddp-powersgd, torch-ddp-zero, torch-local-sgd,
    torch-fsdp2, or your own as FILE.py:NAME; with commas between them. Settings of one arm follow after colons:
    wp:wire=bf16:lr=2e-3, acco:clock=1,8, torch-local-sgd:interval=20. The arms of train are its strategies; compute
    never communicates; the others are methods of PyTorch."""
    repeats: int = 1
    """Times that every arm runs; one round of all arms after the other, and the seed grows by one each time."""
    out: str = "runs/comparison"
    """Folder for compare.json; it is written again after every run."""
    faults: tuple[Fault, ...] = ()
    """Damage done on purpose in every run: SITE:rank=R[:instant=N][:lasts=sticky]..., as masters:rank=1:instant=3, or
    with rank=all; see the page guards."""
    evaluate_every: int | None = 10
    """Updates between evaluations of the held-out loss, with the clock stopped; None for those before and after
    a run alone."""

    def __post_init__(self) -> None:
        Job.__post_init__(self)
        check_at_least(self, repeats=1)
        if not self.strategies:
            raise ConfigError("strategies is empty: a comparison needs at least one strategy")
        parse_arms(self.strategies)
