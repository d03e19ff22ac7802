"""Hidden reductions: gradients leave while the last backward pass of a round still computes others.

Note [Hidden reductions]
    In the last micro-batch of a round, a bucket is sent as soon as all its gradients have arrived. There is no other
    thread: hooks, which autograd calls for every gradient, start the next collectives and take up those that are
    complete, or in any case where works order streams (`stretto.engine.early_reduction`). None of them waits. Transfers
    still in flight after the backward pass are finished when the round is submitted.

    Order. The layout fixes the collectives and their order, for every round of the job. Only the moments differ. So a
    rank may leave early or not, as it likes: one without data, one whose gradients come in another order or not at
    all, one with weight zero. It is late, and nothing else.

    When a gradient has come. A hook runs before its gradient is added, and hooks of the user may run after that. So a
    gradient has come when the next one is announced; the last one comes at the end.

    Rounds with late changes. A parameter may get a second gradient after its first one has left: under reentrant
    checkpoints, from a hook that writes other gradients, or because a guard finds the model damaged and computes the
    round again (`Accumulation.restart`). Versions of the views show it. The rank says so in its report of the round,
    and all ranks sum again, from gradients that are whole. From then on nothing leaves early in this job. So the
    result always equals the result of a job that hides nothing. Writes through `.data` have no versions: a model with
    backward hooks on its modules, which may do that, does not hide. A hook on a parameter may write its own gradient
    so, and no other.

    Errors. One that leaves the backward pass ends the job as elsewhere. No thread waits for gradients that never come.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from stretto.engine.accumulation import Accumulation, GradientBuffer, Gradients
from stretto.engine.replica import Replica


class EarlyAccumulation(Accumulation):
    """Accumulates gradients, and sends them during the last backward pass of a round.

    See Note [Hidden reductions].

    Args:
        parameters: In the layout's order.
        buffer: The buffer of the first round.
        model: Searched for hooks.
        replica: Starts an early reduction.
        micro_batches: Number per round.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        buffer: GradientBuffer,
        *,
        model: nn.Module,
        replica: Replica,
        micro_batches: int,
    ) -> None:
        self._model = model
        self._replica = replica
        self._micro_batches = micro_batches
        self._slots_by_bucket = buffer.layout.slots_by_bucket()
        self._buckets_by_slot: list[list[int]] = [[] for _ in buffer.layout.slots]
        for bucket, slots in enumerate(self._slots_by_bucket):
            for slot in slots:
                self._buckets_by_slot[slot.index].append(bucket)
        self._numel = sum(slot.numel for slot in buffer.layout.slots)
        self._leaves = False
        """Whether gradients are sent during the current backward pass."""
        super().__init__(parameters, buffer)

    def backward(self, loss: Tensor, weight: float) -> None:
        """Add the gradient of `weight` times the loss; if it completes the round, send it at once."""
        may_leave = (
            self.contribution.count == self._micro_batches - 1
            and self._replica.overlaps_backward
            and self.early_reduction is None  # it has left if a guard restarts it
        )
        if not may_leave or _has_backward_hooks(self._model):
            super().backward(loss, weight)
            return
        self.early_reduction = self._replica.begin_early_reduction(self.buffer, self.contribution)
        self._missing = [len(slots) for slots in self._slots_by_bucket]
        self._has_come = bytearray(len(self.parameters))
        self._announced: int | None = None
        self._numel_come = 0
        self._leaves = True
        try:
            super().backward(loss, weight)
        finally:
            self._leaves = False

    def before_gradient(self, index: int, gradients: Gradients) -> Gradients | None:
        """Send complete buckets before another gradient is added."""
        if self._leaves and gradients[0] is not None:
            if self._announced is not None:
                self._come(self._announced)
            self._announced = index
        return super().before_gradient(index, gradients)

    def _come(self, index: int) -> None:
        """Note that a gradient has been added, and continue the early reduction."""
        if not self._has_come[index]:
            self._has_come[index] = 1
            for bucket in self._buckets_by_slot[index]:
                self._missing[bucket] -= 1
            self._numel_come += self.buffer.layout.slots[index].numel
            if (virtual_time := self._replica.runtime.virtual_time) is not None:
                virtual_time.pass_backward(self._numel_come / self._numel)
        if self.early_reduction is not None:
            self.early_reduction.advance(self._views)

    def _views(self, bucket: int) -> list[Tensor] | None:
        if self._missing[bucket]:
            return None
        return [self.buffer.views[slot.index] for slot in self._slots_by_bucket[bucket]]


def _has_backward_hooks(model: nn.Module) -> bool:
    """Return whether the user has put hooks that run in a backward pass on any module, or on all."""
    everywhere: tuple[Any, ...] = (
        nn_module._global_backward_hooks,
        nn_module._global_backward_pre_hooks,
    )
    return any(everywhere) or any(m._backward_hooks or m._backward_pre_hooks for m in model.modules())
