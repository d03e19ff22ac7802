"""The early reduction of a round's gradients: their sum over ranks, which proceeds as the gradients become ready.

Note [In the order of streams]
    Where works order streams, the host is ahead of its device: no collective is complete while a backward pass is
    queued, and a reduction that asked would not continue. So it does not ask. It queues, on its own stream: each
    bucket after what the caller's stream has been given until then, its sum after the collective. The stream that
    finishes the reduction waits for it once. Scratch memory and sums are used on this stream alone until then.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from stretto.engine.streams import SideStream
from stretto.exchange.transfer import Barrier, Prepare, Started, Transfers, Wait
from stretto.flat import Slices


class EarlyReduction:
    """The sums of one round's gradients, in progress.

    The order in which collectives start is fixed. The caller decides when to continue, and ranks need not decide
    alike.

    Args:
        transfers: Sums gradients into `sums`.
        sums: Storage for this rank's slices.
        wait: Continues after a collective.
        asks: Whether to check that a collective is complete before `wait` is called; see Note [In the order of
            streams].
        side: The stream of early work; None for the caller's stream.
        prepare: Prepares a bucket with complete gradients for sending; or None.
    """

    def __init__(
        self,
        transfers: Transfers,
        sums: Slices,
        *,
        wait: Wait,
        asks: bool,
        side: SideStream | None,
        prepare: Prepare | None,
    ) -> None:
        self.sums = sums
        """Defined after `finish`."""
        self._transfers = transfers
        self._wait = wait
        self._asks = asks
        self._side = side
        self._prepare = prepare
        self._awaited: int | Started | Barrier | None = next(transfers, None)
        self._left: list[tuple[Tensor, int]] = []
        self._is_invalidated = False

    def invalidate(self) -> None:
        """Mark the sent gradients as changed, regardless of their versions."""
        self._is_invalidated = True

    @property
    def is_stale(self) -> bool:
        """Whether a gradient changed after it was sent, so that the sum is wrong."""
        return self._is_invalidated or any(view._version != version for view, version in self._left)

    def advance(self, come: Callable[[int], Sequence[Tensor] | None]) -> None:
        """Continue while nothing has to be waited for.

        Args:
            come: Returns the views of a bucket's gradients once all of them are ready, otherwise None.
        """
        while self._awaited is not None:
            if isinstance(self._awaited, int):
                views = come(self._awaited)
                if views is None:
                    return
                self._left += [(view, view._version) for view in views]
            elif self._awaited == "barrier" or (self._asks and not self._awaited[0].is_completed()):
                return
            self._step(self._awaited)

    def finish(self) -> Slices:
        """Continue to the end, with all gradients ready, and return the sums."""
        while self._awaited is not None:
            self._step(self._awaited)
        if self._side is not None:
            self._side.rejoin()
        return self.sums

    def _step(self, awaited: int | Started | Barrier) -> None:
        queued: AbstractContextManager[None] = nullcontext() if self._side is None else self._side.queued()
        with queued:
            if isinstance(awaited, tuple):
                self._wait(*awaited)
            elif isinstance(awaited, int) and self._prepare is not None:
                self._prepare(awaited)
            self._awaited = next(self._transfers, None)
