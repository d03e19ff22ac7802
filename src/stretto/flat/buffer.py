"""A flat gradient buffer, and its views in which the parameters' gradients accumulate."""

from collections.abc import Collection, Sequence

import torch
from torch import nn

from stretto.errors import GradientsTouched
from stretto.flat.layout import Layout


class GradientBuffer:
    """Flat storage for one round's gradients, one tensor per flat set.

    The compute lane owns it from `attach` to take-off, and the communication lane from take-off to landing. In flight,
    the same storage first holds the gradients to send, then the values that come back.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.flats = [
            torch.zeros(flat.numel, dtype=flat.accumulation_dtype, device=flat.device) for flat in layout.sets
        ]
        self.views = [
            self.flats[slot.set_index][slot.start : slot.stop].view(slot.shape) for slot in layout.slots
        ]
        self._versions: list[int] = []

    def zero(self) -> None:
        """Fill the buffer with zeros."""
        for flat in self.flats:
            flat.zero_()

    def attach(self, parameters: Sequence[nn.Parameter], but: Collection[int] = ()) -> None:
        """Make every parameter's `.grad` a view of the buffer, except for slots in `but`; the content stays."""
        for index, (parameter, view) in enumerate(zip(parameters, self.views, strict=True)):
            if index not in but:
                parameter.grad = view
        self.remember()

    def remember(self) -> None:
        """Remember the buffer's version, so that a write before the next backward pass is noticed."""
        self._versions = [flat._version for flat in self.flats]

    def check_unwritten(self, where: str) -> None:
        """Raise if the buffer was written since `remember`.

        Raises:
            GradientsTouched: Somebody clipped, scaled or zeroed the accumulated gradients.
        """
        if self._versions != [flat._version for flat in self.flats]:
            raise GradientsTouched(
                f"{where}: the accumulated gradients were changed outside backward, by clipping, scaling or "
                "zeroing; clip with Options(clip_norm=...), weigh with backward(loss, weight)"
            )

    def check_attached(
        self, parameters: Sequence[nn.Parameter], where: str, but: Collection[int] = ()
    ) -> None:
        """Raise if some parameter's gradient is no longer the view it was given; slots in `but` may differ.

        Raises:
            GradientsTouched: `zero_grad`, `create_graph=True` or an assignment replaced a gradient.
        """
        for parameter, view, slot in zip(parameters, self.views, self.layout.slots, strict=True):
            if parameter.grad is not view and slot.index not in but:
                raise GradientsTouched(
                    f"{where}: the gradient of {slot.name!r} was replaced; leave out zero_grad() (gradients are "
                    "zeroed at take-off), do not assign .grad but before parallel.count_micro_batch(), and call "
                    "backward without create_graph=True"
                )
