"""A round kept: its micro-batches can be run again, to the bit."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stretto.digests import same_bytes
from stretto.engine.accumulation import Accumulation, run_backward
from stretto.engine.random_states import random_states, restore_random_states

Weighed = tuple[Tensor, float, int]
"""A loss, its weight and its samples."""
LossFunction = Callable[[Any], "Tensor | Weighed"]
"""Runs the forward pass on a batch, which it must leave as it is."""


def weighed(outcome: "Tensor | Weighed", weight: float, samples: int) -> Weighed:
    """Return what a loss function gave; where that is the loss alone, with the other two."""
    return outcome if isinstance(outcome, tuple) else (outcome, weight, samples)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One forward and backward pass, and what it started from."""

    loss_function: LossFunction
    batch: Any
    weight: float
    samples: int
    random: dict[str, Any]
    """Random states before it."""


class KeptRound:
    """The micro-batches of the round that accumulates, as they came: references to batches, copies of buffers.

    A batch that was counted without its loss function cannot be run again, and the round with it.

    Args:
        model: Whose buffers change on the way.
        device: Where it lives.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self.forget()

    def forget(self) -> None:
        """Begin the next round."""
        self.micro_batches: list[MicroBatch] = []
        self._buffers: dict[str, Tensor] = {}
        self._begun: tuple[LossFunction, Any, dict[str, Any]] | None = None
        self._count = 0

    @property
    def is_whole(self) -> bool:
        """Whether all micro-batches of the round are here."""
        return len(self.micro_batches) == self._count

    def begin(self, loss_function: LossFunction, batch: Any) -> None:
        """Keep what the next micro-batch starts from, and with the first one the model's buffers."""
        if self._count == 0:
            self._buffers = {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}
        self._begun = loss_function, batch, random_states(self._device)

    def end(self, weight: float, samples: int) -> None:
        """Count a micro-batch, kept or not."""
        self._count += 1
        if self._begun is not None:
            loss_function, batch, states = self._begun
            self._begun = None
            self.micro_batches.append(
                MicroBatch(
                    loss_function=loss_function, batch=batch, weight=weight, samples=samples, random=states
                )
            )

    def run(self, accumulation: Accumulation, note: Callable[[], None]) -> None:
        """Run all micro-batches again, from the buffers and random states of the first time.

        Buffers end as they did then, but for what damage had made of them; random states are not moved.

        Args:
            accumulation: Attached; takes what they add up to.
            note: Called after each.
        """
        now = random_states(self._device)
        self._restore_buffers()
        for micro_batch in self.micro_batches:
            restore_random_states(micro_batch.random, self._device)
            loss, _, _ = weighed(micro_batch.loss_function(micro_batch.batch), 0.0, 0)
            run_backward(loss, micro_batch.weight)
            accumulation.count(micro_batch.weight, loss.reshape(()), micro_batch.samples)
            note()
        restore_random_states(now, self._device)

    def _restore_buffers(self) -> None:
        """Put back what has changed; what has not is not written, because somebody may count its writes."""
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                if not same_bytes(buffer, self._buffers[name]):
                    buffer.copy_(self._buffers[name])
