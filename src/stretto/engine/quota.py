"""How many micro-batches a rank contributes to a round."""

import dataclasses

from stretto.errors import ConfigError
from stretto.strategies import Strategy


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """Keep accumulating until the communication lane is free: nobody idles, fast ranks contribute more.

    How many micro-batches a round gets then depends on the clock, so runs are not reproducible to the bit;
    the counts are recorded, and replaying them is.
    """

    minimum: int = 1
    """Micro-batches per rank and round before a landing is considered; at least 1."""
    maximum: int = 64
    """Micro-batches per rank and round after which the rank waits for the lane; bounds the batch."""

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise ConfigError(
                f"Clock(minimum={self.minimum}, maximum={self.maximum}): expected 1 <= minimum <= maximum"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Quota:
    """Bounds of the micro-batches of a rank in each round of an update."""

    minima: tuple[int, ...]
    maxima: tuple[int, ...]

    @property
    def rounds(self) -> int:
        """Rounds per update."""
        return len(self.minima)

    def is_met(self, round_in_update: int, count: int, *, lane_is_free: bool) -> bool:
        """Return whether a rank that has accumulated `count` micro-batches should hand them over."""
        if count >= self.maxima[round_in_update]:
            return True
        return lane_is_free and count >= self.minima[round_in_update]


def plan_quota(strategy: Strategy, micro_batches: int | Clock, rounds: int) -> Quota:
    """Return the quota of each round.

    Args:
        strategy: Splits a fixed number over its rounds.
        micro_batches: Per rank and update; or per round, by the clock.
        rounds: Rounds per update.

    Raises:
        ConfigError: Fewer micro-batches than rounds, or not a number of them.
    """
    if not isinstance(micro_batches, int | Clock) or (isinstance(micro_batches, int) and micro_batches < 1):
        raise ConfigError(
            f"micro_batches={micro_batches!r}: expected an integer of at least 1 per rank and update, or a Clock"
        )
    if isinstance(micro_batches, Clock):
        if strategy.fixes_split:
            raise ConfigError(
                f"{strategy} fixes its micro-batches per round, and a Clock decides them by the time: "
                "leave out one of the two"
            )
        return Quota((micro_batches.minimum,) * rounds, (micro_batches.maximum,) * rounds)
    if micro_batches < rounds:
        raise ConfigError(
            f"{strategy.name} needs at least {rounds} micro-batches per rank and update, got {micro_batches}: "
            "raise micro_batches, and make each micro-batch smaller to keep the batch"
        )
    counts = strategy.quotas(micro_batches, rounds)
    return Quota(counts, counts)
