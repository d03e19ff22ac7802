"""An accumulation of another trainer on a job, counted where that trainer ends its micro-batches.

Note [Who ends a micro-batch]
    A trainer's micro-batch may have one backward pass, several, or none (a skipped sample). So backward passes only
    accumulate, and the hook that the trainer calls after each micro-batch counts it, on all ranks alike.

Note [Weights]
    A trainer divides a micro-batch's loss by their number, and its gradients are sums. The weights of an accumulation
    add up to one for each rank, skipped samples included, so that `.grad` and the mean over ranks are the trainer's
    own.
"""

import logging
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from stretto.engine.accumulation import Accumulation, GradientBuffer
from stretto.errors import StrettoError
from stretto.parallel import DataParallel
from stretto.records import Update

_log = logging.getLogger("stretto")


class TrainerAccumulation:
    """The micro-batches of a trainer's current accumulation.

    Args:
        parallel: The job; a complete accumulation has its number of micro-batches.
    """

    def __init__(self, parallel: DataParallel) -> None:
        self.parallel = parallel
        self.num_counted = 0
        """Micro-batches of the current accumulation."""
        self._weight = 0.0
        """Weight of these together; a complete accumulation has 1."""
        self._share: Tensor | None = None
        """Share of the accumulation's loss from the current micro-batch."""

    def backward(self, share: Tensor) -> None:
        """Run a backward pass of the current micro-batch.

        Args:
            share: Its part of the rank's loss, which is the sum over the accumulation.
        """
        self.parallel.accumulate(share)
        brought = share.detach().reshape(())
        self._share = brought if self._share is None else self._share + brought

    @property
    def has_open_micro_batch(self) -> bool:
        """Whether a micro-batch has brought a gradient and has not ended."""
        return self._share is not None

    def end_micro_batch(self, length: int, samples: int, *, is_last: bool) -> Update | None:
        """Count the current micro-batch; return the update that was committed, if any.

        Args:
            length: Number of micro-batches by which the trainer divides.
            samples: Samples of this micro-batch.
            is_last: Whether the accumulation ends with it, so that it gets the weight of all missing micro-batches.
        """
        weight = 1.0 - self._weight if is_last else 1.0 / length
        loss = None if self._share is None else self._share / weight
        update = self.parallel.end_micro_batch(weight, loss, samples if self._share is not None else 0)
        self.num_counted, self._weight, self._share = self.num_counted + 1, self._weight + weight, None
        if is_last:
            self.num_counted, self._weight = 0, 0.0
        return update

    def drop(self) -> list[Update]:
        """Drop the counted micro-batches: the trainer ended the accumulation without a step; all ranks call it.

        A round in flight (the first half of an update of `acco`) cannot be dropped: it becomes an update.
        """
        compute = self.parallel.job.compute
        is_empty = not (self.num_counted or self.has_open_micro_batch)
        self.num_counted, self._weight, self._share = 0, 0.0, None
        if is_empty or compute.lifetime.has_finished:
            return []
        with compute.lifetime.running():
            is_dropped = compute.drop()
        return [] if is_dropped else self.parallel.commit()

    def end_job(self, error: BaseException) -> None:
        """End the job after an exception: a single rank keeps its last update for files, several ranks inform each
        other.
        """
        if self.parallel.world_size == 1:
            try:
                self.drop()
                self.parallel.finish()
            except StrettoError as ended:  # by this very error, or one before it
                _log.debug("the job had ended: %s", ended)
        if not self.parallel.job.compute.lifetime.has_finished:
            self.parallel.fail(error)

    def without_it(self) -> AbstractContextManager[None]:
        """Return a context in which the job ignores the current accumulation, so that it can be saved."""
        compute = self.parallel.job.compute
        if not self.num_counted:
            return nullcontext()
        return compute.aside(Accumulation(compute.model.parameters, GradientBuffer(compute.layout)))
