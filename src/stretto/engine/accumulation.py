"""The round that accumulates on the compute lane: a flat gradient buffer, and this rank's contribution.

Note [Gradients of others]
    The gradients that count arrive during this job's own backward pass, in views of the buffer. The backward pass of
    another job (a generator's through its discriminator), or one that the user runs, reaches the same parameters. In
    that case a hook, which runs before a gradient is added, takes the view away, and PyTorch puts the gradient into a
    new tensor. That gradient is added (`collect`) or dropped (`discard`); otherwise the next backward pass of this job
    is an error.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from stretto.engine import misuse
from stretto.engine.early_reduction import EarlyReduction
from stretto.flat import Layout

Gradients = tuple[Tensor | None]
"""The gradient of one parameter, as autograd passes it to a hook on a node."""
_version = operator.attrgetter("_version")
_gradient = operator.attrgetter("grad")


class GradientBuffer:
    """Flat storage for one round's gradients, one tensor per flat set, and a view of it for each parameter.

    The compute lane owns it until the round is sent, and then the communication lane until its values are installed.
    In flight, the same storage first holds the gradients to send, then the received values.

    Args:
        layout: Of the parameters.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.flats = [
            torch.zeros(flat.numel, dtype=flat.accumulation_dtype, device=flat.device) for flat in layout.sets
        ]
        # `.data`: autograd adds into tensors that it does not know for views in less time, and each has a version
        # counter of its own.
        self.views = [view.data for view in layout.views(self.flats)]


@dataclasses.dataclass(slots=True)
class Totals:
    """One rank's contribution to one or several rounds, apart from gradients."""

    weight: float = 0.0
    """Σ w over micro-batches."""
    samples: int = 0
    fresh_samples: int = 0
    """Samples at their first use."""
    micro_batches: int = 0
    """Number of micro-batches with a weight above zero."""
    loss_sum: float = 0.0
    """Σ w·loss over the micro-batches with a loss."""
    loss_weight: float = 0.0
    """Σ w over the micro-batches with a loss."""

    def add(self, other: "Totals") -> None:
        """Add another round's totals."""
        self.weight += other.weight
        self.samples += other.samples
        self.fresh_samples += other.fresh_samples
        self.micro_batches += other.micro_batches
        self.loss_sum += other.loss_sum
        self.loss_weight += other.loss_weight


@dataclasses.dataclass(slots=True)
class Contribution:
    """One rank's counts for one round, apart from the gradient itself."""

    used: bytearray
    """One byte per parameter slot, set by the backward hooks."""
    loss_sum: Tensor
    """Σ w·loss, a float64 scalar on the device; the lane reads it, so that no micro-batch waits for the host."""
    totals: Totals
    """The other totals."""
    count: int = 0
    """Number of micro-batches of any weight, which quotas count."""


class Accumulation:
    """Accumulates the gradients of one rank, round after round.

    Args:
        parameters: In the layout's order.
        buffer: The buffer of the first round; gradients accumulate in it after `attach`.
    """

    def __init__(self, parameters: Sequence[Tensor], buffer: GradientBuffer) -> None:
        self.parameters = parameters
        self.stand_in: Accumulation | None = None
        """Receives the gradients instead of this one, because the job's hooks always call this one."""
        self.apart: set[int] = set()
        """Slots whose view was taken away; see Note [Gradients of others]."""
        self._is_own_backward = False
        self._factor = 1.0
        """Factor on each arriving gradient of this job's backward pass."""
        dtypes = [torch.float32, *(flat.dtype for flat in buffer.layout.sets)]
        self._narrowest = min(dtype.itemsize for dtype in dtypes)
        self.begin(buffer, attached=False)

    def begin(self, buffer: GradientBuffer, *, attached: bool = True) -> None:
        """Begin a round in `buffer`; gradients accumulate in it at once, or after `attach`."""
        self.buffer = buffer
        self.gradients: Sequence[Tensor] = buffer.views
        """The `.grad` of each parameter, in the buffer's memory."""
        self.contribution = Contribution(
            bytearray(len(buffer.layout.slots)),
            torch.zeros((), dtype=torch.float64, device=buffer.layout.sets[0].device),
            Totals(),
        )
        self.has_arrived = False
        """Whether gradients have arrived from a micro-batch that has not been counted yet."""
        self.is_left_out = False
        """Whether the round's gradients were dropped because the parameters were damaged."""
        self.early_reduction: EarlyReduction | None = None
        """The sum over ranks, if it has begun before the round is closed (`stretto.engine.early_accumulation`)."""
        if attached:
            self.attach()

    def restart(self) -> None:
        """Drop the round's gradients; if some were sent, all ranks sum the round again."""
        # Collectives that have begun must end on this rank too, so the sum is kept, and counted as stale.
        early_reduction = self.early_reduction
        self.begin(self.buffer)
        self.early_reduction = early_reduction
        if early_reduction is not None:
            early_reduction.invalidate()

    def leave_out(self) -> None:
        """Drop the round's gradients finally, but count its micro-batches."""
        count = self.contribution.count
        self.restart()
        self.contribution.count, self.is_left_out = count, True

    def attach(self, *, zero: bool = True) -> None:
        """Let gradients accumulate in the buffer, from zero or from its content."""
        if zero:
            for flat in self.buffer.flats:
                flat.zero_()
        for index, (parameter, view) in enumerate(zip(self.parameters, self.gradients, strict=True)):
            if index not in self.apart:
                parameter.grad = view
        self.remember()

    def remember(self) -> None:
        """Record the versions of the views, so that a write outside backward passes is noticed."""
        self._versions = list(map(_version, self.buffer.views))

    def before_gradient(self, index: int, gradients: Gradients) -> Gradients | None:
        """Handle a gradient that is about to be added to a slot's `.grad`; see Note [Gradients of others].

        Returns:
            The gradient to add instead, alone in a tuple; None to leave it unchanged.
        """
        # Autograd's hooks hold this accumulation for the whole job.
        if self.stand_in is not None:
            return self.stand_in.before_gradient(index, gradients)
        (gradient,) = gradients
        if gradient is None:
            return None
        if self._is_own_backward:
            self.has_arrived = True
            self.contribution.used[index] = 1
            return None if self._factor == 1.0 else (gradient * self._factor,)
        # Without the view, PyTorch puts the gradient into a tensor of its own, and the buffer stays as it is.
        if self.parameters[index].grad is self.buffer.views[index]:
            self.parameters[index].grad = None
            self.apart.add(index)
        return None

    def backward(self, loss: Tensor, weight: float) -> None:
        """Add the gradient of `weight` times the loss; for a weight of zero do nothing."""
        if weight > 0:
            # A 16-bit loss or model would round the weight, which the division by Σ w does not: gradients take it
            # instead, as they arrive in the buffer's dtype.
            is_narrow = min(self._narrowest, loss.dtype.itemsize) < torch.float32.itemsize
            self._is_own_backward, self._factor = True, weight if is_narrow else 1.0
            try:
                (loss if is_narrow or weight == 1.0 else loss * weight).backward()
            finally:
                self._is_own_backward = False
            # Adding to `.grad` has raised the versions: from here on another write is somebody else's.
            before = self._versions
            self.remember()
            if 0 in self.contribution.used or not self.has_arrived:
                self._note_written(before)

    def _note_written(self, before: list[int]) -> None:
        """Count gradients that an autograd function has added to `.grad` itself, so that no hook has seen them.

        Raises:
            GradientsTouched: A hook multiplies gradients by their weight; these gradients bypassed it.
        """
        used = self.contribution.used
        for index, (old, new) in enumerate(zip(before, self._versions, strict=True)):
            if old == new:
                continue
            if self._factor != 1.0 and not used[index]:
                raise misuse.added_without_weight(self.buffer.layout.slots[index].name, self._factor)
            used[index], self.has_arrived = 1, True

    def count(self, weight: float, loss: Tensor | None, samples: int, fresh_samples: int) -> None:
        """Count a micro-batch whose gradient has been added."""
        if weight > 0:
            totals = self.contribution.totals
            totals.micro_batches += 1
            totals.weight += weight
            totals.samples += samples
            totals.fresh_samples += fresh_samples
            if loss is not None:
                totals.loss_weight += weight
                # A pipeline has its loss on the last of its devices.
                there = self.contribution.loss_sum.device
                self.contribution.loss_sum += loss.detach().to(there, torch.float64) * weight
        self.has_arrived = False
        self.contribution.count += 1

    def set_apart(self) -> None:
        """Separate gradients that the caller has put into `.grad` from accumulated gradients."""
        for index, (parameter, view) in enumerate(zip(self.parameters, self.gradients, strict=True)):
            if parameter.grad is not None and parameter.grad is not view:
                self.apart.add(index)

    def collect(self) -> None:
        """Add the gradients of backward passes that the caller has run, and the gradients that were set apart."""
        for index in self._of_others():
            gradient = self.parameters[index].grad
            if gradient is not None:
                self.buffer.views[index].add_(gradient.detach())
                self.contribution.used[index] = 1
                self.has_arrived = True
        self.discard()
        self.remember()

    def discard(self) -> None:
        """Drop the gradients of backward passes that this job did not run."""
        for index in self.apart:
            self.parameters[index].grad = self.gradients[index]
        self.apart.clear()

    def check_own(self, where: object) -> None:
        """Raise if `.grad` holds gradients of other backward passes, neither counted nor dropped.

        Raises:
            GradientsTouched: It does; the message names a parameter and the remedy.
        """
        if found := self._of_others():
            raise misuse.others_gradients([self.buffer.layout.slots[index].name for index in found], where)
        self.discard()

    def check_untouched(self, where: object) -> None:
        """Raise if gradients were written outside backward passes, or replaced.

        Raises:
            GradientsTouched: User code clipped, scaled, zeroed or assigned the accumulated gradients.
        """
        if list(map(_version, self.buffer.views)) != self._versions:
            raise misuse.gradients_written(where)
        # Identity, without a loop in Python: this runs for every micro-batch over every parameter.
        gradients = map(_gradient, self.parameters)
        if all(map(operator.is_, gradients, self.gradients)):
            return
        for parameter, view, slot in zip(
            self.parameters, self.gradients, self.buffer.layout.slots, strict=True
        ):
            if parameter.grad is not view and slot.index not in self.apart:
                raise misuse.gradient_replaced(slot.name, where)

    def _of_others(self) -> list[int]:
        """Return the slots that hold a gradient of another backward pass, not those whose view was only taken away."""
        return [index for index in sorted(self.apart) if self.parameters[index].grad is not None]


Accumulate: TypeAlias = Callable[[Sequence[Tensor], GradientBuffer], Accumulation]
"""Constructs an accumulation, from parameters and a buffer."""
