"""A job that goes on in the same processes when ranks are lost or come.

Nothing inside a job survives the loss of a rank. The process does, and so do the generations in its memory: the job
ends, its connections are shut, those that are left agree who they are, and the user's function is called again. It
builds a new job on a new group and goes on from the newest generation that is whole.
"""

import copy
import dataclasses
import logging
import math
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from stretto.checkpoint.load import Restored
from stretto.continuation import Loader
from stretto.engine.state import set_settings
from stretto.engine.watcher import store_of
from stretto.errors import (
    CommunicationError,
    ConfigError,
    LeftOut,
    OutOfTurn,
    PeerFailed,
    PeerSilent,
    StrettoError,
)
from stretto.groups import Leavable, await_left, told_place
from stretto.optimizer import Hyperparameters, read_hyperparameters
from stretto.parallel import DataParallel
from stretto.survive.copies import Copies
from stretto.survive.generations import Memory
from stretto.survive.membership import Ended, Members, Membership

_log = logging.getLogger("stretto")

T = TypeVar("T")

SHARE = 0.01
"""Of the time, and of the bytes that ranks send, that keeping generations may take where the library chooses."""
_MOST_SECONDS = 300.0
"""Between two generations: so much is done again at most, and so long does a process wait to come in."""
_FIRST_UPDATES = 16
"""Between two generations, until one has been measured that has all there is in a state."""
_CONNECT_SECONDS = 60.0
"""How long the store may take to come up."""
_LEAVE_SECONDS = 5.0
"""How long the last groups may take to be dropped: milliseconds, unless something in them is under way."""
_FRUITLESS = 3
"""Terms in a row with the same members that have brought no update; then the job ends with the error."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Before:
    """How the term before ended, for the line that says so."""

    words: str = ""
    at: float = 0.0
    """When this process heard of it."""
    agreed: float = 0.0
    """When it knew who goes on."""

    def line(self, step: int, ranks: int) -> str:
        """Return it, once the job is back at a step."""
        agreed, back = self.agreed - self.at, time.perf_counter() - self.at
        return (
            f"{self.words}: going on from update {step} on {ranks} ranks; agreed after {agreed:.2f} s, back after "
            f"{back:.2f} s"
        )


class _Beginning:
    """What optimizer and scheduler say before a job goes on, to be said again where another term follows.

    Of its members some have trained and others have just come, and a job begins only where all have equal settings.
    """

    def __init__(self) -> None:
        self._settings: Hyperparameters = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduler: Any = None
        self._schedule: Any = None

    def note(self, parallel: DataParallel) -> None:
        """Note what they say."""
        self._optimizer, self._scheduler = parallel.job.model.optimizer, parallel.scheduler
        self._settings = read_hyperparameters(self._optimizer)
        if hasattr(self._scheduler, "state_dict"):  # without one, keeping a state raises
            self._schedule = copy.deepcopy(self._scheduler.state_dict())

    def put_back(self) -> None:
        """Let them say it again."""
        if self._optimizer is None:
            return
        if self._schedule is not None:
            self._scheduler.load_state_dict(self._schedule)
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            set_settings(group, settings)


@dataclasses.dataclass(slots=True)
class _Costs:
    """What the last keeping of a state has cost, and where training was then."""

    step: int = 0
    at: float = 0.0
    sent_bytes: int = 0
    """Until then, in all."""
    keep_seconds: float = 0.0
    """In which training stood still for it, also for its copies."""
    keep_bytes: int = 0

    def measured(self, parallel: DataParallel) -> list[float] | None:
        """Return what `updates_between` takes; None where it would mislead.

        Before the first update a state is small: optimizers have none yet.
        """
        updates = parallel.steps - self.step
        if not self.step or not updates:
            return None
        seconds, sent = time.perf_counter() - self.at, parallel.sent_bytes - self.sent_bytes
        return [self.keep_seconds, seconds / updates, self.keep_bytes, sent / updates]


class Term:
    """What the user's function is told of the time until a rank is lost or comes."""

    def __init__(
        self,
        number: int,
        seats: Sequence[int],
        group: Any,
        membership: Members,
        memory: Memory,
        every: int | None,
        before: _Before,
    ) -> None:
        self.number = number
        """From 0."""
        self.group = group
        """Of its members, for `DataParallel(group=...)` and for the user's own collectives."""
        self.rank, self.world_size = group.rank(), group.size()
        """This process's place among the members, and how many there are."""
        self.seats = tuple(seats)
        """The numbers of its members' processes, which no other process has had."""
        self._membership = membership
        self._memory = memory
        self._every = every
        self._before = before
        self._due = 0
        self._costs = _Costs()
        self._copies: Copies | None = None
        self._job: weakref.ref[DataParallel] | None = None
        self.beginning = _Beginning()

    def go_on(
        self,
        parallel: DataParallel,
        *,
        loader: Loader | None = None,
        extra: Any = None,
        begin: Callable[[], object] | None = None,
    ) -> Restored | None:
        """Let a new job go on from where the job of the term before was; all ranks must call, before training.

        Args:
            parallel: The new job, over `group`.
            loader: This rank's. It is told its position where there are as many ranks as before; else
                `Restored.loader_states` has the positions of all, for the caller to deal out.
            extra: As for `keep`; kept at the beginning of the job.
            begin: Called at the beginning of the job, before its state is kept: loads a checkpoint, for example.

        Returns:
            What has come back; None at the beginning of the job.

        Raises:
            TornCheckpoint: No generation is whole.
            CommunicationError: A rank was lost.
        """
        self._job = weakref.ref(parallel)
        self.beginning.note(parallel)
        self._copies = Copies(parallel, self.group)
        restored = self._memory.load(parallel, self._copies, loader=loader)
        if restored is None:
            if begin is not None:
                begin()
            self._keep(parallel, self._copies, loader, extra() if callable(extra) else extra)
            self._copies.complete()  # there is no state before this one
        elif self.rank == 0:
            _log.warning("%s", self._before.line(restored.step, self.world_size))
        return restored

    def keep(self, parallel: DataParallel, *, loader: Loader | None = None, extra: Any = None) -> None:
        """Keep the state, if it is time to; all ranks must call, after every `Update`.

        Copies of the state that was kept last travel meanwhile, and go on whenever this is called.

        Where processes wait to come in, the term ends here, and nothing is done again: an exception that is no
        `Exception` leaves the caller's function.

        Args:
            parallel: The job.
            loader: This rank's, if its position is to be kept.
            extra: Anything that `go_on` returns in the next term; rank 0's is kept. A function is called for it.

        Raises:
            OutOfTurn: `go_on` was not called before.
            CommunicationError: A rank was lost.
        """
        copies = self._copies
        if copies is None:
            raise OutOfTurn(f"rank {self.rank}: term.keep() before term.go_on(): expected it before training")
        began = time.perf_counter()
        if parallel.steps < self._due:
            copies.go_on()
            self._costs.keep_seconds += time.perf_counter() - began
            return
        copies.complete()
        self._costs.keep_seconds += time.perf_counter() - began
        if waiting := self._keep(parallel, copies, loader, extra() if callable(extra) else extra):
            copies.complete()
            parallel.leave()
            raise _NewMembers([*self.seats, *waiting], self.group)

    def _keep(self, parallel: DataParallel, copies: Copies, loader: Loader | None, extra: Any) -> list[int]:
        began, sent_bytes = time.perf_counter(), parallel.sent_bytes
        told = {
            "measured": self._costs.measured(parallel),
            "waiting": self._membership.newcomers(self.seats) if self.rank == 0 else [],
        }
        by_rank = self._memory.keep(parallel, copies, self.number, told, loader=loader, extra=extra)
        at, sent = time.perf_counter(), parallel.sent_bytes
        self._costs = _Costs(parallel.steps, at, sent, at - began, sent - sent_bytes)
        known = [one["measured"] for one in by_rank if one["measured"] is not None]
        interval = max((updates_between(*one) for one in known), default=_FIRST_UPDATES)
        self._due = parallel.steps + (interval if self._every is None else self._every)
        come: list[int] = by_rank[0]["waiting"]
        return come

    def end(self, error: BaseException) -> Ended:
        """End the job where it has not ended, and leave the group; return what to bring into the agreement."""
        parallel = None if self._job is None else self._job()
        if parallel is not None:
            parallel.fail(error)
            parallel.job.compute.lifetime.failures.let_go()  # they hold threads of the group
        if self._copies is not None:
            self._copies.end()
            self._copies = None
        jobs = self.group.of_jobs
        signs = store_of(jobs[0]) if jobs else None
        ranks = error.ranks if isinstance(error, PeerFailed | PeerSilent) else ()
        self.group.leave()
        return Ended(self.number, self.seats, signs, [self.seats[rank] for rank in ranks])

    @property
    def reached(self) -> str:
        """Up to where the job has come, in words."""
        parallel = None if self._job is None else self._job()
        return "before training" if parallel is None else f"after update {parallel.steps}"


class _NewMembers(BaseException):
    """The term ends with everything kept, because others have come."""

    def __init__(self, seats: Sequence[int], group: Leavable) -> None:
        super().__init__(seats)
        self.seats = seats
        self.group = group


def survives(  # noqa: PLR0913  # where the process stands, and how often the state is kept
    train: Callable[[Term], T],
    *,
    store: str | Store,
    rank: int | None = None,
    ranks: int | None = None,
    every: int | None = None,
    silent_seconds: float = 60.0,
    seat: int | None = None,
    address: str | None = None,
) -> T:
    """Call `train` with a `Term`, and again in the same process whenever a rank is lost or comes; return its result.

        def train(term):
            parallel = stretto.DataParallel(model, optimizer, group=term.group)
            term.go_on(parallel)
            for batch in parallel.feed(loader, updates=1000, on_update=lambda _: term.keep(parallel)):
                parallel.backward(loss_function(model(batch)))
            parallel.finish()

        stretto.survives(train, store="head:29400")

    Args:
        train: Builds a job over `term.group`, calls `term.go_on` before training and `term.keep` after every update.
        store: Where `stretto meet` listens, as host:port; or a store. It has to outlive every rank.
        rank: This process's place at the start, from 0; None is what a launcher has told it. A process that is started
            again for the same place comes in as a new one.
        ranks: How many places there are at the start; None is what a launcher has told this process.
        every: Updates between two generations; None lets the library choose, so that keeping them takes about a
            hundredth of the time.
        silent_seconds: How long a rank that says nothing may give no sign of life before the others go on without it.
        seat: The number of this process, where whoever starts them numbers them: places first, then on from there.
        address: Of this machine, where Gloo listens; None lets Gloo choose.

    Raises:
        LeftOut: The others go on without this process.
        CommunicationError: Three terms in a row have lost nobody and committed nothing.
        Exception: What `train` raises; the others go on without this process.
    """
    rank, ranks = told_place(rank, ranks)
    job = PrefixStore("survive", connect(store) if isinstance(store, str) else store)
    return survive_among(train, Membership(job, rank, ranks, silent_seconds, seat, address), every)


def survive_among(train: Callable[[Term], T], membership: Members, every: int | None) -> T:
    """As `survives`, whatever members agree by."""
    try:
        return _Survivor(train, membership, every).run()
    except LeftOut:
        raise
    except BaseException as error:
        membership.died(f"{type(error).__name__}: {error}")
        raise
    finally:
        await_left(_LEAVE_SECONDS)


class _Survivor(Generic[T]):
    """One process, from term to term."""

    def __init__(self, train: Callable[[Term], T], membership: Members, every: int | None) -> None:
        self._train = train
        self._membership = membership
        self._every = every
        self._before = _Before()
        self._fruitless = 0
        self._planned: Leavable | None = None
        self._beginning = _Beginning()

    def run(self) -> T:
        """Return what the function has returned in the last term."""
        number, seats = self._membership.enter()
        self._memory = Memory(is_first=number == 0)
        while True:
            (number, seats), result = self._live_through(number, seats)
            if not seats:
                return result[0]
            self._beginning.put_back()

    def _live_through(self, number: int, seats: Sequence[int]) -> tuple[tuple[int, Sequence[int]], list[T]]:
        """Return the following term, with no members where the job has ended, and what the function has returned."""
        newest, term = self._memory.newest, None
        try:
            term = self._begin(number, seats)
            result = self._train(term)
        except _NewMembers as planned:
            self._planned, at = planned.group, time.perf_counter()
            following = self._membership.plan(number + 1, planned.seats)
            self._before = _Before(f"term {number} ended as others had come", at, time.perf_counter())
            return following, []
        except RuntimeError as error:
            if not _is_loss(error, term):
                raise
            at, reached = time.perf_counter(), "before training" if term is None else term.reached
            ended = Ended(number, seats) if term is None else term.end(error)
            following = self._membership.following(ended)
            self._check_fruit(error, following[1] == seats and self._memory.newest == newest)
            agreed, why = time.perf_counter(), self._why(seats, following[1], error)
            self._before = _Before(f"term {number} ended {reached} ({why})", at, agreed)
            _release(error)
            return following, []
        following = self._end_of_work(number, seats)
        term.group.leave()
        return following, [result]

    def _end_of_work(self, number: int, seats: Sequence[int]) -> tuple[int, Sequence[int]]:
        """Return the term after the one in which this process has done its work; without a store, nobody asks."""
        try:
            return self._membership.following(Ended(number, seats, is_done=True))
        except (PeerFailed, PeerSilent) as error:
            _log.warning("%s: but this process has done its work", error)
            return number + 1, ()

    def _begin(self, number: int, seats: Sequence[int]) -> Term:
        """Make the group of a term; one that ended by plan is left now that nobody waits for it any more."""
        group = self._membership.group(number, seats)
        if self._planned is not None:
            self._planned.leave()
            self._planned = None
        term = Term(number, seats, group, self._membership, self._memory, self._every, self._before)
        self._beginning = term.beginning
        return term

    def _check_fruit(self, error: RuntimeError, is_fruitless: bool) -> None:
        self._fruitless = self._fruitless + 1 if is_fruitless else 0
        if self._fruitless == _FRUITLESS:
            raise error

    def _why(self, seats: Sequence[int], following: Sequence[int], error: RuntimeError) -> str:
        died = self._membership.deaths
        lost = [f"seat {seat} is lost: {died.get(seat, error)}" for seat in seats if seat not in following]
        return "; ".join(lost) or str(error)


def updates_between(
    keep_seconds: float, update_seconds: float, keep_bytes: float, update_bytes: float
) -> int:
    """Return how many updates should lie between two generations, from what a rank has measured.

    Args:
        keep_seconds: For which training stands still to keep one.
        update_seconds: That an update takes.
        keep_bytes: That keeping one sends, with its copies.
        update_bytes: That an update sends.
    """
    by_time = keep_seconds / (SHARE * update_seconds)
    by_bytes = keep_bytes / (SHARE * update_bytes) if update_bytes else 0.0
    return max(1, math.ceil(min(max(by_time, by_bytes), _MOST_SECONDS / update_seconds)))


def connect(address: str) -> Store:
    """Return the store that `stretto meet` hosts at host:port.

    Raises:
        ConfigError: It is no such address.
        CommunicationError: Nobody answers there.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"store={address!r}: expected host:port, where `stretto meet` listens")
    try:
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=_CONNECT_SECONDS))
    except RuntimeError as error:
        raise CommunicationError(
            f"no store at {address} ({str(error).splitlines()[0]}): start `stretto meet` on a machine that stays"
        ) from error


def _is_loss(error: RuntimeError, term: Term | None) -> bool:
    """Return whether an error ends the term: one of the library's, or one of a collective of the user's own."""
    if isinstance(error, StrettoError):
        return isinstance(error, CommunicationError) and not isinstance(error, LeftOut)
    return term is not None and not term.group.is_whole


def _release(error: BaseException | None) -> None:
    """Let go of what the frames of an error hold: the job that has ended."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
