"""The audit: now and then gradients are taken again on other ranks, and compared to the bit."""

import dataclasses

from stretto.errors import ConfigError
from stretto.guards.contract import Appointment, Guard, GuardScript
from stretto.randomness import coin, draw


@dataclasses.dataclass(frozen=True, slots=True)
class Audit(Guard):
    """Takes every rank's micro-batches of a drawn round again, on another rank, at the same parameters.

    Sees what nothing else can: a gradient that was computed wrongly, or damaged while it accumulated. A digest over
    the round's gradient and the model's buffers is compared. Where two ranks differ both take the round once more,
    and a third beside them: whoever is not with the majority is named, and the round goes on with the majority's
    gradient, to the bit. Between two ranks, one that does not repeat itself is named; if both do, nobody is, and the
    gradient stays as it is. A single rank takes its own round again.

    A wrong round is found with probability `rate`; a rank that is wrong in every round after `1 / rate` rounds on
    average.

    Needs: micro-batches by way of `DataParallel.micro_batch`, a loss function that does the same on every rank and
    leaves its batch alone, batches that can be pickled, and ranks that show the same parameters.
    Traffic: in audited rounds each rank's batches to one other, and 33 bytes to all.
    Compute: `rate` times a round, exposed.
    Memory: batches are held to the end of their round, and in audited rounds those of another rank and one gradient
    buffer more.
    """

    rate: float = 0.01
    """Share of rounds that are audited; above 0, at most 1. One in a hundred costs one per cent."""
    tolerance: float = 1e-3
    """Largest 2-norm of the difference, relative to the gradient's, where kernels are not deterministic: where the
    ranks differ and none of them repeats its own gradient, bits say nothing. Well above float32's rounding, well below
    what does harm."""
    seed: int = 0
    """Of the draws."""

    name = "audit"
    needs_equal_parameters = True
    needs_rounds = True

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ConfigError(f"Audit(rate={self.rate}): expected a share of rounds above 0, at most 1")
        if not 0 < self.tolerance < 1:
            raise ConfigError(
                f"Audit(tolerance={self.tolerance}): expected a relative difference between 0 and 1"
            )

    def audit(self, round_index: int, world_size: int) -> Appointment | None:
        """See `Guard.audit`."""
        if not coin(self.seed, "audit", round_index, self.rate):
            return None
        # Another one each time, so that two faulty ranks do not vouch for each other for good.
        distance = 1 + draw(self.seed, "auditor", round_index) % (world_size - 1) if world_size > 1 else 0
        return Appointment(distance, self.tolerance)

    def after_update(self) -> GuardScript:
        """Nothing: audits take place before a round takes off."""
        yield from ()
