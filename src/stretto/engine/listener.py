"""Events of the compute lane, for the guards that watch micro-batches and shown parameters."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from stretto.records import Incident

Weighed = tuple[Tensor, float, int]
"""A loss, its weight and its samples."""
LossFunction = Callable[[Any], "Tensor | Weighed"]
"""Runs the forward pass on a batch, which it must not change."""


def weighed(outcome: "Tensor | Weighed", weight: float, samples: int) -> Weighed:
    """Return a loss function's result; a loss alone is completed with `weight` and `samples`."""
    return outcome if isinstance(outcome, tuple) else (outcome, weight, samples)


class Listener:
    """Receives the events of one rank's compute lane; every method does nothing unless overridden."""

    def micro_batch_begins(self, loss_function: LossFunction, batch: object) -> None:
        """A micro-batch begins that can be run again; not called for those that come through `backward`."""

    def micro_batch_counted(self, weight: float, samples: int) -> None:
        """A micro-batch has been counted, whether it can be run again or not."""

    def round_ends(self) -> Sequence[Incident]:
        """All micro-batches of a round are counted, and no parameters have been installed since it began.

        Called once per round, on all ranks. The returned incidents travel with the round.
        """
        return ()

    def round_closed(self) -> None:
        """The round can no longer change."""

    def landing_begins(self) -> None:
        """A round's values are about to be installed; the lane is at rest. Ranks come here at different times."""

    def installed(self, values: Sequence[Tensor]) -> None:
        """The model's parameters have been given `values`, in the layout's order."""

    def committed_is_read(self) -> None:
        """Masters and optimizer state are about to be shown or saved; the lane is at rest, all ranks call."""

    def began_again(self) -> None:
        """Model and optimizer have been given a checkpoint's state."""

    def ended(self) -> Sequence[Incident]:
        """The job has ended without an error and is at rest; all ranks call. Return incidents not yet reported."""
        return ()
