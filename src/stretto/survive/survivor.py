"""A job that continues in the same processes when ranks are lost, leave or come.

Nothing inside a job survives the loss of a rank. The process does, and so do the generations in its memory: the job
ends, its connections are shut, the remaining ranks agree on their list, and Stretto calls the user's function again.
It builds a new job on a new group and continues from the newest generation that is whole.
"""

import logging
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Generic, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from stretto.errors import (
    CommunicationError,
    ConfigError,
    CorruptionError,
    LeftOut,
    PeerFailed,
    PeerSilent,
    StrettoError,
)
from stretto.groups import Leavable, await_left, drop_default, told_place
from stretto.guards.left_out import to_leave_out
from stretto.survive.generations import Memory
from stretto.survive.membership import Ended, Members, Membership
from stretto.survive.terms import Before, Beginning, Planned, Process, Term, Wish

_log = logging.getLogger("stretto")

T = TypeVar("T")

_CONNECT_SECONDS = 60.0
"""Seconds that the store may take to start."""
_LEAVE_SECONDS = 5.0
"""Seconds that dropping the last groups may take: milliseconds, unless something in them is in progress."""
_FRUITLESS = 3
"""Number of consecutive terms with the same members and without an update after which the job ends with the error."""


def survives(
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
        rank: This process's place at the start, from 0; None takes it from a launcher. A process that is started
            again for the same place joins as a new process.
        ranks: The number of places at the start; None takes it from a launcher.
        every: Updates between two generations; None lets the library choose, so that keeping them takes about a
            hundredth of the time.
        silent_seconds: How long a rank that says nothing may give no sign of life before the others continue without
            it.
        ranks_per_node: Of places that follow each other: as in `Options(ranks_per_node=...)`. A node that has lost a
            rank is excluded, and joins again once all of its ranks have been started again.
        leaves_at: Signals at which this process leaves (`Term.leave`), such as `signal.SIGTERM` where machines are
            taken away with notice. A second one does what it would do without this.
        seat: The number of this process, if its starter numbers processes: places first, then further numbers.
        address: Of this machine, where Gloo listens; None lets Gloo choose.

    Raises:
        ConfigError: `ranks` is no multiple of `ranks_per_node`, or `leaves_at` is no list or given outside the main
            thread.
        LeftOut: The others continue without this process: it has left on request, was counted as dead, or its node is
            not whole.
        CorruptionError: Guards have named this process, or cannot say whom to name; those that they do not name
            continue.
        CommunicationError: Three terms in a row have ended without a lost rank and without a committed update.
        Exception: What `train` raises; the others continue without this process.
    """
    rank, ranks = told_place(rank, ranks)
    if ranks_per_node < 1 or ranks % ranks_per_node:
        raise ConfigError(f"ranks_per_node={ranks_per_node}: expected a divisor of the {ranks} ranks")
    if not isinstance(leaves_at, Sequence):
        raise ConfigError(f"leaves_at={leaves_at!r}: expected a list of signals, as [signal.SIGTERM]")
    if leaves_at and threading.current_thread() is not threading.main_thread():
        raise ConfigError("leaves_at: Python handles signals in the main thread alone: call survives there")
    job = PrefixStore("survive", connect(store) if isinstance(store, str) else store)
    membership = Membership(job, rank, ranks, silent_seconds, seat, address, ranks_per_node)
    wish = Wish()
    with wish.at(leaves_at):
        return survive_among(train, membership, every, wish)


def survive_among(train: Callable[[Term], T], membership: Members, every: int | None, wish: Wish) -> T:
    """Do the same as `survives`, over any `Members`."""
    try:
        return _Survivor(train, membership, every, wish).run()
    except LeftOut:
        raise
    except BaseException as error:
        membership.died(f"{type(error).__name__}: {error}")
        raise
    finally:
        drop_default()
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
        self._before = Before()
        self._fruitless = 0
        self._planned: Leavable | None = None
        self._beginning = Beginning()

    def run(self) -> T:
        """Return the function's result in the last term."""
        number, seats = self._membership.enter()
        memory = Memory(self._membership.machine, is_first=number == 0)
        self._process = Process(self._membership, memory, self._every, self._wish)
        while True:
            (number, seats), result = self._live_through(number, seats)
            if result and not seats:
                return result[0]
            if not seats:
                raise LeftOut(
                    f"seat {self._membership.seat}: no seat continues: all have left, or no node is whole; if "
                    "the work is not done, start the job again from its last checkpoint",
                    is_over=True,
                    is_asked=self._wish.is_asked,
                )
            self._beginning.put_back()

    def _live_through(self, number: int, seats: Sequence[int]) -> tuple[tuple[int, Sequence[int]], list[T]]:
        """Return the next term, without members if the job has ended, and the function's results."""
        newest, term = self._process.memory.newest, None
        try:
            term = self._begin(number, seats)
            result = self._train(term)
        except Planned as planned:
            self._planned, at = planned.group, time.perf_counter()
            following = self._plan(number + 1, planned)
            how = _changes(seats, following[1])
            self._before = Before(f"term {number} ended {how}", at, time.perf_counter())
            return following, []
        except RuntimeError as error:
            if not _is_loss(error, term) and not self._goes_on_without(error, seats):
                raise
            at, reached = time.perf_counter(), "before training" if term is None else term.reached
            ended = Ended(number, seats) if term is None else term.end(error)
            following = self._membership.following(ended)
            self._check_fruit(error, following[1] == seats and self._process.memory.newest == newest)
            agreed, why = time.perf_counter(), self._why(seats, following[1], error)
            self._before = Before(f"term {number} ended {reached} ({why})", at, agreed)
            _release(error)
            return following, []
        following = self._end_of_work(number, seats)
        term.group.leave()
        return following, [result]

    def _plan(self, number: int, planned: Planned) -> tuple[int, Sequence[int]]:
        """Return the term after one that ended as planned, if this process is in it."""
        own = self._membership.seat
        try:
            following = self._membership.plan(number, planned.seats)
        except LeftOut as error:
            planned.group.leave()
            if own in planned.seats or not self._wish.is_asked:
                raise
            raise LeftOut(
                f"seat {own}: this process left before term {number}, on the signal that it received",
                is_asked=True,
            ) from error
        if not following[1]:
            planned.group.leave()
        return following

    def _goes_on_without(self, error: RuntimeError, seats: Sequence[int]) -> bool:
        """Return whether this process continues after guards have found damage: it does, unless they name it."""
        if not isinstance(error, CorruptionError) or (ranks := to_leave_out([error], len(seats))) is None:
            return False
        named = [seats[rank] for rank in ranks]
        for seat in named:
            self._membership.leave_out(seat, f"guards have named it: {error}")
        return self._membership.seat not in named

    def _end_of_work(self, number: int, seats: Sequence[int]) -> tuple[int, Sequence[int]]:
        """Return the term after the one in which this process has done its work; without a store, there is none."""
        try:
            return self._membership.following(Ended(number, seats, is_done=True))
        except (PeerFailed, PeerSilent) as error:
            _log.warning("%s: this process had already done its work", error)
            return number + 1, ()

    def _begin(self, number: int, seats: Sequence[int]) -> Term:
        """Make the group of a term; leave a group that ended as planned, now that no rank waits for it."""
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


def connect(address: str) -> Store:
    """Return the store that `stretto meet` hosts at host:port.

    Raises:
        ConfigError: It is not such an address.
        CommunicationError: No store answers there.
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
    """Describe which processes have joined and left."""
    come, left = (
        [seat for seat in one if seat not in other] for one, other in ((after, before), (before, after))
    )
    parts = [f"{how} {', '.join(map(str, who))}" for how, who in (("with", come), ("without", left)) if who]
    return f"by plan, to continue {' and '.join(parts)}"


def _is_loss(error: RuntimeError, term: Term | None) -> bool:
    """Return whether an error ends the term: an error of the library, or of a collective in user code."""
    if isinstance(error, StrettoError):
        return isinstance(error, CommunicationError) and not isinstance(error, LeftOut)
    return term is not None and not term.group.is_whole


def _release(error: BaseException | None) -> None:
    """Release the objects in an error's frames: the job that has ended."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
