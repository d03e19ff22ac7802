"""What a strategy takes from its run: the seed of its draws, and a rate of averages that changes along the run.

rate=cosine(1,0.1)    as long as the run, where no number of updates is named
"""

from stretto.errors import ConfigError
from stretto.fields import field_types
from stretto.schedules import Along, over
from stretto.strategies import STRATEGIES, Strategy
from stretto_lab.train.arms import Arm
from stretto_lab.train.budget import Budget
from stretto_lab.train.configuration import RunConfig, TaskT


def strategy_of(arm: Arm, run: RunConfig[TaskT], budget: Budget | None) -> Strategy:
    """Return the strategy of an arm, one that stays, in its run.

    Raises:
        ConfigError: Its rate follows what cannot be known.
    """
    options = dict(arm.options)
    if "seed" in field_types(STRATEGIES[arm.name]):
        options.setdefault("seed", run.seed)
    if "rate" in options:
        options["rate"] = over(options["rate"], None if budget is None else budget.updates)
        if isinstance(options["rate"], Along) and options.get("plan", "even") == "even":
            raise ConfigError(
                f"{arm.text}: even averages sum a rate from the first round on, and this rate follows a "
                "budget of samples: expected plan=bernoulli, or the number of updates as a third value"
            )
    return STRATEGIES[arm.name](**options)
