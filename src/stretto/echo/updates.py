"""What batches are taken for: the updates of a job, and the parameters that a batch meets there.

`feed` knows both, and an `EchoLoader` asks it before every batch. In other loops you set the number of micro-batches
of an update (`EchoOptions(micro_batches=...)`), and every update is taken to change the parameters.
"""

from dataclasses import dataclass
from typing import Protocol


class Updates(Protocol):
    """The updates that the batches of one pass go to, on this rank."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an update; the least, where the number is not fixed."""
        ...

    @property
    def is_fixed(self) -> bool:
        """Whether every update of the pass has that number."""
        ...

    def begins(self, slot: int) -> bool:
        """Return whether the next batch is the first of an update; asked once before each.

        Args:
            slot: Batches that were given out since the last one began.
        """
        ...

    def parameters(self) -> int | None:
        """Return a fingerprint of the parameters that the next batch meets; None if unknown."""
        ...


@dataclass(frozen=True, slots=True)
class CountedUpdates:
    """Updates of a loop without `feed`: each has the same number of batches."""

    micro_batches: int
    """Of an update."""
    is_fixed: bool = True

    def begins(self, slot: int) -> bool:
        """Return whether the update before has all its batches."""
        return slot >= self.micro_batches

    def parameters(self) -> int | None:
        """Return None: the loop does not say."""
        return None
