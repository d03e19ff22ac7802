"""What torch asks of a Python process group and its work handles.

Torch's older names for collectives.

Handles of collectives: one that is complete already, one that completes late.

A group over another one: what torch asks of it beside collectives.
"""

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import GroupName
from torch.futures import Future

from stretto.errors import CommunicationError


class OlderNames:
    """Lets a Python group that defines the newer names be called by the older ones, which torch still does."""

    def _allgather_base(self: Any, *call: Any, **named: Any) -> Any:
        return self.all_gather_single(*call, **named)

    def _reduce_scatter_base(self: Any, *call: Any, **named: Any) -> Any:
        return self.reduce_scatter_single(*call, **named)

    def alltoall_base(self: Any, *call: Any, **named: Any) -> Any:
        """`all_to_all_single`."""
        return self.all_to_all_single(*call, **named)

    def allgather_into_tensor_coalesced(self: Any, *call: Any, **named: Any) -> Any:
        """`all_gather_single_coalesced`."""
        return self.all_gather_single_coalesced(*call, **named)

    def reduce_scatter_tensor_coalesced(self: Any, *call: Any, **named: Any) -> Any:
        """`reduce_scatter_single_coalesced`."""
        return self.reduce_scatter_single_coalesced(*call, **named)


class CompletedWork(dist.Work):
    """A collective that was over when it was issued."""

    def __init__(self, result: list[Any]) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def exception(self) -> Exception | None:
        """None."""
        return None

    def result(self) -> list[Any]:
        """The output tensors."""
        return self._result

    def get_future(self) -> Future[list[Any]]:
        """A completed future of the output tensors."""
        future: Future[list[Any]] = Future()
        future.set_result(self._result)
        return future


class LateWork(dist.Work):
    """A collective that is complete once it has run *and* its bytes have had the time to travel.

    An error of the collective completes it at once. Torch's own work over a future refuses to wait with a timeout;
    this one waits like Gloo's: a timeout raises and leaves the work as it was, so that one may wait again.
    """

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work  # keeps the tensors alive
        self._over = threading.Event()
        self._ended: Future[None] = Future()
        # Only an error raised in `then` is one for C++ too: DDP would take that of `set_exception` for a result.
        self._future: Future[Any] = self._ended.then(lambda _: self._outcome())
        self._error: Exception | None = None
        self._ahead = 2  # the collective itself and the arrival of its bytes
        self._count = threading.Lock()
        self._result = _future(work)
        self._result.add_done_callback(lambda result: self.after(result, self.advance))

    def after(self, future: Future[Any], then: Callable[[], None]) -> None:
        """Call `then` unless the completed `future` holds an error, which ends this work."""
        try:
            future.wait()
        except Exception as error:  # whatever it is, it belongs to whoever waits
            self._end(error)
        else:
            then()

    def advance(self) -> None:
        """One of the two things waited for has happened."""
        with self._count:
            self._ahead -= 1
            last = self._ahead == 0
        if last:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        with self._count:
            if self._over.is_set():
                return
            self._error = error
            self._over.set()
        self._ended.set_result(None)

    def _outcome(self) -> Any:
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        return self._result.value()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the collective is complete, or at most `timeout` where it is not zero.

        Raises:
            CommunicationError: not complete within `timeout`.
            RuntimeError: the collective failed; the backend's message.
        """
        if not self._over.wait(timeout.total_seconds() or None):
            raise CommunicationError(
                f"a collective was not complete within {timeout.total_seconds():g} s: a rank has not entered it, or "
                f"its bytes are still on the wire; wait again or longer"
            )
        self._outcome()
        return True

    def is_completed(self) -> bool:
        """Whether `wait` returns or raises at once."""
        return self._over.is_set()

    def is_success(self) -> bool:
        """Whether the collective is complete and did not fail."""
        return self._over.is_set() and self._error is None

    def exception(self) -> Exception | None:
        """The error that ended the collective, if one did."""
        return self._error

    def result(self) -> Any:
        """The output tensors, once complete."""
        return self._work.result()

    def get_future(self) -> Future[Any]:
        """A future of the output tensors, completed with this work."""
        return self._future


def _future(work: dist.Work) -> Future[Any]:
    """Return the work's future, or one that a thread completes where torch has none.

    Gloo's reduce-scatters have none: they copy their result out in `wait`.
    """
    with contextlib.suppress(RuntimeError):
        return work.get_future()
    begin: Future[None] = Future()
    end: Future[Any] = begin.then(lambda _: work.wait())
    threading.Thread(target=begin.set_result, args=(None,), name="stretto-wait", daemon=True).start()
    return end


class WrappedGroup(OlderNames, dist.ProcessGroup):
    """A process group whose collectives an inner group performs; a subclass says what happens around them.

    Args:
        inner: Performs them.
        store: Of this group, with a prefix of its own; None for the inner group's.
        backend_name: By which the subclass is registered.
    """

    def __init__(self, inner: dist.ProcessGroup, store: Store | None, backend_name: str) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # missing in torch's stub
        self._inner = inner
        self._store = store
        self._backend_name = backend_name
        self._name = GroupName("")
        self._description = ""

    @property
    def group_name(self) -> GroupName:
        """The name by which torch's registry knows this group."""
        return self._name

    def _set_group_name(self, name: GroupName) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """What whoever made the group said it is for."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getBackendName(self) -> str:
        """The name this group's backend is registered by."""
        return self._backend_name

    def get_group_store(self) -> Store:
        """The store of this group, with a prefix of its own."""
        return self._inner.get_group_store() if self._store is None else self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later collectives."""
        self._inner.set_timeout(timeout)

    def abort(self) -> None:
        """Abort the inner group."""
        self._inner.abort()

    def shutdown(self) -> None:
        """Shut the inner group down."""
        self._inner.shutdown()
