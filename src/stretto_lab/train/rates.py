"""What a strategy takes from its run: the seed of its draws, and a rate of averages that changes along the run.

    rate=cosine(1,0.1)    as long as the run, where no number of updates is named
    rate=echo             that at which the echo loads fresh batches

With the second one, averages cost no more the more is echoed: ranks that load half as often average half as often.
"""

from dataclasses import dataclass

from stretto.echo import Bernoulli, Even
from stretto.echo.text import parse_plan
from stretto.errors import ConfigError
from stretto.fields import field_types
from stretto.schedules import Along, Schedule, over, value_at
from stretto.strategies import STRATEGIES, Strategy
from stretto_lab.train.arms import Arm
from stretto_lab.train.budget import Budget
from stretto_lab.train.configuration import RunConfig, TaskT


@dataclass(frozen=True, slots=True)
class FreshRate:
    """The rate at which an echo plan loads fresh batches."""

    plan: Bernoulli | Even
    """It."""

    def __call__(self, index: int) -> float:
        """Return the rate in the round at `index`."""
        value = value_at(self._schedule, index)
        return value if isinstance(self.plan, Bernoulli) else 1 / value

    @property
    def _schedule(self) -> Schedule:
        return self.plan.p if isinstance(self.plan, Bernoulli) else self.plan.uses

    @property
    def is_along(self) -> bool:
        """Whether it follows what is done of the run, and not the index alone."""
        return isinstance(self._schedule, Along)


def strategy_of(arm: Arm, run: RunConfig[TaskT], budget: Budget | None) -> Strategy:
    """Return the strategy of an arm, one that stays, in its run.

    Raises:
        ConfigError: Its rate follows what cannot be known, or an echo that there is not.
    """
    options = dict(arm.options)
    if "seed" in field_types(STRATEGIES[arm.name]):
        options.setdefault("seed", run.seed)
    if "rate" in options:
        options["rate"] = rate = _rate(arm, run, budget)
        is_along = isinstance(rate, Along) or (isinstance(rate, FreshRate) and rate.is_along)
        if is_along and options.get("plan", "even") == "even":
            raise ConfigError(
                f"{arm.text}: even averages add up a rate from the first round on, and this one follows a budget of "
                "samples: expected plan=bernoulli, or the number of updates as a third value"
            )
    return STRATEGIES[arm.name](**options)


def _rate(arm: Arm, run: RunConfig[TaskT], budget: Budget | None) -> Schedule:
    rate: Schedule | str = arm.options["rate"]
    updates = None if budget is None else budget.updates
    if not isinstance(rate, str):
        return over(rate, updates)
    plan = None if run.echo == "none" else parse_plan(run.echo, updates)
    if not isinstance(plan, Bernoulli | Even):
        raise ConfigError(
            f"{arm.text} with echo={run.echo}: expected an echo whose rate is known, as bernoulli:p=0.5 or even:uses=2"
        )
    return FreshRate(plan)
