"""What the micro-batches of one round add up to on one rank: a gradient, and what it counts for."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from stretto.engine.job import Contribution
from stretto.errors import StepWithoutBackward
from stretto.flat import GradientBuffer


def run_backward(loss: Tensor, weight: float) -> None:
    """Add the gradient of `weight` times the loss to what has been accumulated; nothing for a weight of zero."""
    if weight > 0:
        (loss if weight == 1.0 else loss * weight).backward()


class Accumulation:
    """One round of one rank after the other.

    Args:
        parameters: In the layout's order.
        buffer: Where their gradients accumulate first, from `attach` on.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], buffer: GradientBuffer) -> None:
        self._parameters = parameters
        self.begin(buffer)

    def begin(self, buffer: GradientBuffer) -> Self:
        """Begin a round in `buffer`, from `attach` on."""
        layout = buffer.layout
        self.buffer = buffer
        self.contribution = Contribution(
            bytearray(len(layout.slots)), torch.zeros((), device=layout.sets[0].device)
        )
        self.has_arrived = False
        """Whether gradients arrived that no micro-batch has been counted for yet."""
        self.is_reviewed = False
        """Whether the round has been looked at as a whole; nothing is added to it any more."""
        self.is_left_out = False
        """Whether its gradients were taken at damaged parameters, and forgotten."""
        return self

    def attach(self) -> None:
        """Zero the buffer and let gradients accumulate in it."""
        self.buffer.attach(self._parameters)

    def note(self, index: int) -> None:
        """Take note that a slot's gradient has been added."""
        self.has_arrived = True
        self.buffer.remember()
        self.contribution.used[index] = 1

    def count(self, weight: float, loss: Tensor | None, samples: int) -> None:
        """Count a micro-batch whose gradient has been added."""
        self.has_arrived = False
        contribution = self.contribution
        contribution.count += 1
        if weight > 0:
            contribution.micro_batches += 1
            contribution.weight += weight
            contribution.samples += samples
            if loss is not None:
                contribution.loss_sum += loss.detach().to(torch.float32) * weight
                contribution.loss_weight += weight

    def check_micro_batch(self, weight: float, where: str) -> None:
        """Raise unless a gradient has arrived for a micro-batch of a weight above zero, and nobody else has written.

        Raises:
            StepWithoutBackward: None has arrived.
            GradientsTouched: Somebody else's hands were in it.
        """
        if weight > 0 and not self.has_arrived:
            raise StepWithoutBackward(
                f"{where}: step without backward: no gradient arrived since the last micro-batch; call "
                "backward first, or step(weight=0) to contribute nothing"
            )
        self.check_untouched(where)

    def check_untouched(self, where: str) -> None:
        """Raise if gradients were written outside backward passes, or replaced.

        Raises:
            GradientsTouched: See `GradientBuffer`.
        """
        self.buffer.check_unwritten(where)
        self.buffer.check_attached(self._parameters, where)
