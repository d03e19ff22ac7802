"""A job that goes on in the same processes when ranks are lost or come.

Nothing inside a job survives the loss of a rank. The process does, and so do the generations in its memory: the job
ends, its connections are shut, those that are left agree who they are, and the user's function is called again. It
builds a new job on a new group and goes on from the newest generation that is whole.
"""

import copy
import dataclasses
import logging
import math
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from stretto.checkpoint.load import Restored
from stretto.checkpoint.ranks import Ranks
from stretto.continuation import Loader
from stretto.engine.state import set_settings
from stretto.engine.watcher import store_of
from stretto.errors import (
    CommunicationError,
    ConfigError,
    CorruptionError,
    LeftOut,
    OutOfTurn,
    PeerFailed,
    PeerSilent,
    StrettoError,
)
from stretto.groups import Leavable, await_left, told_place
from stretto.guards.strikes import to_leave_out
from stretto.optimizer import Hyperparameters, read_hyperparameters
from stretto.parallel import DataParallel
from stretto.survive.asking import Asking
from stretto.survive.copies import Copies
from stretto.survive.generations import Memory, may_leave
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


class Wish:
    """Whether this process wants to leave; asked by its user, or by a signal."""

    def __init__(self) -> None:
        self.is_asked = False

    def ask(self) -> None:
        """Let it."""
        self.is_asked = True

    @contextmanager
    def at(self, signals: Sequence[signal.Signals]) -> Iterator[None]:
        """Let the first of these signals ask, inside the block; the next does what it did before."""
        before = {number: signal.getsignal(number) for number in signals}

        def heard(number: int, _: object) -> None:
            self.ask()
            signal.signal(number, before[signal.Signals(number)])

        try:
            for number in signals:
                signal.signal(number, heard)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclasses.dataclass(frozen=True, slots=True)
class _Process:
    """What stays with a process from term to term."""

    membership: Members
    memory: Memory
    every: int | None
    """Updates between two generations; None lets the library choose."""
    wish: Wish


class Term:
    """What the user's function is told of the time until a rank is lost or comes."""

    def __init__(
        self,
        number: int,
        seats: Sequence[int],
        group: Any,
        process: _Process,
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
        self._process = process
        self._before = before
        self._due = 0
        self._costs = _Costs()
        self._copies: Copies | None = None
        self._asking: Asking | None = None
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
        restored = self._process.memory.load(parallel, self._copies, loader=loader)
        if restored is None:
            if begin is not None:
                begin()
            self._keep(parallel, self._copies, loader, extra() if callable(extra) else extra)
            self._copies.complete()  # there is no state before this one
        elif self.rank == 0:
            _log.warning("%s", self._before.line(restored.step, self.world_size))
        self._asking = Asking(parallel, self.group)
        return restored

    def leave(self) -> None:
        """Let this process leave soon: its machine is taken away, say. It may be called at any time, by any thread.

        All members keep a state after the same update, within seconds, and the others go on from there without this
        process, so nothing is done again. Here `keep` does not return then, and `survives` raises `LeftOut`.
        """
        self._process.wish.ask()

    def keep(self, parallel: DataParallel, *, loader: Loader | None = None, extra: Any = None) -> None:
        """Keep the state, if it is time to; all ranks must call, after every `Update`.

        It is time when so many updates have passed, and when a member leaves or a process waits to come in. Then the
        term ends here too, and nothing is done again: an exception that is no `Exception` leaves the caller's function.
        Copies of the state that was kept last travel meanwhile, and go on whenever this is called.

        Args:
            parallel: The job.
            loader: This rank's, if its position is to be kept.
            extra: Anything that `go_on` returns in the next term; rank 0's is kept. A function is called for it.

        Raises:
            OutOfTurn: `go_on` was not called before.
            CommunicationError: A rank was lost.
        """
        copies, asking = self._copies, self._asking
        if copies is None or asking is None:
            raise OutOfTurn(f"rank {self.rank}: term.keep() before term.go_on(): expected it before training")
        is_asked = asking.look(parallel.steps, self._asks)
        began = time.perf_counter()
        if parallel.steps < self._due and not is_asked:
            copies.go_on()
            self._costs.keep_seconds += time.perf_counter() - began
            return
        copies.complete()
        self._costs.keep_seconds += time.perf_counter() - began
        seats = self._keep(parallel, copies, loader, extra() if callable(extra) else extra)
        if seats != list(self.seats):
            copies.complete()
            # After this nobody waits for those that leave.
            Ranks(parallel).gather("ending a term", lambda: None)
            parallel.leave()
            raise _Planned(seats, self.group)

    def _asks(self) -> bool:
        """Return whether this member has a reason to end the term; the first one looks for those that wait."""
        return self._process.wish.is_asked or (
            self.rank == 0 and bool(self._process.membership.newcomers(self.seats))
        )

    def _keep(self, parallel: DataParallel, copies: Copies, loader: Loader | None, extra: Any) -> list[int]:
        """Keep the state; return the seats of those that go on from it."""
        began, sent_bytes = time.perf_counter(), parallel.sent_bytes
        told = {
            "measured": self._costs.measured(parallel),
            "leaves": self._process.wish.is_asked,
            "waiting": self._process.membership.newcomers(self.seats) if self.rank == 0 else [],
        }
        by_rank = self._process.memory.keep(parallel, copies, self.number, told, loader=loader, extra=extra)
        at, sent = time.perf_counter(), parallel.sent_bytes
        self._costs = _Costs(parallel.steps, at, sent, at - began, sent - sent_bytes)
        known = [one["measured"] for _, one in by_rank if one["measured"] is not None]
        interval = max((updates_between(*one) for one in known), default=_FIRST_UPDATES)
        self._due = parallel.steps + (interval if self._process.every is None else self._process.every)
        leaving = may_leave(
            [machine for machine, _ in by_rank],
            [rank for rank, (_, one) in enumerate(by_rank) if one["leaves"]],
            together=self._process.membership.ranks_per_node > 1,
        )
        stay = [seat for rank, seat in enumerate(self.seats) if rank not in leaving]
        return [*stay, *by_rank[0][1]["waiting"]]

    def end(self, error: BaseException) -> Ended:
        """End the job where it has not ended, and leave the group; return what to bring into the agreement."""
        parallel = None if self._job is None else self._job()
        if parallel is not None:
            parallel.fail(error)
            parallel.job.compute.lifetime.failures.let_go()  # they hold threads of the group
        if self._copies is not None:
            self._copies.end()
            self._copies = self._asking = None
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


class _Planned(BaseException):
    """The term ends with everything kept, because others have come or some leave: with those that go on."""

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
    ranks_per_node: int = 1,
    leaves_at: Sequence[signal.Signals] = (),
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
        ranks_per_node: Of places that follow each other, where a node that has lost a rank is of no use: where
            `Options(ranks_per_node=...)` says so, or its ranks hold a model in shards. Such a node is left out, and
            comes in again once all of its ranks have been started again.
        leaves_at: Signals at which this process leaves (`Term.leave`), such as `signal.SIGTERM` where machines are
            taken away with notice. A second one does what it would do without this.
        seat: The number of this process, where whoever starts them numbers them: places first, then on from there.
        address: Of this machine, where Gloo listens; None lets Gloo choose.

    Raises:
        ConfigError: `ranks` is no multiple of `ranks_per_node`, or `leaves_at` is given outside the main thread.
        LeftOut: The others go on without this process: it has left as it was asked to, was taken for dead, or its node
            is not whole.
        CorruptionError: Guards have named this process, or cannot say whom to name; those that they do not name go on.
        CommunicationError: Three terms in a row have lost nobody and committed nothing.
        Exception: What `train` raises; the others go on without this process.
    """
    rank, ranks = told_place(rank, ranks)
    if ranks % ranks_per_node:
        raise ConfigError(f"ranks_per_node={ranks_per_node}: expected a divisor of the {ranks} ranks")
    if leaves_at and threading.current_thread() is not threading.main_thread():
        raise ConfigError("leaves_at: Python handles signals in the main thread alone: call survives there")
    job = PrefixStore("survive", connect(store) if isinstance(store, str) else store)
    membership = Membership(job, rank, ranks, silent_seconds, seat, address, ranks_per_node)
    wish = Wish()
    with wish.at(leaves_at):
        return survive_among(train, membership, every, wish)


def survive_among(train: Callable[[Term], T], membership: Members, every: int | None, wish: Wish) -> T:
    """As `survives`, whatever members agree by."""
    try:
        return _Survivor(train, membership, every, wish).run()
    except LeftOut:
        raise
    except BaseException as error:
        membership.died(f"{type(error).__name__}: {error}")
        raise
    finally:
        await_left(_LEAVE_SECONDS)


class _Survivor(Generic[T]):
    """One process, from term to term."""

    def __init__(
        self, train: Callable[[Term], T], membership: Members, every: int | None, wish: Wish
    ) -> None:
        self._train = train
        self._membership = membership
        self._every = every
        self._wish = wish
        self._before = _Before()
        self._fruitless = 0
        self._planned: Leavable | None = None
        self._beginning = _Beginning()

    def run(self) -> T:
        """Return what the function has returned in the last term."""
        number, seats = self._membership.enter()
        memory = Memory(self._membership.machine, is_first=number == 0)
        self._process = _Process(self._membership, memory, self._every, self._wish)
        while True:
            (number, seats), result = self._live_through(number, seats)
            if result and not seats:
                return result[0]
            if not seats:
                raise LeftOut(
                    f"seat {self._membership.seat}: nobody goes on: all have left, or no node is whole any more; if "
                    "the work is not done, start the job again from its last checkpoint",
                    is_over=True,
                    is_asked=self._wish.is_asked,
                )
            self._beginning.put_back()

    def _live_through(self, number: int, seats: Sequence[int]) -> tuple[tuple[int, Sequence[int]], list[T]]:
        """Return the following term, with no members where the job has ended, and what the function has returned."""
        newest, term = self._process.memory.newest, None
        try:
            term = self._begin(number, seats)
            result = self._train(term)
        except _Planned as planned:
            self._planned, at = planned.group, time.perf_counter()
            following = self._plan(number + 1, planned)
            how = _changes(seats, following[1])
            self._before = _Before(f"term {number} ended {how}", at, time.perf_counter())
            return following, []
        except RuntimeError as error:
            if not _is_loss(error, term) and not self._goes_on_without(error, seats):
                raise
            at, reached = time.perf_counter(), "before training" if term is None else term.reached
            ended = Ended(number, seats) if term is None else term.end(error)
            following = self._membership.following(ended)
            self._check_fruit(error, following[1] == seats and self._process.memory.newest == newest)
            agreed, why = time.perf_counter(), self._why(seats, following[1], error)
            self._before = _Before(f"term {number} ended {reached} ({why})", at, agreed)
            _release(error)
            return following, []
        following = self._end_of_work(number, seats)
        term.group.leave()
        return following, [result]

    def _plan(self, number: int, planned: "_Planned") -> tuple[int, Sequence[int]]:
        """Return the term after one that ended by plan, if this process is in it."""
        own = self._membership.seat
        try:
            following = self._membership.plan(number, planned.seats)
        except LeftOut as error:
            planned.group.leave()
            if own in planned.seats or not self._wish.is_asked:
                raise
            raise LeftOut(
                f"seat {own}: this process has left, as it was asked to, before term {number}", is_asked=True
            ) from error
        if not following[1]:
            planned.group.leave()
        return following

    def _goes_on_without(self, error: RuntimeError, seats: Sequence[int]) -> bool:
        """Return whether this process goes on where guards have found damage: without the ranks that they name."""
        if not isinstance(error, CorruptionError) or (ranks := to_leave_out([error], len(seats))) is None:
            return False
        named = [seats[rank] for rank in ranks]
        for seat in named:
            self._membership.leave_out(seat, f"guards have named it: {error}")
        return self._membership.seat not in named

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
        term = Term(number, seats, group, self._process, self._before)
        self._beginning = term.beginning
        return term

    def _check_fruit(self, error: RuntimeError, is_fruitless: bool) -> None:
        self._fruitless = self._fruitless + 1 if is_fruitless else 0
        if self._fruitless == _FRUITLESS:
            raise error

    def _why(self, seats: Sequence[int], following: Sequence[int], error: RuntimeError) -> str:
        died, gone = self._membership.deaths, [seat for seat in seats if seat not in following]
        unknown = str(error)
        if self._membership.ranks_per_node > 1 and set(gone) & set(died):
            unknown = "its node is not whole"
        lost = [f"seat {seat} is lost: {died.get(seat, unknown)}" for seat in gone]
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


def _changes(before: Sequence[int], after: Sequence[int]) -> str:
    """Return in words who has come and who has left."""
    come, left = (
        [seat for seat in one if seat not in other] for one, other in ((after, before), (before, after))
    )
    parts = [f"{how} {', '.join(map(str, who))}" for how, who in (("with", come), ("without", left)) if who]
    return f"by plan, to go on {' and '.join(parts)}"


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
