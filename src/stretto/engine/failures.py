"""Failures: waits that raise once a collective cannot complete, and the end of a job on all ranks.

A healthy round needs only `FailureDetector.wait`. A long wait is diagnosed (`stretto.engine.stall_diagnosis`) from what
a second thread reads in the store (`stretto.engine.watcher`).

Note [The last reference to a collective]
    A thread of Gloo holds a collective for a moment after it has completed. If that thread is the last to let go, it
    frees the tensors, for which it needs Python's lock. In a program that ends at once Python never gives the lock:
    it ends the thread instead, in C++ that cannot be unwound, and the process aborts ("terminate called without an
    active exception"). So the last few collectives are kept here. When one of them is dropped, Gloo's thread has let go
    of it long ago. What they hold is small, or memory that the next update uses again.
"""

import collections
import contextlib
import datetime
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import distributed as dist

from stretto.engine.failure_broadcast import tell
from stretto.engine.round import Progress
from stretto.engine.stall_diagnosis import StallDiagnosis
from stretto.engine.watcher import Watcher, keeps, store_of
from stretto.errors import CommunicationError, Finished, NoWayOn, PeerFailed, StrettoError
from stretto.exchange.transfer import Started, Wait
from stretto.groups import connections_of, may_wait_again, orders_streams, ranks_of, retire

_SHORTEST_PAUSE_SECONDS = 2e-5
_LONGEST_PAUSE_SECONDS = 1e-3
"""Longest pause between two checks whether a collective is complete: short if it soon is, long if others are late."""
_KEPT = 8
"""Completed collectives that are kept; see Note [The last reference to a collective]. Of 400 programs that never
yielded the lock, 5 aborted with 2 kept, and none with 8."""
BACKEND_MARGIN_SECONDS = 5.0
"""The backend's timeout comes this long after the library's, which names the silent rank; a process cannot end while
the backend waits."""


class FailureDetector:
    """Waits for collectives of one group, and exchanges failures with the group's other ranks.

    Args:
        group: The job's group; ranks write their failures into its store.
        device: Device of the job's tensors.
        timeout_seconds: Seconds that a collective may wait for a rank that lives but does not answer.
        silent_seconds: Seconds that a rank may give no sign of life.
        progress: Gives the job's step, for messages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        timeout_seconds: float,
        silent_seconds: float,
        progress: Progress,
    ) -> None:
        self.group = group
        self.groups, self.waited_in = [group], [group]
        """All groups that end with the job; and the groups in which ranks wait for each other, which an error of the
        job aborts."""
        self.rank = group.rank()
        self.world_size = group.size()
        self.timeout_seconds = timeout_seconds
        self._progress = progress
        waits_again = may_wait_again(group, device)
        self._completes: Callable[[dist.Work, datetime.timedelta], bool] = _within if waits_again else _polled
        self._connections = connections_of(group) if waits_again else set()
        self._completed: collections.deque[dist.Work] = collections.deque(maxlen=_KEPT)
        store = store_of(group)
        host = next((connection.own for connection in self._connections), None)
        aborts = () if waits_again else self.waited_in
        self._watcher = Watcher(store, ranks_of(group), self.rank, keeps(store), host, silent_seconds, aborts)
        self._patience = datetime.timedelta(seconds=min(self._watcher.period, timeout_seconds))
        # Where nobody ends the job; also as Python ends, because no thread may come out of C++ then.
        weakref.finalize(self, self._watcher.end, leaves=False)
        self.orders_streams = orders_streams(group, device)
        """Whether works can be followed without a wait."""
        self._followed: dict[Sequence[int] | None, Started] = {}
        """The last followed work, by participating ranks."""

    def among(self, group: dist.ProcessGroup, ranks: Sequence[int], where: str = " inside a node") -> Wait:
        """Return the wait for collectives of `group`, which only these ranks of the job share; it ends with the job.

        They learn of a failure of any rank of the job; silence or a closed connection is attributed to one of them.
        """
        self.groups.append(group)
        self.waited_in.append(group)
        return lambda work, what: self.wait(work, f"{what}{where}", ranks)

    def follow_among(self, ranks: Sequence[int], where: str = " inside a node") -> Wait:
        """Return the follow for collectives of a group that was passed to `among`."""
        return lambda work, what: self.follow(work, f"{what}{where}", ranks)

    def follow(self, work: dist.Work, what: str, ranks: Sequence[int] | None = None) -> None:
        """Continue after `work`, which orders streams: what the caller queues next on its stream runs after it.

        The host does not wait. The next `wait` for a work of the same group, or `catch_up`, finds whether the work
        has completed. See `wait` for arguments and errors.
        """
        try:
            work.wait()
        except RuntimeError:  # it has failed already: say why
            self.wait(work, what, ranks)
        self._followed[ranks] = work, what

    def catch_up(self) -> None:
        """Wait for the last followed work; works of one group end in the order in which they began."""
        while self._followed:
            ranks, (work, what) = self._followed.popitem()
            self.wait(work, what, ranks)

    def wait(self, work: dist.Work, what: str, ranks: Sequence[int] | None = None) -> None:
        """Wait for `work`; `what` names it in messages.

        Args:
            work: A collective in progress.
            what: Its name in messages.
            ranks: The participating ranks; None for all.

        Raises:
            PeerFailed: A rank died or raised, or this rank's own failure has ended the job.
            PeerSilent: A rank gives no sign of life, or the timeout passed and no rank is known to have died or
                raised.
        """
        stall_diagnosis: StallDiagnosis | None = None
        while True:
            try:
                if self._completes(work, self._patience):
                    if self._watcher.has_aborted:  # NCCL calls complete what an abort has cut off
                        raise CommunicationError(
                            "the group was aborted, because another rank has died or left"
                        )
                    self._completed.append(work)
                    return
            except (PeerFailed, NoWayOn):  # a group that sees all ranks has found the cause by itself
                raise
            except RuntimeError as error:
                raise (stall_diagnosis or self._stall_diagnosis(what, ranks)).into(error) from error
            stall_diagnosis = stall_diagnosis or self._stall_diagnosis(what, ranks)
            stall_diagnosis.look()

    def _stall_diagnosis(self, what: str, ranks: Sequence[int] | None) -> StallDiagnosis:
        return StallDiagnosis(
            self._watcher,
            self._connections,
            where=lambda: self.where,
            what=what,
            ranks=range(self.world_size) if ranks is None else ranks,
            timeout_seconds=self.timeout_seconds,
        )

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the error to raise for an error of a job: if the watcher aborted the group, the watcher's finding."""
        is_backends = isinstance(error, RuntimeError) and not isinstance(error, StrettoError)
        if is_backends and self._watcher.has_aborted:
            return self._stall_diagnosis("start of a collective", None).into(error)
        return error

    def let_go(self) -> None:
        """Drop the kept collectives, which hold the sent tensors: at the start, a copy of the model."""
        self._completed.clear()

    def tell(self, error: BaseException, *, is_users: bool = False) -> bool:
        """Report to the other ranks why this rank leaves (`stretto.engine.failure_broadcast`), and end the waits of
        its lane.
        """
        is_told = tell(self._watcher, self._connections, error, self.where, is_users=is_users)
        self._watcher.end()
        return is_told

    def end(self) -> None:
        """Stop the signs of life, after the last collective."""
        self._watcher.end(finishes=True)

    @property
    def where(self) -> str:
        """Rank and step, for messages."""
        return f"rank {self.rank}, after step {self._progress.step}"


class Lifetime:
    """Whether one rank's job continues. Any error ends it, on all ranks.

    Args:
        failures: Reports to the other ranks.
        leave: Releases the communication lane and the user's model; its argument says whether to wait for work in
            progress.
    """

    def __init__(self, failures: FailureDetector, leave: Callable[..., None]) -> None:
        self.has_finished = False
        """Whether the job ended without an error."""
        self.failures = failures
        self._leave = leave
        self.ended_because: str | None = None
        """Why the job has ended; None while it runs."""

    @contextlib.contextmanager
    def running(self, *, is_users: bool = False) -> Iterator[None]:
        """Refuse calls after the end of the job; any error in the block ends the job on all ranks.

        Args:
            is_users: Whether the user's code runs in the block; see `FailureDetector.tell`.

        Raises:
            Finished: The job has ended already.
        """
        if self.ended_because is not None:
            raise self.refusal()
        try:
            yield
        except BaseException as error:
            self.end_with(error, is_users=is_users)
            raise

    def refusal(self) -> Finished:
        """Return the error for a call after the end."""
        return Finished(
            f"{self.failures.where}: the job has ended ({self.ended_because}); make a new DataParallel "
            "to train further"
        )

    def end_with(self, error: BaseException, *, is_users: bool = False) -> None:
        """End the job on all ranks because of `error`, and raise its cause where that is another error."""
        cause = self.failures.cause_of(error)
        self.fail(cause, is_users=is_users)
        if cause is not error:
            raise cause from error

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the cause of the job's end when `error` leaves the user's code; see `FailureDetector.cause_of`."""
        return error if self.ended_because is not None else self.failures.cause_of(error)

    def fail(self, error: BaseException, *, is_users: bool = False) -> None:
        """End the job because of `error`, and inform the other ranks; see `FailureDetector.tell`."""
        if self.ended_because is None:
            self.ended_because = f"{type(error).__name__}: {error}"
            # The reason first, then the end of the groups: whoever waits looks for a reason when its wait breaks.
            if self.failures.tell(error, is_users=is_users):
                for group in self.failures.waited_in:
                    group.abort()
            self._leave(waits=False)
            self.retire()

    def finish(self) -> None:
        """End the job without an error; no collective may be issued before this returns."""
        # Signs of life end last: ranks that still wait for this one's collectives would otherwise find it silent.
        self.failures.catch_up()
        self._leave(waits=True)
        self.failures.end()
        self.retire()
        self.ended_because = "finish() was called"
        self.has_finished = True

    def retire(self) -> None:
        """Release the job's groups later, at a safe time."""
        for group in self.failures.groups:
            retire(group)


def _polled(work: dist.Work, patience: datetime.timedelta) -> bool:
    """Return whether `work` completes within `patience`; raise its error if it fails. It never waits with a timeout.

    NCCL counts a timeout from the moment at which the collective was enqueued, and at its end aborts the communicator.
    """
    end, pause = time.monotonic() + patience.total_seconds(), _SHORTEST_PAUSE_SECONDS
    while not work.is_completed():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    work.wait()  # no waiting is left: this orders streams, or raises the error
    return True


def _within(work: dist.Work, patience: datetime.timedelta) -> bool:
    """Return whether `work` completes within `patience`; raise its error if it fails. A timeout changes nothing."""
    started = time.monotonic()
    try:
        work.wait(patience)
        return True
    except RuntimeError:
        if not work.is_completed():
            if time.monotonic() - started < patience.total_seconds() / 2:
                raise  # of a work that never reports completion
            return False
    work.wait()  # it is over: this raises its error, or returns if it completed at the last moment
    return True
