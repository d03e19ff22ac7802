"""Clean twins: what becomes of a job that nothing strikes, and how often it could have been struck."""

import dataclasses

from stretto.campaign.drawing import Drawn
from stretto.campaign.stage import try_virtually
from stretto.campaign.trial import Seen, Trial
from stretto.errors import ConformanceFailed
from stretto.recipes import TaskConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Twin:
    """A job without a fault, with guards or without."""

    trial: Trial
    """The job."""
    seen: tuple[Seen, ...]
    """By rank."""

    def struck_by(self, drawn: Drawn) -> Trial:
        """Return the same job, struck at the drawn moment of it."""
        made, end = self.seen[drawn.fault.rank].opportunities[drawn.fault.site]
        # Without guards a damaged length, read while the job is being made, may ask for any amount of memory.
        first = made if drawn.fault.site == "roll call" and not self.trial.is_guarded else 0
        return dataclasses.replace(self.trial, fault=drawn.within(first, end), audit=drawn.audit)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Twins:
    """The twins of one strategy."""

    guarded: Twin
    bare: Twin
    """Without guards: what harm is measured against."""


def twins_of(task: TaskConfig, strategy: str, seed: int) -> Twins:
    """Run both twins of a strategy.

    Raises:
        ConformanceFailed: A clean job failed, or guards changed its outcome.
    """
    guarded, bare = (
        Twin(trial=trial, seen=tuple(try_virtually(trial)))
        for trial in (
            Trial(task=task, strategy=strategy, is_guarded=is_guarded, seed=seed)
            for is_guarded in (True, False)
        )
    )
    for rank, (one, other) in enumerate(zip(guarded.seen, bare.seen, strict=True)):
        if one.error or other.error or one.parameters != other.parameters:
            raise ConformanceFailed(
                f"a clean job of {strategy}, rank {rank}: expected equal parameters with guards and without, found "
                f"{one.error or one.parameters} and {other.error or other.parameters}"
            )
    return Twins(guarded=guarded, bare=bare)
