"""The watcher: a thread of each rank that gives signs of life in the job's store, and reads the signs of others
there.

Note [Calls of the store]
    No call of a `TCPStore` gives up on a host that is stopped or cut off. So only this thread calls the store, on its
    own connection. Other threads read its last findings, give it texts to write, and wait for it for a bounded time.

Note [How long a rank is silent]
    What counts is the time between looks that the store has answered, and of a longer pause no more than two periods.
    So a rank that was itself stopped, or could not reach the store, does not blame the others for its own absence. A
    thread gives the signs, so a rank that computes, compiles or saves gives them too. One long call that keeps Python's
    lock stops them: a rank without signs is asked itself, long before it counts as silent (`stretto.groups.answering`).

Note [What the store costs]
    A rank writes the same few bytes at its start, and makes the same three calls at each look, however many ranks the
    job has: its own sign, one read of the signs of the ranks that it watches and of what anybody has said, and one
    question for deaths. Only where a connection has closed does it read where all ranks answer, once.
"""

import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from stretto.groups import answering, answers, deaths, listens_at

_log = logging.getLogger("stretto")

PERIOD_SECONDS = 0.5
"""Seconds between two checks; a rank that raised is noticed within twice this time."""
_LONGEST_PAUSE = 2
"""Most periods that one pause counts; see Note [How long a rank is silent]."""
_PERIODS = 4
"""Fewest periods after which a rank counts as silent."""
_WATCHED = 8
"""Number of ranks whose signs one rank reads: the ranks that follow it, and so a whole node's."""
_LATE = 6
"""A rank is reported as late after this fraction of the time after which it counts as silent."""
_ARRIVE_SECONDS = 5.0
"""Seconds that a job waits at its start for the store to answer."""
_JOIN_SECONDS = 1.0
"""Seconds that a job's end waits for a call of the store to return."""
_BEAT, _LEFT = "beat", "left"
"""Keys of a rank's sign of life, and of its last sign when it ends the job normally."""
_SAID, _HEARD, _ANSWERS = "said", "heard", "answers"
"""Lists to which ranks append lines: messages to all, ranks that have read of an error, and each rank's address."""


def last_sign(store: Store, rank: int) -> str | None:
    """Return the last sign of life of a rank in the store of its job; None if there is none."""
    key = f"{_BEAT}/{rank}"
    return store.get(key).decode() if store.check([key]) else None


class Watcher:
    """Gives this rank's signs of life, and reads other ranks' messages.

    Args:
        store: The store of the job's group; None, or a single rank, watches no rank.
        members: Members of the job: their ranks in the default group, as their supervisor names them.
        rank: Index of this process among them.
        keeps_store: Whether the store ends with this process.
        host: The address at which other ranks reach this one, for its answers; None for the address towards the store.
        silent_seconds: Seconds after which a rank without a sign of life counts as silent.
        aborts: Groups to abort once a rank is known to be gone, because nothing else ends the waits in them.
    """

    def __init__(
        self,
        store: Store | None,
        members: Sequence[int],
        rank: int,
        keeps_store: bool,
        host: str | None,
        silent_seconds: float,
        aborts: Sequence[dist.ProcessGroup],
    ) -> None:
        self.others = [other for other in range(len(members)) if other != rank]
        self.rank = rank
        self.silent_seconds = silent_seconds
        self.period = min(PERIOD_SECONDS, silent_seconds / _PERIODS)
        self.keeps_store = keeps_store
        self._host = host
        self._where: dict[int, str] = {}
        """Addresses of other ranks, as far as they were read."""
        self.words: Mapping[str, Mapping[int, str]] = {}
        """Messages of other ranks, by topic and rank, and their deaths."""
        self._read = 0
        """Number of bytes of all ranks' messages that were read."""
        self.beats: Mapping[int, str] = {}
        """The last signs of the ranks whose signs are read here."""
        self.answers = 0
        """Number of checks that the store has answered."""
        self.lost: str | None = None
        """Why the store can no longer be used; None if it can."""
        self.is_over = False
        """Whether this rank has ended the job."""
        self.has_finished = False
        """Whether this rank has ended the job without an error."""
        self._members = members
        self._aborts = aborts
        self.has_aborted = False
        """Whether it has aborted its groups."""
        following = [(rank + distance) % len(members) for distance in range(1, len(members))]
        self._watched = following[:_WATCHED]
        self._readable: set[int] = set()
        """Ranks whose sign can be read; reading a missing key would wait."""
        self._silence: dict[int, float] = {}
        self._late: set[int] = set()
        self._errands: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        self._overdue = threading.Event()  # of the last errand that was not done in time: set once it is
        self._overdue.set()
        self._goodbye: str | None = None
        self._thread: threading.Thread | None = None
        if store is not None and self.others:
            self._thread = threading.Thread(
                target=self._run, args=(store,), name="stretto-watch", daemon=True
            )
            self._thread.start()
            self._do(lambda: None, _ARRIVE_SECONDS)  # its place is known before anything can happen to it

    # What others ask

    def say(self, topic: str, text: str, seconds: float) -> bool:
        """Write `text` for the other ranks; return whether it was written within `seconds`."""
        key = _HEARD if topic == _HEARD else _SAID
        return self._do(lambda: self._append(key, self._line(topic, text)), seconds)

    def hearers(self, seconds: float) -> set[int]:
        """Return the other ranks that report that they have read of an error, as far as the store answers."""
        found: set[int] = set()
        self._do(lambda: found.update(rank for rank, _, _ in self._lines(_HEARD)), seconds)
        return found

    def gone(self, hosts: Collection[str], seconds: float) -> list[int]:
        """Return the ranks whose addresses no longer answer: they have died, or ended the job."""
        self._do(self._find_answers, seconds)
        # If the store has ended, at least its keeper's address is known.
        known = {**self.heard("keeper"), **self._where}
        near = [rank for rank, where in known.items() if where.partition(" ")[0] in hosts]
        return sorted(rank for rank in near if answers(known[rank], self.period) is False)

    def look(self, seconds: float) -> bool:
        """Check now; return whether the store has answered within `seconds`."""
        return self._do(self._look, seconds)

    def watch(self, ranks: Sequence[int]) -> None:
        """Read the signs of these ranks too, starting with the next check."""
        self._watched = [*self._watched, *(rank for rank in ranks if rank not in self._watched)]

    def heard(self, topic: str) -> Mapping[int, str]:
        """Return other ranks' messages about `topic` at the last check."""
        return self.words.get(topic, {})

    @property
    def watches(self) -> bool:
        """Whether there is a rank to watch, and a store to read."""
        return self._thread is not None

    @property
    def left(self) -> set[int]:
        """Watched ranks that have ended the job normally."""
        return {rank for rank, beat in self.beats.items() if beat == _LEFT}

    @property
    def silent(self) -> list[int]:
        """Watched ranks without a sign of life for longer than allowed."""
        return sorted(rank for rank, seconds in self._silence.items() if seconds >= self.silent_seconds)

    @property
    def keeper(self) -> int | None:
        """The other rank whose process keeps the store, if known."""
        return next(iter(self.heard("keeper")), None)

    def end(self, *, leaves: bool = True, finishes: bool = False) -> None:
        """Stop the signs of life; a rank that leaves reports this, so that no rank counts it as dead."""
        if self.is_over:
            return
        self.is_over, self.has_finished = True, finishes
        self._goodbye = _LEFT if leaves else None
        if self._thread is not None:
            self._errands.put((lambda: None, threading.Event()))
            if self._thread is not threading.current_thread():
                self._thread.join(_JOIN_SECONDS)  # it must not come out of the store while Python ends

    # The thread

    def _do(self, errand: Callable[[], None], seconds: float) -> bool:
        """Let the thread run `errand`; return whether it is done within `seconds`. Callers do not wait while an
        overdue call is not done.
        """
        if self._thread is None or self.is_over:
            return False
        done, is_stuck = threading.Event(), not self._overdue.is_set()
        self._errands.put((errand, done))
        if not done.wait(0.0 if is_stuck else seconds):
            self._overdue = done
            return False
        return self.lost is None

    def _run(self, store: Store) -> None:
        self._try(lambda: self._arrive(store))
        while not self.is_over:
            self._try(self._look)
            with contextlib.suppress(queue.Empty):
                errand, done = self._errands.get(timeout=self.period)
                while True:  # also those that came meanwhile: what a rank says at its end is said
                    self._try(errand)
                    done.set()
                    errand, done = self._errands.get_nowait()
        if self._goodbye is not None:
            self._try(lambda: self._store.set(f"{_BEAT}/{self.rank}", _LEFT))
        del self._store, self._answering

    def _try(self, call: Callable[[], None]) -> None:
        if self.lost is None:
            try:
                call()
            except RuntimeError as error:  # whoever keeps the store has ended
                self.lost = str(error).splitlines()[0]

    def _arrive(self, store: Store) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stub
        self._looked_at = time.monotonic()
        self._beat, self._answering = 0, None
        given = answering(store, self._host)
        self._answering, where = given or (None, "")
        self._append(_ANSWERS, self._line("", where))
        if self.keeps_store:
            self._append(_SAID, self._line("keeper", where))
        for key in (_SAID, _HEARD):
            self._append(key)  # so that it is there to be read

    def _look(self) -> None:
        self._beat += 1
        self._store.set(f"{_BEAT}/{self.rank}", str(self._beat))
        watched = self._watched
        for rank in set(watched) - self._readable:
            self._append(f"{_BEAT}/{rank}")  # which leaves a sign as it is
            self._readable.add(rank)
        *signs, said = self._store.multi_get([*(f"{_BEAT}/{rank}" for rank in watched), _SAID])
        beats = {rank: sign.decode() for rank, sign in zip(watched, signs, strict=True) if sign}
        now = time.monotonic()
        self._count(watched, beats, min(now - self._looked_at, _LONGEST_PAUSE * self.period))
        self._looked_at = now
        words = {topic: dict(told) for topic, told in self.words.items()}
        for rank, topic, text in self._parsed(said[self._read :]):
            words.setdefault(topic, {})[rank] = text
        self._read = len(said)
        if died := deaths(self._store):
            words["death"] = {rank: died[name] for rank, name in enumerate(self._members) if name in died}
        self.words = words
        self.answers += 1
        self._abort_if_gone()

    def _find_answers(self) -> None:
        """Read the addresses of other ranks, unless all are known."""
        if len(self._where) < len(self.others):
            self._where.update((rank, where) for rank, _, where in self._lines(_ANSWERS))

    def _append(self, key: str, line: str = "") -> None:
        self._store.append(key, line)  # type: ignore[attr-defined]  # missing in torch's stub

    def _line(self, topic: str, text: str) -> str:
        return json.dumps([self.rank, topic, text]) + "\n"

    def _lines(self, key: str) -> list[tuple[int, str, str]]:
        return self._parsed(self._store.get(key))

    def _parsed(self, lines: bytes) -> list[tuple[int, str, str]]:
        """Return rank, topic and text of each line that another rank has written."""
        return [line for line in map(json.loads, lines.splitlines()) if line[0] != self.rank]

    def _count(self, watched: Sequence[int], beats: Mapping[int, str], seconds: float) -> None:
        for rank in watched:
            is_new = beats.get(rank) != self.beats.get(rank) or beats.get(rank) == _LEFT
            self._silence[rank] = 0.0 if is_new else self._silence.get(rank, 0.0) + seconds
        self.beats = beats
        quiet = [rank for rank in watched if self._silence[rank] >= self.silent_seconds / _LATE / 2]
        if quiet:
            self._find_answers()
        for rank in quiet:
            if (where := self._where.get(rank)) and answers(where, self.period):
                self._silence[rank] = 0.0
        follower = watched[0]  # one rank is enough to tell it
        is_late = self._silence[follower] >= self.silent_seconds / _LATE
        if is_late and follower not in self._late:
            self._late.add(follower)
            _log.warning(
                "rank %d: no sign of life from rank %d for %.3g s; the job ends if that rank stays silent "
                "for %.3g s (Options.silent_seconds)",
                self.rank, follower, self._silence[follower], self.silent_seconds,
            )  # fmt: skip
        elif not is_late and follower in self._late:
            self._late.remove(follower)
            _log.warning("rank %d: rank %d is back", self.rank, follower)

    def _abort_if_gone(self) -> None:
        is_told = any(self.words.get(topic) for topic in ("failure", "finding", "death"))
        if is_told or self.silent:
            self.has_aborted |= bool(self._aborts)  # also at the looks after it
            for group in self._aborts:
                group.abort()
            self._aborts = ()


def store_of(group: dist.ProcessGroup) -> Store | None:
    """Return the store of the group's own ranks, or None for a group without a store (a single rank, a simulation)."""
    try:
        return PrefixStore("stretto", group.get_group_store())
    except RuntimeError:
        return None


def keeps(store: Store | None) -> bool:
    """Return whether a store ends with this process."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore) and listens_at(store.port)
