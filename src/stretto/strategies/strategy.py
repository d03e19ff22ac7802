"""The contract of an update strategy: a coroutine over effects, and its options."""

from abc import ABC, abstractmethod
from typing import ClassVar

from stretto.effects import Script


class Strategy(ABC):
    """How gradients become parameter updates.

    A subclass is a frozen dataclass of options with one generator, `update`, that performs exactly one
    committed update. It may branch on its options only, so that every rank takes the same path. The number
    of rounds, the traffic and the buffers follow from a dry run of the generator (`stretto.engine.ledger`).
    """

    name: ClassVar[str]
    """The one spelling: file name, command-line word, row in the tables."""
    overlaps: ClassVar[bool]
    """Whether the exchange of one round runs beside the gradients of the next."""
    staleness: ClassVar[int]
    """Committed updates between the parameters a gradient is taken at and those it is applied to."""

    @property
    def fixes_split(self) -> bool:
        """Whether the options fix how micro-batches are split over rounds, which a clock could not keep."""
        return False

    @abstractmethod
    def update(self) -> Script:
        """Yield the effects of one update, from its first `Reduce` to its last publication."""

    def quotas(self, micro_batches: int, rounds: int) -> tuple[int, ...]:
        """Split one update's micro-batches of a rank over the rounds, as evenly as integers allow.

        Args:
            micro_batches: Micro-batches per rank and update.
            rounds: Rounds per update.

        Returns:
            Micro-batches per round, at least one each when `micro_batches >= rounds`; later rounds are larger.
        """
        return tuple(
            (micro_batches * (i + 1)) // rounds - (micro_batches * i) // rounds for i in range(rounds)
        )
