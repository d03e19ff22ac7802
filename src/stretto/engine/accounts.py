"""Keeps the accounts between two updates and closes them with the record of the second."""

from stretto.engine.job import Commit
from stretto.records import Update


class Accounts:
    """What one rank's compute lane adds up between updates.

    Args:
        staleness: Of the strategy, in committed updates.
        now: Seconds on the runtime's clock.
    """

    def __init__(self, staleness: int, now: float) -> None:
        self.exposed_seconds = 0.0
        """Time in which the compute lane waited for the communication lane."""
        self.skipped_rounds = 0
        """Rounds left out because something was not finite."""
        self._staleness = staleness
        self._opened = now

    def close(self, commit: Commit, step: int, now: float) -> Update:
        """Return the record of the update that `commit` made the `step`-th, and open the next accounts."""
        calls = [
            reduction.call for reduction in commit.reductions if reduction.alone or not reduction.skipped
        ]
        rounds = tuple(call.micro_batches for call in calls)
        loss_weight = sum(call.loss_weight for call in calls)
        update = Update(
            step=step,
            round_index=commit.round_index,
            samples=sum(call.samples for call in calls),
            weight=sum(call.weight for call in calls),
            loss=sum(call.loss_sum for call in calls) / loss_weight if loss_weight else float("nan"),
            gradient_norm=commit.gradient_norm,
            staleness=min(self._staleness, step - 1),
            micro_batches=tuple(map(sum, zip(*rounds, strict=True))),
            rounds=rounds,
            seconds=now - self._opened,
            lane_seconds=commit.lane_seconds,
            exposed_seconds=self.exposed_seconds,
            sent_bytes=commit.sent_bytes,
            learning_rates=commit.learning_rates,
            skipped_rounds=self.skipped_rounds,
            incidents=commit.incidents,
            gap=commit.gap,
            interval=commit.interval,
        )
        self._opened, self.exposed_seconds, self.skipped_rounds = now, 0.0, 0
        return update
