"""A group whose works behave as those of NCCL do, where they differ from Gloo's; Gloo performs the collectives.

Source: `WorkNCCL::wait`, `isCompleted` and `checkTimeout` in ProcessGroupNCCL.cpp of PyTorch. A wait with a timeout
that finds the collective incomplete at the end of it raises, keeps the error in the work and aborts the communicator.
The timeout counts from the moment at which the collective was enqueued, which may be long ago: here it always is, also
where the collective is complete by chance.
What an abort has cut off is complete, and a wait for it raises nothing, though nothing has arrived.
Over NVLink or shared memory no connection closes when a rank dies: kernels of the others wait until they are aborted.
"""

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from stretto.groups import Link, ThrottledGroup, private_group
from stretto.groups.collectives import Call
from stretto.groups.wire import Wire
from stretto.groups.wrapped import WrappedGroup, register_over_gloo

NCCL_LIKE = "nccl-like"
"""Name of the backend."""
LATE = "a rank is late"
"""Key of the default group's store: set by a rank that will enter its next collective only when `ASKED` is set. Its
value is for how many seconds the others shall wait for it."""
ASKED = "asked whether it is complete"
"""Set by a rank that has found a collective incomplete since then, for as long."""


class NcclLikeWork(dist.Work):
    """One collective under way."""

    def __init__(self, work: dist.Work, group: "NcclLikeGroup") -> None:
        super().__init__()
        self._work = work
        self._group = group
        self._asked_at = math.inf
        """When it was found incomplete for the first time while a rank was late, in seconds of `time.monotonic`."""

    def is_completed(self) -> bool:
        """Whether it has ended, in an error or not."""
        is_over = self._group.is_aborted or self._has_succeeded()
        store = dist.group.WORLD.get_group_store()
        if not is_over and store.check([LATE]):
            now = time.monotonic()
            self._asked_at = min(self._asked_at, now)
            if now - self._asked_at >= float(store.get(LATE)):
                store.set(ASKED, "")
        return is_over

    def _has_succeeded(self) -> bool:
        try:
            return self._work.is_completed() and self._work.wait()
        except RuntimeError:  # a rank has died, which NCCL does not hear
            return False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Order streams behind the collective; a timeout has passed already, and aborts the group."""
        if timeout:
            self._group.abort()
            raise RuntimeError("Watchdog caught collective operation timeout")
        return self._group.is_aborted or bool(self._work.wait())

    def result(self) -> Any:
        """The tensors that it has written."""
        return self._work.result()


class NcclLikeGroup(WrappedGroup):
    """The default group, as far as its works go on NCCL.

    Args:
        inner: Makes what performs the collectives.
    """

    def __init__(
        self, inner: Callable[[], dist.ProcessGroup] = lambda: private_group(dist.group.WORLD)
    ) -> None:
        super().__init__(inner(), None, NCCL_LIKE)
        self._make_inner = inner
        self.is_aborted = False

    def perform(self, call: Call) -> dist.Work:
        """Start a collective; an aborted group starts none."""
        if self.is_aborted:
            raise RuntimeError("NCCL communicator was aborted")
        return NcclLikeWork(super().perform(call), self)

    def abort(self) -> None:
        """Let everything that is under way fail, and start nothing more."""
        self.is_aborted = True

    def private(self) -> "NcclLikeGroup":
        """Return another group of the same ranks."""
        return NcclLikeGroup(self._make_inner)


def register_behind_100mbit() -> None:
    """Make `NCCL_LIKE` a backend, behind such a link."""
    wire = Wire(Link.parse("100mbit"))
    register_over_gloo(
        NCCL_LIKE, lambda gloo, store: NcclLikeGroup(lambda: ThrottledGroup(gloo, store, wire, NCCL_LIKE))
    )
