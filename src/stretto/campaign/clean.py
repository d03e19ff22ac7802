"""Clean rounds: jobs that nothing strikes, in which guards have nothing to say."""

import dataclasses
import itertools
from collections.abc import Iterator

from stretto.campaign.drawing import CAMPAIGNED
from stretto.campaign.stage import try_virtually
from stretto.campaign.trial import Seen, Trial
from stretto.engine.ledger import ledger_of
from stretto.recipes import TaskConfig
from stretto.strategies import STRATEGIES

_UPDATES = 50
"""Of one job: as long as a job pays off whose making costs as much as some updates."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Clean:
    """What became of a job without a fault."""

    trial: Trial
    rounds: int
    """Exchanges behind its last update."""
    alarms: tuple[str, ...]
    """What was found although nothing was damaged."""


def clean_trials(task: TaskConfig, seed: int, rounds: int) -> Iterator[Trial]:
    """Yield guarded jobs of every strategy in turn, each with a seed of its own, of at least `rounds` rounds in all."""
    for number in itertools.count():
        if rounds <= 0:
            return
        strategy = CAMPAIGNED[number % len(CAMPAIGNED)]
        rounds_per_update = ledger_of(STRATEGIES[strategy]()).rounds
        updates = min(_UPDATES, -(-rounds // rounds_per_update))
        rounds -= updates * rounds_per_update
        yield Trial(
            task=task,
            strategy=strategy,
            is_guarded=True,
            seed=seed + 1 + number,
            updates=updates,
            micro_batches=rounds_per_update,
        )


def try_cleanly(trial: Trial) -> Clean:
    """Run a clean job on virtual ranks."""
    return silence_of(trial, try_virtually(trial))


def silence_of(trial: Trial, seen: list[Seen]) -> Clean:
    """Return what was said in a job in which nothing was to be said."""
    found = [str(verdict) for of_rank in seen for verdict in of_rank.verdicts]
    found += [of_rank.error for of_rank in seen if of_rank.error is not None]
    alarms = tuple(f"{trial.strategy}, seed {trial.seed}: {text}" for text in dict.fromkeys(found))
    return Clean(trial=trial, rounds=seen[0].rounds, alarms=alarms)
