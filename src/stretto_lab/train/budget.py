"""The length of a run in updates or samples, and how much of it is done; the same on all ranks.

A budget of samples counts first uses in committed updates of all ranks: repeated batches are free. If every update has
the same number of samples, the last update is known from the beginning, as with a budget of updates. Under a `Clock`,
or with an echo, it is known only when it comes: the run ends with the first update at or beyond the budget, and
strategies that overlap commit one more, with the gradients computed during that update.

Schedules stretch over the budget. Schedules of learning rates count *nominal* updates: samples so far, divided by the
samples of an update with the run's `micro_batches` on every rank, all of them first uses.
"""

from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from stretto.echo import Auto, Ready
from stretto.echo.text import parse_plan
from stretto.errors import ConfigError
from stretto.records import Update
from stretto.schedules import Length
from stretto.strategies.ledger import ledger_of
from stretto_lab.train.arms import parse_arm
from stretto_lab.train.configuration import RunConfig, TaskT, samples_of


class Budget:
    """The length of a run, and how much of it is done.

    Args:
        total: Updates or samples.
        nominal: Samples of a nominal update; None if the budget counts updates.
        of: Returns what an update has spent; None if all updates spend the same, so that the last one is known.
    """

    def __init__(
        self, total: int, nominal: int | None = None, of: Callable[[Update], int] | None = None
    ) -> None:
        self.total = total
        self.counts_samples = nominal is not None
        self.nominal = nominal or 1
        self.spent = 0
        self._of = of
        self._paced: Paced | None = None

    @property
    def length(self) -> int:
        """Nominal updates of the whole run."""
        return -(-self.total // self.nominal)

    @property
    def is_fixed(self) -> bool:
        """Whether the last update is known in advance."""
        return self._of is None

    @property
    def is_spent(self) -> bool:
        """Whether no samples remain."""
        return self.spent >= self.total

    @property
    def samples(self) -> int | None:
        """Samples at first use so far; None if the budget counts updates."""
        return self.spent if self.counts_samples else None

    def go_on(self, step: int, samples: int | None) -> None:
        """Continue after so many updates with so many samples at first use; None if they were not counted."""
        self.spent = samples if self.counts_samples and samples is not None else step * self.nominal
        if self._paced is not None:
            self._paced.turn_to(self.spent // self.nominal)

    @property
    def left(self) -> int:
        """Remaining nominal updates."""
        return -(-max(0, self.total - self.spent) // self.nominal)

    @property
    def updates(self) -> Length:
        """Length for schedules that count updates."""
        return self.length if self.is_fixed else self.share

    def share(self) -> float:
        """Return the spent share, at most 1."""
        return min(1.0, self.spent / self.total)

    def last_update(self, step: int) -> int | None:
        """Return the last update of a run with `step` committed updates; None if it is not known yet."""
        return step + self.left if self.is_fixed else None

    def paces(self, scheduler: LRScheduler | None) -> "LRScheduler | Paced | None":
        """Return the scheduler for the training loop, which steps it once per update; if the budget counts samples,
        `count` steps it instead.
        """
        if scheduler is None or not self.counts_samples:
            return scheduler
        self._paced = Paced(scheduler)
        return self._paced

    def count(self, update: Update) -> None:
        """Count a committed update, and step the scheduler accordingly."""
        self.spent += self.nominal if self._of is None else self._of(update)
        if self._paced is not None:
            self._paced.turn_to(self.spent // self.nominal)


class Paced:
    """A scheduler that counts nominal updates; a step at a committed update does nothing.

    Args:
        scheduler: The scheduler.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler

    def step(self) -> None:
        """Do nothing: `turn_to` steps the scheduler."""

    def turn_to(self, position: int) -> None:
        """Step the scheduler forward to a position."""
        while self._scheduler.last_epoch < position:
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return self._scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scheduler.load_state_dict(state)


def budget_of(run: RunConfig[TaskT], world_size: int, total: int | None = None) -> Budget | None:
    """Return the budget of a run on so many ranks; None if only time or loss end it.

    Args:
        run: The run's configuration.
        world_size: The number of ranks.
        total: Micro-batches of all ranks together in an update, if fixed.

    Raises:
        ConfigError: Ranks could count the spent budget differently.
    """
    samples, updates = run.samples, run.planned_updates
    if samples is None:
        return None if updates is None else Budget(updates)
    batch = samples_of(run.task)
    nominal = (total or world_size * run.micro_batches) * batch
    arm = parse_arm(run.strategy)
    has_clock = run.clock is not None or "clock" in arm.settings
    if not has_clock and run.echo == "none":
        return Budget(samples, nominal)
    if not (arm.is_ours and ledger_of(arm.strategy()).local):
        return Budget(samples, nominal, lambda update: update.fresh_samples)
    is_unequal = has_clock or run.survive
    if is_unequal or isinstance(parse_plan(run.echo, 1), Ready | Auto) or run.nonfinite == "skip":
        raise ConfigError(
            f"{run.strategy} with a budget of samples: ranks that step alone do not know how much the others "
            "load: expected fixed counts, equal on all ranks (no survive), an echo that the seed decides "
            "(even or bernoulli), and nonfinite=raise; or a number of updates"
        )
    # Seed and step decide, so every rank has loaded as much as this one.
    return Budget(samples, nominal, lambda update: update.fresh * batch * world_size)
