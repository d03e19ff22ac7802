"""What happens on the compute lane, for whoever listens: guards that watch micro-batches and shown parameters."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from stretto.records import Incident

Weighed = tuple[Tensor, float, int]
"""A loss, its weight and its samples."""
LossFunction = Callable[[Any], "Tensor | Weighed"]
"""Runs the forward pass on a batch, which it must leave as it is."""


def weighed(outcome: "Tensor | Weighed", weight: float, samples: int) -> Weighed:
    """Return what a loss function gave; where that is the loss alone, with the other two."""
    return outcome if isinstance(outcome, tuple) else (outcome, weight, samples)


class Listener:
    """Hears what happens on one rank's compute lane, and does nothing about it; subclasses do."""

    def micro_batch_begins(self, loss_function: LossFunction, batch: object) -> None:
        """A micro-batch begins that could be run again; those of `backward` come without this."""

    def micro_batch_counted(self, weight: float, samples: int) -> None:
        """A micro-batch has been counted, whether it could be run again or not."""

    def round_ends(self) -> Sequence[Incident]:
        """All micro-batches of a round are counted, and nothing has been installed since they were taken.

        Called once per round, on all ranks. What is returned travels with the round.
        """
        return ()

    def round_closed(self) -> None:
        """The round can no longer change."""

    def installed(self, values: Sequence[Tensor]) -> None:
        """The model's parameters have been given `values`, in the layout's order."""

    def committed_is_read(self) -> None:
        """Masters and optimizer state are about to be shown or saved, at rest; called on all ranks."""

    def began_again(self) -> None:
        """Model and optimizer have been given a checkpoint's state."""

    def ended(self) -> Sequence[Incident]:
        """The job has come to a good end, at rest; called on all ranks. Return what no update has reported."""
        return ()
