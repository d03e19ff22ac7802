"""Who takes part in a job, term after term, agreed in a store that none of its ranks hosts.

A term is a list of processes in order. It ends when one of them is lost, or when others have come. Then the next one is
agreed: every live member says so, and a member that sees all answers, except of members known to be gone, writes the
    list by one `compare_set`. The value in the store after that is the answer for all. A process that is not in it
    ends.

A process is called by its *seat*, a number that no other process gets: a process that replaces a dead one has another
seat, and no record of the dead one counts for it.

    came/<rank>           how often a process has come for this place
    place/<rank>          the seat of the one that has come for it last
    newcomers             how many have come after the start
    waiting               seats that want to come in, one a line, with their places
    entered               those of them that have: who is lost later does not wait again
    latest                the term that was agreed last
    <term>/said/<seat>    whether a process continues or has done its work, and whom it takes for dead
    <term>/list           the seats of a term in order, or none where the job has ended

Note [Who is gone]
    A member that has said nothing yet may be dead, or in the middle of a long pass. It is gone once its death is
    written: by its supervisor, or by the process that replaces it. If another member has found its connection closed,
    it is gone unless it gives signs of life in the job that ends, as every rank does twice a second until its own
    part has ended. Otherwise it is gone after `silent_seconds` without a sign. So members wait for a late rank, and
    not for a stopped one. If all members of a term are dead, no process waits to join any longer. The same holds if
    none of them has given a sign of life for longer than a new term takes to be agreed and to begin.

Note [Nodes come and go whole]
    Where the ranks of a node add up gradients before these leave it, a node that has lost one of them cannot do as
    the others do. Then the list has those nodes alone of which all ranks are there, node by node, and in a node by
    place. A live process on a node that is not whole is excluded, and joins again with the process that replaces the
    dead one.
"""

import contextlib
import dataclasses
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from stretto.engine.watcher import last_sign
from stretto.errors import CommunicationError, LeftOut, PeerFailed, PeerSilent
from stretto.groups import MEET_SECONDS, Leavable, LeavableGroup, announce_death, deaths, part_store

T = TypeVar("T")

START_SECONDS = 600.0
"""Seconds that the first members wait for each other: imports and data may take minutes."""
_CLOSED_SECONDS = 1.0
"""Seconds after which a member with a closed connection is gone: it has missed two signs of life."""
_POLL_SECONDS = 0.01
_LOOK_SECONDS = 1.0
"""Seconds between two checks of all members' signs of life by a process that waits to join."""
_MOST_PAUSES = 25
"""Longest counted pause between two checks, in intended pauses or, if the store is slow, in twice a check's
duration. Longer pauses do not count as silence of others: this process was stopped, or the store did not answer."""
_BOUND_SECONDS = 1.0
"""Seconds beyond `silent_seconds` that the store may take for one answer."""
_LEAST_BOUND_SECONDS = 6.0
"""Shortest bound on the store's answer: a store that looks up a name without a resolver does not answer for five
seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """One member's knowledge at the end of a term."""

    number: int
    """Number of the term; -1 before the first."""
    seats: Sequence[int]
    """Its members in order."""
    job_store: Store | None = None
    """Store in which members give their signs of life, under their ranks; None if no job has begun."""
    blamed: Sequence[int] = ()
    """Seats that this member has found to be gone."""
    is_done: bool = False
    """Whether this member has done its work; the job has ended once all have."""


def by_node(seats: Sequence[int], places: Mapping[int, int], ranks_per_node: int) -> list[int]:
    """Return the seats of whole nodes, node by node; see Note [Nodes come and go whole].

    Args:
        seats: In order; of two for one place, the later one counts.
        places: Of seats; any other seat is the one of its place.
        ranks_per_node: 1 leaves all as they are.
    """
    if ranks_per_node == 1:
        return list(seats)
    nodes: dict[int, dict[int, int]] = {}
    for seat in seats:
        place = places.get(seat, seat)
        nodes.setdefault(place // ranks_per_node, {})[place] = seat
    return [
        seat for node in nodes.values() if len(node) == ranks_per_node for _, seat in sorted(node.items())
    ]


class Members(Protocol):
    """One process's part in the agreement, by any means of communication; `Membership` documents the methods."""

    seat: int
    ranks_per_node: int

    @property
    def machine(self) -> str: ...

    @property
    def deaths(self) -> Mapping[int, str]: ...

    def enter(self) -> tuple[int, Sequence[int]]: ...

    def following(self, ended: Ended) -> tuple[int, Sequence[int]]: ...

    def newcomers(self, seats: Sequence[int]) -> list[int]: ...

    def plan(self, number: int, seats: Sequence[int]) -> tuple[int, Sequence[int]]: ...

    def group(self, number: int, seats: Sequence[int]) -> Leavable: ...

    def leave_out(self, seat: int, why: str) -> None: ...

    def died(self, how: str) -> None: ...


class Membership:
    """One process's part in the agreement, by a store.

    Args:
        store: A store that all processes of the job reach, and none of them hosts.
        rank: The place for which this process was started, from 0.
        ranks: Number of places.
        silent_seconds: Seconds that a member may send nothing and give no sign of life.
        seat: The number of this process from its starter; None draws a number.
        address: Address of this machine where Gloo listens; None lets Gloo choose.
        ranks_per_node: Number of consecutive places that form a node; see Note [Nodes come and go whole].
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        silent_seconds: float,
        seat: int | None = None,
        address: str | None = None,
        ranks_per_node: int = 1,
    ) -> None:
        self._job = store
        self._address = address
        self._place = rank
        self.ranks_per_node = ranks_per_node
        """Number of consecutive places that form a node; 1 if each process is independent."""
        self._store: Store = PrefixStore("membership", store)
        self._ranks = ranks
        self._silent_seconds = silent_seconds
        self._answered = time.monotonic()
        self._waiting: list[int] = []
        self._looking = threading.Thread()
        self._is_lost = False
        self.seat = seat if seat is not None else self._bounded(lambda: self._draw(rank))
        """Seat of this process."""

    @property
    def machine(self) -> str:
        """Name of the unit that is lost at once: the machine of this process, or its node."""
        if self.ranks_per_node == 1:
            return socket.gethostname()
        return f"node {self._place // self.ranks_per_node}"

    def enter(self) -> tuple[int, Sequence[int]]:
        """Return the first term that this process is in: its number, and the seats of its members in order.

        Raises:
            LeftOut: The job has ended.
            PeerFailed: The store is gone.
            PeerSilent: The store does not answer.
        """
        if self.seat < self._ranks:
            return self.following(Ended(-1, range(self._ranks)))
        return self._bounded(self._wait_to_come_in)

    def following(self, ended: Ended) -> tuple[int, Sequence[int]]:
        """Return the number and the seats of the next term; no seats if the job has ended.

        Raises:
            LeftOut: It continues without this process.
            PeerFailed: The store is gone.
            PeerSilent: The store does not answer.
        """
        return self._bounded(lambda: self._agree(ended))

    def newcomers(self, seats: Sequence[int]) -> list[int]:
        """Return the processes that could join at the last call, and check again; it never waits for the store."""
        if not self._looking.is_alive():
            self._looking = threading.Thread(target=self._look, name="stretto-newcomers", daemon=True)
            self._looking.start()
        return [seat for seat in self._waiting if seat not in seats]

    def plan(self, number: int, seats: Sequence[int]) -> tuple[int, Sequence[int]]:
        """Write a term's list on which its members have agreed otherwise; return the valid list.

        Raises:
            LeftOut: Another list was written before, without this process.
            PeerFailed: The store is gone.
            PeerSilent: The store does not answer.
        """
        self._bounded(lambda: self._propose(number, seats))
        return self._bounded(lambda: self._listed(number))

    def group(self, number: int, seats: Sequence[int]) -> LeavableGroup:
        """Return the group of a term; all of its members must call it.

        Raises:
            CommunicationError: Not all of them came.
        """
        # A thread that waits for a dead member keeps the lock of its connection; members agree by the other one.
        store = PrefixStore(f"term/{number}", self._job.clone())  # type: ignore[attr-defined]  # missing in torch's stub
        return LeavableGroup(store, seats, list(seats).index(self.seat), address=self._address)

    def leave_out(self, seat: int, why: str) -> None:
        """Exclude a process from the job; it ends once it reads this.

        Raises:
            PeerFailed: The store is gone.
            PeerSilent: The store does not answer.
        """
        self._bounded(lambda: announce_death(self._job, seat, why))

    def died(self, how: str) -> None:
        """Report to the others that this process leaves for good, if the store answers."""
        if self._is_lost:
            return
        with contextlib.suppress(CommunicationError):
            self._bounded(lambda: announce_death(self._job, self.seat, how))

    @property
    def deaths(self) -> Mapping[int, str]:
        """Return how processes have ended, by seat, according to the store, if it answers."""
        try:
            return self._bounded(lambda: deaths(self._job))
        except (PeerFailed, PeerSilent):
            return {}

    # What the store is asked; on a thread of its own

    def _bounded(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, but raise if a host is stopped, since calls of a store then never return."""
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)

        self._answered = time.monotonic()
        thread = threading.Thread(target=run, name="stretto-membership", daemon=True)
        thread.start()
        limit = max(self._silent_seconds + _BOUND_SECONDS, _LEAST_BOUND_SECONDS)
        while thread.is_alive() and time.monotonic() - self._answered < limit:
            thread.join(_POLL_SECONDS)
        if results:
            return results[0]
        error = errors[0] if errors else None
        if error is not None and (isinstance(error, LeftOut) or not isinstance(error, RuntimeError)):
            raise error
        self._is_lost = True
        if error is None:
            raise PeerSilent(
                f"the store of the members has not answered for {limit:g} s: check the machine that hosts it, "
                "and start the job again from its last checkpoint"
            )
        raise PeerFailed(
            f"the store of the members is gone ({str(error).splitlines()[0]}): start the job again from its last "
            "checkpoint"
        ) from error

    def _draw(self, rank: int) -> int:
        is_first = self._store.add(f"came/{rank}", 1) == 1
        seat = rank if is_first else self._ranks - 1 + self._store.add("newcomers", 1)
        before = self._read(f"place/{rank}")
        if before is not None and before not in deaths(self._job):
            announce_death(self._job, before, "another process has replaced it")
        self._store.set(f"place/{rank}", json.dumps(seat))
        return seat

    def _wait_to_come_in(self) -> tuple[int, Sequence[int]]:
        self._store.append("waiting", f"{self.seat} {self._place}\n")  # type: ignore[attr-defined]  # missing in torch's stub
        known, members, looked_at = None, None, -math.inf
        while True:
            latest = self._read("latest")
            seats = range(self._ranks) if latest is None else self._read(f"{latest}/list")
            if self.seat in seats:
                return latest, seats
            died = deaths(self._job)
            is_over = died.keys() >= set(seats)  # also where there are none
            if members is None or latest != known:
                signs = None if latest is None else signs_of(self._job, latest, seats)
                patience = 2 * self._silent_seconds + MEET_SECONDS
                known = latest
                members = _Missing(Ended(latest or 0, seats, signs), patience, self._now, _LOOK_SECONDS)
            if self._now() - looked_at > _LOOK_SECONDS:
                looked_at = self._now()
                is_over = is_over or members.have_vanished(died)
            if is_over:
                raise LeftOut(
                    f"seat {self.seat}: the job ended before this process could join: no member remains; if "
                    "its work is not done, start it again from its last checkpoint",
                    is_over=True,
                )
            self._pause()

    def _agree(self, ended: Ended) -> tuple[int, Sequence[int]]:
        number = ended.number + 1
        self._store.set(f"{number}/said/{self.seat}", json.dumps([ended.is_done, *ended.blamed]))
        patience = START_SECONDS if ended.number < 0 else self._silent_seconds
        missing = _Missing(ended, patience, self._now, _POLL_SECONDS)
        while self._read(f"{number}/list") is None:
            said = {seat: self._read(f"{number}/said/{seat}") for seat in ended.seats}
            said = {seat: found for seat, found in said.items() if found is not None}
            died = deaths(self._job)
            if self.seat in died:
                raise LeftOut(
                    f"seat {self.seat}: the other members count this process as dead: {died[self.seat]}"
                )
            if missing.are_gone(said, died):
                living = {seat: is_done for seat, (is_done, *_) in said.items() if seat not in died}
                is_over = all(living.values())
                self._propose(number, [] if is_over else [*living, *self._asking(ended.seats)])
            else:
                self._pause()
        return self._listed(number)

    def _listed(self, number: int) -> tuple[int, Sequence[int]]:
        seats = self._read(f"{number}/list")
        if seats and self.seat not in seats:
            node = "" if self.ranks_per_node == 1 else ", or a rank of its node is gone"
            raise LeftOut(
                f"seat {self.seat}: the other members continue without this process, as seats {seats}: it "
                f"gave no sign of life (Options.silent_seconds), or they counted it as dead{node}"
            )
        return number, seats

    def _look(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, which the next loss will show
            self._waiting = self._whole(self._asking(()))

    def _asking(self, seats: Sequence[int]) -> list[int]:
        """Return live processes that want to join and are not members yet."""
        died, entered = deaths(self._job), [seat for (seat,) in self._lines("entered")]
        return [seat for seat, _ in self._lines("waiting") if seat not in {*seats, *died, *entered}]

    def _whole(self, seats: Sequence[int]) -> list[int]:
        waiting = self._lines("waiting") if self.ranks_per_node > 1 else []  # an answer of the store less
        places = {seat: place for seat, place in waiting}
        return by_node(seats, places, self.ranks_per_node)

    def _lines(self, key: str) -> list[list[int]]:
        found = self._store.get(key).decode() if self._store.check([key]) else ""
        return [list(map(int, line.split())) for line in found.splitlines()]

    def _propose(self, number: int, seats: Sequence[int]) -> None:
        listed = json.loads(self._store.compare_set(f"{number}/list", "", json.dumps(self._whole(seats))))
        came = "".join(f"{seat}\n" for seat in listed if seat >= self._ranks)
        if came:
            self._store.append("entered", came)  # type: ignore[attr-defined]  # missing in torch's stub
        self._store.set("latest", json.dumps(number))

    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    # How time passes for this process; a simulation has a time of its own

    def _now(self) -> float:
        return time.monotonic()

    def _pause(self) -> None:
        self._answered = time.monotonic()
        time.sleep(_POLL_SECONDS)


def signs_of(job: Store, number: int, seats: Sequence[int]) -> Store:
    """Return the store in which the members of a term give their signs of life, under their ranks, once their job
    has begun.
    """
    return PrefixStore("stretto", part_store(PrefixStore(f"term/{number}", job), range(len(seats)), 0))


class _Missing:
    """Members without an answer; see Note [Who is gone].

    Args:
        ended: The term.
        patience: Seconds without a sign after which a member counts as gone, if nothing else is known.
        now: The clock, in seconds.
        pause: Seconds between two checks, if nothing delays this process.
    """

    def __init__(self, ended: Ended, patience: float, now: Callable[[], float], pause: float) -> None:
        self._ended = ended
        self._patience = patience
        self._now = now
        self._most_seconds = _MOST_PAUSES * pause
        self._shortest = 0.0  # between two looks so far; 0 until it is known
        # The last sign of each, the silence since, and when this process has looked last.
        self._signs: dict[int, tuple[str | None, float, float]] = {}

    def are_gone(self, said: Mapping[int, Sequence[Any]], died: Mapping[int, str]) -> bool:
        """Return whether all members without an answer are gone.

        Args:
            said: Answers of members, in their order: whether they are done, and which seats they count as dead.
            died: Seats whose death was written.
        """
        blamed = {seat for _, *seats in said.values() for seat in seats}
        missing = [seat for seat in self._ended.seats if seat not in said and seat not in died]
        return all([self._silence(seat) >= self._limit(seat in blamed) for seat in missing])

    def have_vanished(self, died: Mapping[int, str]) -> bool:
        """Return whether no member gives signs of life; a member that has not begun a job yet may take long."""
        missing = [seat for seat in self._ended.seats if seat not in died]
        silences = [(self._silence(seat), self._signs[seat][0]) for seat in missing]
        return all(
            silence >= (START_SECONDS if sign is None else self._patience) for silence, sign in silences
        )

    def _limit(self, is_blamed: bool) -> float:
        return _CLOSED_SECONDS if is_blamed else self._patience

    def _silence(self, seat: int) -> float:
        """Return for how long a member has given no new sign, as far as this process has checked."""
        store, now = self._ended.job_store, self._now()
        sign = None if store is None else last_sign(store, self._ended.seats.index(seat))
        before, silence, until = self._signs.get(seat, (sign, 0.0, now))
        passed = now - until
        counted = min(passed, max(self._most_seconds, 2 * self._shortest))
        if passed:
            self._shortest = min(passed, self._shortest or passed)
        silence = silence + counted if sign == before else 0.0
        self._signs[seat] = sign, silence, now
        return silence
