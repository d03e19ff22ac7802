"""Gloo behind a slow link: every collective completes as late as on that link, without using the CPU.

A collective begins on the wire when every rank has entered it, which a barrier of the inner group shows, waits for
earlier transfers, and is complete when its bytes have arrived and Gloo has really run it:

    complete = max(ran, arrived),   arrived = max(entered, wire free) + 8 sent / rate + latency

`sent` is what this rank sends (`stretto.groups.collectives`): links are full duplex, and the collectives move as much
in as out.
"""

import collections
import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.futures import Future

from stretto.errors import CommunicationError
from stretto.groups.collectives import Call
from stretto.groups.private import part_of, private_group
from stretto.groups.wire import Wire
from stretto.groups.wrapped import WrappedGroup, register_over_gloo
from stretto.link import Link


def register_throttled(link: Link, name: str = "throttled", address: str | None = None) -> None:
    """Make `name` a backend of `torch.distributed`: Gloo on `link`, shared by all groups of this process.

    Call it on every rank before `init_process_group(backend=name)`. If a name is registered again, the new link applies
    to groups made afterwards.

    Args:
        link: The link of the groups.
        name: Name of the backend.
        address: Address of this machine where the groups listen; None lets Gloo choose.

    Raises:
        ConfigError: PyTorch already has a backend of that name.
    """
    wire = Wire(link)
    register_over_gloo(name, lambda inner, store: ThrottledGroup(inner, store, wire, name), address)


class ThrottledGroup(WrappedGroup):
    """A process group over an inner one that delays completions by a model of the link and counts the sent bytes."""

    may_wait_again = True

    def __init__(self, inner: dist.ProcessGroup, store: Store, wire: Wire, backend_name: str) -> None:
        super().__init__(inner, store, backend_name)
        self._wire = wire
        self._sent: collections.Counter[str] = collections.Counter()
        self._counting = threading.Lock()

    @property
    def sent(self) -> dict[str, int]:
        """Bytes this rank has sent, by collective."""
        with self._counting:
            return dict(self._sent)

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank has sent in all collectives of this group."""
        return sum(self.sent.values())

    @property
    def link(self) -> Link:
        """The link this group shares with all groups of its backend in this process."""
        return self._wire.link

    def perform(self, call: Call) -> dist.Work:
        """Start the call on the inner group, and complete it once its bytes have arrived."""
        sent_bytes = call.sent_bytes
        with self._counting:
            self._sent[call.operation.name] += sent_bytes
        if self.link.is_free:
            return call.on(self._inner)
        entered = self._inner.barrier().get_future()
        work = LateWork(call.on(self._inner))
        entered.add_done_callback(
            lambda done: work.after(done, lambda: self._wire.send(sent_bytes, work.advance))
        )
        return work


class ThrottledLeavable(ThrottledGroup):
    """A group that a process can leave (`LeavableGroup`), behind a link that all such groups of the process share.

    Args:
        inner: The group.
        wire: The link's wire, for the whole life of this process.
    """

    def __init__(self, inner: dist.ProcessGroup, wire: Wire) -> None:
        super().__init__(inner, inner.get_group_store(), wire, "leavable")

    def private(self) -> "ThrottledLeavable":
        """Return another group of its ranks; leaving this group also leaves it."""
        return ThrottledLeavable(private_group(self._inner), self._wire)

    def part(self, members: Sequence[int]) -> "ThrottledLeavable":
        """Return a group of some of its ranks; leaving this group also leaves it; the other ranks need not call."""
        return ThrottledLeavable(part_of(self._inner, members), self._wire)


class LateWork(dist.Work):
    """A collective that is complete once it has run *and* its bytes have had the time to arrive.

    An error of the collective completes it at once. PyTorch's own work over a future does not support a timeout; this
    work behaves like Gloo's: a timeout raises, and the work stays valid, so that a caller may wait again.
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
        """Call `then` unless the completed `future` holds an error, which completes this work."""
        try:
            future.wait()
        except Exception as error:  # whatever it is, it belongs to whoever waits
            self._end(error)
        else:
            then()

    def advance(self) -> None:
        """Note that either the collective has run or its bytes have arrived."""
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
            CommunicationError: It is not complete within `timeout`.
            RuntimeError: The collective failed; with the backend's message.
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
    """Return the work's future, or one that a thread completes if the work has none.

    Gloo's reduce-scatters have none: they copy their result out in `wait`.
    """
    with contextlib.suppress(RuntimeError):
        return work.get_future()
    begin: Future[None] = Future()
    end: Future[Any] = begin.then(lambda _: work.wait())
    threading.Thread(target=begin.set_result, args=(None,), name="stretto-wait", daemon=True).start()
    return end
