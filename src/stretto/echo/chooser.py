"""What every plan answers: at each step, a fresh batch or one of those in hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar


@dataclass(kw_only=True, slots=True)
class Held:
    """A batch in hand, as a plan sees it."""

    number: int
    """Fresh batches that came before it on this rank, over all epochs."""
    uses: int = 0
    """How often it has been handed out."""


HeldT = TypeVar("HeldT", bound=Held)


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """One batch handed out."""

    step: int
    """Batches handed out before it."""
    is_fresh: bool
    """Whether this was its first use."""
    load_seconds: float
    """What the loader took for it; nan for an echo."""
    use_seconds: float
    """From the former batch's being handed out to the request for this one; nan for the first."""


class Chooser(Protocol):
    """A plan at work: its options and what it must remember."""

    @property
    def is_measuring(self) -> bool:
        """Whether `use_seconds` must be true now, so that a device running behind the host is waited for."""
        ...

    def choose(self, step: int, held: Sequence[HeldT], is_ready: Callable[[], bool]) -> HeldT | None:
        """Return which batch to hand out; None for a fresh one. Changes nothing.

        Args:
            step: Batches handed out before.
            held: The last few fresh batches, oldest first; at least one, since an epoch begins with a fresh one.
            is_ready: Whether a fresh batch could be had without waiting.
        """
        ...

    def took(self, taken: Taken) -> None:
        """Take note of what was handed out: what `choose` said, unless an epoch began or the data had ended."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what it must remember, as plain values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember what another one remembered."""
        ...


class Memoryless:
    """What choosers share that decide from their arguments alone."""

    is_measuring = False

    def took(self, taken: Taken) -> None:
        """See `Chooser.took`."""

    def state_dict(self) -> dict[str, Any]:
        """See `Chooser.state_dict`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Chooser.load_state_dict`."""


class Plan(Protocol):
    """How often batches are used: a frozen dataclass of options."""

    @property
    def pool(self) -> int:
        """How many of the last fresh batches are kept for echoes; at least 1."""
        ...

    @property
    def is_planned(self) -> bool:
        """Whether decisions depend on seed and step alone, never on time."""
        ...

    def chooser(self, seed: int) -> Chooser:
        """Return a plan at work.

        Args:
            seed: Of its coins.
        """
        ...
