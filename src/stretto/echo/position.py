"""Where an echoed loader stands: what a state holds beside the batches in hand."""

from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(kw_only=True, slots=True)
class Position:
    """Counts on one rank."""

    step: int = 0
    """Batches handed out."""
    fresh: int = 0
    """Fresh ones among them."""
    epoch_step: int = 0
    """Batches handed out before the epoch."""
    epoch_fresh: int = 0
    """Fresh ones before the epoch."""
    in_epoch: bool = False
    """Whether an epoch is under way."""

    def begin_epoch(self) -> None:
        """Begin an epoch here."""
        self.epoch_step, self.epoch_fresh, self.in_epoch = self.step, self.fresh, True

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        return asdict(self)

    @classmethod
    def of(cls, state: dict[str, Any]) -> Self:
        """Return the position that `state_dict` described."""
        return cls(**state)
