"""The update that uses a batch, and the parameters at that update.

`feed` knows both, and an `EchoLoader` asks it before every batch. In other loops you set the number of micro-batches
of an update (`EchoOptions(micro_batches=...)`), and every update is taken to change the parameters.
"""

from dataclasses import dataclass
from typing import Protocol


class Updates(Protocol):
    """The updates that use the batches of one pass, on this rank."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches per update; the smallest number, if it varies."""
        ...

    @property
    def is_fixed(self) -> bool:
        """Whether every update of the pass has that number."""
        ...

    def begins(self, slot: int) -> bool:
        """Return whether the next batch is the first of an update; called once before each batch.

        Args:
            slot: Number of batches returned since the last update began.
        """
        ...

    def parameters(self) -> int | None:
        """Return a fingerprint of the parameters for the next batch; None if unknown."""
        ...


@dataclass(frozen=True, slots=True)
class CountedUpdates:
    """Updates of a loop without `feed`: each has the same number of batches."""

    micro_batches: int
    """Number per update."""
    is_fixed: bool = True

    def begins(self, slot: int) -> bool:
        """Return whether the previous update has all its batches."""
        return slot >= self.micro_batches

    def parameters(self) -> int | None:
        """Return None: the loop does not report parameters."""
        return None
