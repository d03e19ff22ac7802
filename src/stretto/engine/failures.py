"""Failure detection through the store: a dead, raising or silent rank ends the job on all ranks, with its cause.

Note [Who is to blame]
    A collective that cannot complete has one of three causes, and each looks different on different ranks.

    - A rank raised. It writes the error to the store before it leaves, and waiting ranks read it there.
    - A rank died. Its sockets close and collectives raise, but only on the ranks that exchange with it at that
      moment, and the error names an address, not a rank.
    - A rank stopped answering, or entered another collective. Nothing happens until the timeout.

    In the last two cases the first rank that notices raises an alarm. Every waiting rank answers it, and a rank that
    has not answered within `_ANSWER_SECONDS` is to blame. The finding is written to the store like a failure, so that
    all ranks report the same one.

Note [Who lets go last]
    A thread of Gloo holds a collective for a moment after it has completed. If that thread is the last to let go, it
    frees the tensors, for which it needs Python's lock. In a program that ends at once Python never gives the lock:
    it ends the thread instead, in C++ that cannot be unwound, and the process aborts ("terminate called without an
    active exception"). So the last few collectives are kept here. When one of them is dropped, Gloo's thread has let go
    of it long ago. What they hold is small, or memory that the next update uses again.
"""

import collections
import contextlib
import datetime
import re
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from stretto.engine.round import Progress
from stretto.errors import (
    CommunicationError,
    Finished,
    NonFinite,
    NoWayOn,
    PeerFailed,
    PeerSilent,
    Quarantined,
    RanksDisagree,
    ReplicaNonFinite,
    UnusedParameters,
    WorkerDisagrees,
)
from stretto.exchange.transfer import Started, Wait
from stretto.groups import may_wait_again, orders_streams, retire

_LOOK_SECONDS = 1.0
"""Seconds between two looks of a waiting lane into the store; a rank that raised is noticed within this time."""
_ANSWER_SECONDS = 2.5
"""Seconds to wait for the answers to an alarm; two looks and a margin."""
_POLL_SECONDS = 0.05
"""Seconds between two counts of the answers."""
_SHORTEST_PAUSE_SECONDS = 2e-5
_LONGEST_PAUSE_SECONDS = 1e-3
"""Between two questions whether a collective is complete: short where it soon is, long where others are late."""
_KEPT = 8
"""Completed collectives that are kept; see Note [Who lets go last]. Of 400 programs that never yielded the lock,
5 aborted with 2 kept, and none with 8."""
_TROUBLE = "trouble"
"""The only key that a look reads while no rank has written anything, for any number of ranks."""
_SEEN_BY_ALL = (NonFinite, Quarantined, RanksDisagree, UnusedParameters)
"""Errors that every rank finds and raises without being told, from the same round report or incidents."""
_OF_ONE_WORKER = (ReplicaNonFinite, WorkerDisagrees)
"""Those of them that only the ranks of one worker find."""
BACKEND_MARGIN_SECONDS = 5.0
"""The backend's timeout comes after the library's, which names the silent rank, and not long after: a process
cannot end while the backend waits."""


class FailureDetector:
    """Waits for collectives of one group, and exchanges failures with the group's other ranks.

    Note [Who is to blame] describes how the cause is found.

    Args:
        group: The job's group; ranks write their failures to its store.
        device: Where the job's tensors lie.
        timeout_seconds: How long a collective may wait for a rank that neither answers nor dies.
        progress: Gives the job's step, for messages.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, timeout_seconds: float, progress: Progress
    ) -> None:
        self.group = group
        self.groups = [group]
        """All that end with the job."""
        self.rank = group.rank()
        self.world_size = group.size()
        self.timeout_seconds = timeout_seconds
        self._progress = progress
        self._store = _store_of(group)
        self._left = False
        self._completes = _within if may_wait_again(group, device) else _polled
        self._completed: collections.deque[dist.Work] = collections.deque(maxlen=_KEPT)
        self.orders_streams = orders_streams(group, device)
        """Whether works can be followed, and not only waited for."""
        self._followed: dict[range | None, Started] = {}
        """By the ranks that take part, what was followed last."""

    def among(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> Wait:
        """Return what waits for collectives of `group`, which only these ranks of the job share; it ends with the job.

        Whatever rank of the job fails, they hear of it; silence or a closed connection is laid to one of them.
        """
        self.groups.append(group)
        return lambda work, what: self.wait(work, f"{what} inside a node", ranks)

    def follow_among(self, ranks: range) -> Wait:
        """Return what follows collectives of a group that was given to `among`."""
        return lambda work, what: self.follow(work, f"{what} inside a node", ranks)

    def follow(self, work: dist.Work, what: str, ranks: range | None = None) -> None:
        """Go on after `work`, which orders streams: what the caller's stream is given next comes after it.

        The host does not wait. Whether the work has completed shows at the next `wait` for one of the same group, or at
        `catch_up`. Arguments and errors are those of `wait`.
        """
        try:
            work.wait()
        except RuntimeError:  # it has failed already: say why
            self.wait(work, what, ranks)
        self._followed[ranks] = work, what

    def catch_up(self) -> None:
        """Wait for what was followed last; works of one group end in the order in which they began."""
        while self._followed:
            ranks, (work, what) = self._followed.popitem()
            self.wait(work, what, ranks)

    def wait(self, work: dist.Work, what: str, ranks: Sequence[int] | None = None) -> None:
        """Wait for `work`; `what` names it in messages.

        Args:
            work: Under way.
            what: For messages.
            ranks: Who takes part; None for all.

        Raises:
            PeerFailed: A rank died or raised, or this rank's own failure has ended the job.
            PeerSilent: The timeout passed, and no rank is known to have died or raised.
        """
        deadline = time.monotonic() + self.timeout_seconds
        look_seconds = min(_LOOK_SECONDS, self.timeout_seconds)
        while True:
            try:
                if self._completes(work, look_seconds):
                    self._completed.append(work)
                    return
            except (PeerFailed, NoWayOn):  # a group that sees all ranks has found the cause by itself
                raise
            except RuntimeError as error:
                raise self._alarm(what, ranks, PeerFailed, _reason(error)) from error
            self._look(what, ranks)
            if time.monotonic() > deadline:
                raise self._alarm(what, ranks, PeerSilent, self._no_answer)

    def let_go(self) -> None:
        """Drop the collectives that are kept, which hold what they have sent: at the start, a copy of the model."""
        self._completed.clear()

    def tell(self, error: BaseException, *, is_users: bool = False) -> bool:
        """Tell the other ranks why this one leaves, and end the waits of this rank's lane.

        Args:
            error: Why.
            is_users: Whether the user's code has raised it, so that its type says nothing about who knows of it.

        Returns:
            Whether the error was told: not one that came from another rank, nor one that every rank finds by itself.
        """
        self._left = True
        known = isinstance(error, _SEEN_BY_ALL) and not isinstance(error, _OF_ONE_WORKER)
        if not is_users and (known or isinstance(error, CommunicationError)):
            return False
        with contextlib.suppress(RuntimeError):  # the store is gone: nobody is left to tell
            self._say(
                "failure",
                f"rank {self.rank}, after step {self._progress.step}: {type(error).__name__}: {error}",
            )
            if self.rank == 0 and self._store is not None:
                self._await_hearing()
        return True

    def _await_hearing(self) -> None:
        """Wait until the others have heard or left: rank 0 often hosts the store, which ends with its process."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline:
            if not set(self._others) - self._hear("heard").keys() - self._hear("failure").keys():
                return
            time.sleep(_POLL_SECONDS)

    def _look(self, what: str, ranks: Sequence[int] | None) -> None:
        """Raise if another rank has told a failure or raised an alarm, or if this rank has left."""
        if self._left:
            raise PeerFailed(self._where(what) + "this rank has ended the job")
        try:
            if self._store is None or not self._store.check([_TROUBLE]):
                return
            told, alarms = self._told(what), self._hear("alarm").values()
        except RuntimeError:  # without a store the collective itself will fail, or time out
            return
        if told is not None:
            raise told
        if any(alarm.startswith(PeerSilent.__name__) for alarm in alarms):
            raise self._alarm(what, ranks, PeerSilent, self._no_answer)
        if alarms:
            raise self._alarm(what, ranks, PeerFailed, "another rank's connection closed")

    def _alarm(
        self, what: str, ranks: Sequence[int] | None, kind: type[CommunicationError], reason: str
    ) -> CommunicationError:
        """Ask all ranks to answer, and return the error that names those of `ranks` that do not."""
        asked = [rank for rank in self._others if ranks is None or rank in ranks]
        deadline = time.monotonic() + _ANSWER_SECONDS
        try:
            self._say("alarm", f"{kind.__name__} {what}")
            while (told := self._told(what)) is None:
                answers = self._hear("alarm")
                missing = [rank for rank in asked if rank not in answers]
                # Some rank closed its connections. If only one has not answered, it is that one: no need to wait.
                if not missing or time.monotonic() > deadline or (kind is PeerFailed and len(missing) == 1):
                    break
                time.sleep(_POLL_SECONDS)
            if told is not None:
                return told
            finding = _finding(kind, reason, missing, {self.rank: f"{kind.__name__} {what}", **answers})
            self._say("finding", f"{kind.__name__} {finding}")
        except RuntimeError:
            kind, finding = PeerFailed, f"the rank that keeps the store, usually rank 0, died ({reason})"
        if kind is PeerSilent:
            return PeerSilent(self._where(what) + finding, missing)
        return kind(self._where(what) + finding)

    def _told(self, what: str) -> CommunicationError | None:
        """Return the error to raise for another rank's failure or finding; None if there is none."""
        failures = self._hear("failure")
        if failures:
            self._say("heard", "")
            return PeerFailed(self._where(what) + "; ".join(failures.values()))
        for told in self._hear("finding").values():
            name, _, finding = told.partition(" ")
            kind = PeerSilent if name == PeerSilent.__name__ else PeerFailed
            return kind(self._where(what) + finding)
        return None

    @property
    def _no_answer(self) -> str:
        return f"no answer for {self.timeout_seconds:g} s"

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def _say(self, topic: str, text: str) -> None:
        if self._store is not None:
            self._store.set(f"{topic}/{self.rank}", text)
            self._store.set(_TROUBLE, "")

    def _hear(self, topic: str) -> dict[int, str]:
        """Return what other ranks have written about `topic`, by rank."""
        store = self._store
        if store is None:
            return {}
        keys = {rank: f"{topic}/{rank}" for rank in self._others}
        return {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}

    @property
    def where(self) -> str:
        """Rank and step, for messages."""
        return f"rank {self.rank}, after step {self._progress.step}"

    def _where(self, what: str) -> str:
        return f"{self.where}, waiting for the {what}: "


class Lifetime:
    """Whether one rank's job goes on. Any error ends it, on all ranks.

    Args:
        failures: Tells the other ranks.
        leave: Releases the communication lane and the user's model; told whether to wait for what is under way.
    """

    def __init__(self, failures: FailureDetector, leave: Callable[..., None]) -> None:
        self.has_finished = False
        """Whether the job ended without an error."""
        self._failures = failures
        self._leave = leave
        self._ended_because: str | None = None

    @contextlib.contextmanager
    def running(self, *, is_users: bool = False) -> Iterator[None]:
        """Refuse use after the end; any error inside the block ends the job on all ranks.

        Args:
            is_users: Whether the user's code runs in the block; see `FailureDetector.tell`.

        Raises:
            Finished: The job has ended already.
        """
        if self._ended_because is not None:
            raise Finished(
                f"{self._failures.where}: the job has ended ({self._ended_because}); make a new DataParallel to go on"
            )
        try:
            yield
        except BaseException as error:
            self.fail(error, is_users=is_users)
            raise

    def fail(self, error: BaseException, *, is_users: bool = False) -> None:
        """End the job because of `error`, and tell the other ranks; see `FailureDetector.tell`."""
        if self._ended_because is None:
            self._ended_because = f"{type(error).__name__}: {error}"
            if self._failures.tell(error, is_users=is_users):
                for group in self._failures.groups:
                    group.abort()
            self._leave(waits=False)
            self._retire()

    def finish(self) -> None:
        """End the job without an error; no collective may be issued before this returns."""
        self._failures.catch_up()
        self._leave(waits=True)
        self._retire()
        self._ended_because = "finish() was called"
        self.has_finished = True

    def _retire(self) -> None:
        for group in self._failures.groups:
            retire(group)


def _polled(work: dist.Work, seconds: float) -> bool:
    """Return whether `work` completes within `seconds`; raise its error if it fails. It never waits with a timeout.

    NCCL counts a timeout from the moment at which the collective was enqueued, and at its end aborts the communicator.
    """
    end, pause = time.monotonic() + seconds, _SHORTEST_PAUSE_SECONDS
    while not work.is_completed():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    work.wait()  # no waiting is left: this orders streams, or raises the error
    return True


def _within(work: dist.Work, seconds: float) -> bool:
    """Return whether `work` completes within `seconds`; raise its error if it fails. A timeout changes nothing."""
    started = time.monotonic()
    try:
        work.wait(datetime.timedelta(seconds=seconds))
        return True
    except RuntimeError:
        if not work.is_completed():
            # Gloo's reduce-scatter never reports completion, so an early error is its own and not a timeout.
            if time.monotonic() - started < seconds / 2:
                raise
            return False
    work.wait()  # it is over: this raises its error, or returns if it completed at the last moment
    return True


def _reason(error: RuntimeError) -> str:
    """Return the first sentence of a backend's message, without the source location."""
    return re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0]).split(". ")[0]


def _finding(kind: type[CommunicationError], reason: str, missing: list[int], answers: dict[int, str]) -> str:
    """Describe who is to blame, from the ranks that do not answer and what the others wait for."""
    if not missing:
        waits = {rank: answer.partition(" ")[2] for rank, answer in sorted(answers.items())}
        found = ", ".join(f"rank {rank} for the {what}" for rank, what in waits.items())
        advice = (
            "all ranks must enter settled(), checkpoints and finish() alike"
            if len(set(waits.values())) > 1
            else "if the network is that slow, raise Options(timeout_seconds=...)"
        )
        return f"{reason}, though every rank is there and waits: {found}; {advice}"
    if kind is PeerSilent:
        return f"{reason} from ranks {missing}; look at what they do, or raise Options(timeout_seconds=...)"
    if len(missing) == 1:
        return f"rank {missing[0]} died or closed its connection ({reason}); see its own output"
    return f"one of ranks {missing}, which do not answer, died or closed its connection ({reason}); see their output"


def _store_of(group: dist.ProcessGroup) -> Store | None:
    """Return a store of the group's own ranks, or None for a group without one (a lone rank, a simulation)."""
    try:
        return PrefixStore("stretto", group.get_group_store())
    except RuntimeError:
        return None
