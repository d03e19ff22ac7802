"""The diagnosis of a collective that does not complete: it finds the responsible rank, and all ranks report the same.

Note [Who is to blame]
    A collective that cannot complete has one of four causes, and each shows in another way.

    - A rank raised. It writes the error to the store before it leaves, and waiting ranks read it there.
    - A rank died. On Gloo its connections close: collectives raise on the ranks that exchange with it at that moment,
      and a look at the descriptors finds the rest (`stretto.groups.connections`). Its supervisor may write its death
      to the store. Otherwise its signs of life end.
    - A rank was stopped, or is cut off. It gives no sign of life; if it keeps the store, the store does not answer.
    - A rank does something else, or entered another collective. It gives signs of life, and nothing happens until the
      time-out.

    Where the rank is known, a finding is written to the store like a failure. Otherwise the first rank that notices
    raises an alarm. Every waiting rank answers it, and who has not answered within `ANSWER_SECONDS` is to blame;
    after an error, of these only who gives no sign of life, if there is such a rank. Where some ranks have a their
    own group, and one of them waits for something else, it is the ranks elsewhere that do not answer.
"""

import re
import time
from collections.abc import Callable, Collection, Sequence

from stretto.engine.watcher import Watcher
from stretto.errors import CommunicationError, PeerFailed, PeerSilent
from stretto.groups import Connection

ANSWER_SECONDS = 2.5
"""Seconds to wait for the answers to an alarm: two checks of a waiting rank, two of its watcher, and a margin."""
_WORD_SECONDS = 1.0
"""Seconds to wait for the report of a single rank whose connection has closed: a rank that ends alone reports first."""
_POLL_SECONDS = 0.05
"""Seconds between two checks of the answers."""


class StallDiagnosis:
    """The diagnosis of one long wait.

    Args:
        watcher: This rank's watcher.
        connections: Connections that the group has opened, on Gloo.
        where: Rank and step.
        what: Name of the collective.
        ranks: The participating ranks.
        timeout_seconds: Seconds that the collective may wait for a rank that lives.
    """

    def __init__(
        self,
        watcher: Watcher,
        connections: Collection[Connection],
        *,
        where: Callable[[], str],
        what: str,
        ranks: Sequence[int],
        timeout_seconds: float,
    ) -> None:
        self._watcher = watcher
        self._connections = connections
        self._where = where
        self._what = what
        self._asked = [rank for rank in ranks if rank != watcher.rank]
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + timeout_seconds
        self._closed: list[int] = []
        self._answers, self._looked_at, self._unanswered = watcher.answers, time.monotonic(), 0.0

    def look(self) -> None:
        """Raise if the collective can no longer complete, or this rank has ended the job."""
        if self._watcher.has_finished and time.monotonic() <= self._deadline:
            return  # a save after finish(): nobody watches any more, and the others may come late
        if self._watcher.is_over:
            raise PeerFailed(f"{self._prefix}this rank has ended the job")
        if (known := self._known()) is not None:
            raise known
        closed = closed_ranks(self._watcher, self._connections)
        # What closes later may have ended because of those.
        if dead := [rank for rank in self._closed if rank in closed]:
            raise self._found(PeerFailed, _died(dead, "a descriptor of Gloo's is closed"), dead)
        if closed:
            self._watcher.watch(closed)  # they may have ended the job in their own way, and have said so
            self._watcher.look(_WORD_SECONDS if len(closed) == 1 else ANSWER_SECONDS)
        self._closed = closed
        self._look_at_store()
        alarms = self._watcher.heard("alarm").values()
        if any(alarm.startswith(PeerSilent.__name__) for alarm in alarms):
            raise self._alarm(PeerSilent, self._no_answer)
        if alarms:
            raise self._alarm(PeerFailed, "another rank's connection closed")
        if time.monotonic() > self._deadline:
            raise self._alarm(PeerSilent, self._no_answer)

    def into(self, error: BaseException) -> CommunicationError:
        """Return the error to raise for an error of the backend."""
        return self._alarm(PeerFailed, _reason(error))

    def _look_at_store(self) -> None:
        """Raise if the store has not answered for too long within this wait, or died with its keeper."""
        watcher, now = self._watcher, time.monotonic()
        passed = min(now - self._looked_at, 2 * watcher.period)  # this rank may have been stopped meanwhile
        is_answered = watcher.answers > self._answers or not watcher.watches
        self._unanswered = 0.0 if is_answered else self._unanswered + passed
        self._answers, self._looked_at = watcher.answers, now
        keeper = [] if watcher.keeper is None else [watcher.keeper]
        if watcher.lost is not None and self._unanswered > (
            ANSWER_SECONDS if keeper else watcher.silent_seconds
        ):
            raise PeerFailed(self._prefix + self._without_store(watcher.lost))
        if self._unanswered > watcher.silent_seconds:
            kept = f"the store, which rank {keeper[0]} keeps" if keeper else "the store"
            raise PeerSilent(self._prefix + self._no_sign(f"from {kept}"), keeper)

    def _alarm(self, kind: type[CommunicationError], reason: str) -> CommunicationError:
        """Ask all ranks to answer, and return the error that names those that do not answer, or that are known to be
        gone.
        """
        watcher, deadline = self._watcher, time.monotonic() + ANSWER_SECONDS
        watcher.look(ANSWER_SECONDS)
        beats = watcher.beats
        watcher.say("alarm", f"{kind.__name__} {self._what}", ANSWER_SECONDS)
        while True:
            watcher.look(max(_POLL_SECONDS, deadline - time.monotonic()))
            if (known := self._known()) is not None:
                return known
            closed = closed_ranks(watcher, self._connections)
            if dead := [rank for rank in self._closed if rank in closed]:
                return self._found(PeerFailed, _died(dead, reason), dead)
            self._closed = closed
            watcher.watch(closed)
            answers = watcher.heard("alarm")
            waits = {
                rank: answer.partition(" ")[2]
                for rank, answer in {**answers, watcher.rank: f" {self._what}"}.items()
            }
            missing = [rank for rank in self._asked if rank not in answers]
            # Some rank closed its connections. If only one has not answered, it is that one: no need to wait.
            is_one_left = kind is PeerFailed and len(missing) == 1 and watcher.lost is None and not closed
            if not missing and len(set(waits.values())) > 1:
                # One of them waits for others, which are not asked here.
                missing = [rank for rank in watcher.others if rank not in answers]
            if not missing or is_one_left or time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        if watcher.lost is not None:
            return PeerFailed(self._prefix + self._without_store(reason))
        if not missing:
            return self._found(
                kind, f"{reason}, though every rank is there and waits: {_differing(waits)}", []
            )
        if kind is PeerSilent:
            advice = (
                "look at what these ranks do, or raise Options(timeout_seconds=...); several jobs must be made and "
                "trained in one order on all ranks"
            )
            return self._found(kind, f"{reason} from ranks {missing}; {advice}", missing)
        quiet = [rank for rank in missing if rank in beats and watcher.beats.get(rank) == beats[rank]]
        return self._found(kind, _died(quiet or missing, reason), quiet or missing)

    def _found(self, kind: type[CommunicationError], text: str, ranks: Sequence[int]) -> CommunicationError:
        """Write a finding for the other ranks; return the error."""
        self._watcher.say("finding", f"{kind.__name__} {text}", ANSWER_SECONDS)
        return _error(kind, self._prefix + text, ranks)

    def _known(self) -> CommunicationError | None:
        """Return the error for the watcher's findings: a report of another rank, or a silent rank."""
        told, silent = self._told(), self._watcher.silent
        if told is not None or not silent:
            return told
        return self._found(PeerSilent, self._no_sign(f"from ranks {silent}"), silent)

    def _told(self) -> CommunicationError | None:
        """Return the error for the reports of other ranks or their supervisor; None if there are none."""
        watcher = self._watcher
        failures, findings, died = (watcher.heard(topic) for topic in ("failure", "finding", "death"))
        if failures or findings or died:
            watcher.say("heard", "", ANSWER_SECONDS)
        if failures:
            return PeerFailed(self._prefix + "; ".join(failures.values()))
        for told in findings.values():
            name, _, finding = told.partition(" ")
            return _error(
                PeerSilent if name == PeerSilent.__name__ else PeerFailed, self._prefix + finding, ()
            )
        if died:
            return PeerFailed(self._prefix + "; ".join(f"rank {rank}: {how}" for rank, how in died.items()))
        return None

    def _without_store(self, reason: str) -> str:
        keeper = self._watcher.keeper
        who = (
            "the rank that keeps the store, usually rank 0,"
            if keeper is None
            else f"rank {keeper}, which keeps the store,"
        )
        return f"{who} died ({reason})"

    def _no_sign(self, of_whom: str) -> str:
        return (
            f"no sign of life for {self._watcher.silent_seconds:g} s {of_whom}; look at what these ranks do, "
            "or raise Options(silent_seconds=...)"
        )

    @property
    def _no_answer(self) -> str:
        return f"no answer for {self._timeout_seconds:g} s"

    @property
    def _prefix(self) -> str:
        return f"{self._where()}, waiting for the {self._what}: "


def closed_ranks(watcher: Watcher, connections: Collection[Connection]) -> list[int]:
    """Return ranks that are gone after a connection has closed, unless they have ended the job normally.

    Which rank was at its other end is not known, so every rank at that address is asked.
    """
    hosts = {connection.other for connection in connections if not connection.is_open}
    return [rank for rank in watcher.gone(hosts, _WORD_SECONDS) if rank not in watcher.left] if hosts else []


def _error(kind: type[CommunicationError], message: str, ranks: Sequence[int]) -> CommunicationError:
    return (PeerSilent if kind is PeerSilent else PeerFailed)(message, ranks)


def _reason(error: BaseException) -> str:
    """Return the first sentence of a backend's message, without the source location."""
    return re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0]).split(". ")[0]


def _died(ranks: Sequence[int], reason: str) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} died or closed its connection ({reason}); see its own output"
    who = f"one of ranks {list(ranks)}, which do not answer,"
    return f"{who} died or closed its connection ({reason}); see their output"


def _differing(waits: dict[int, str]) -> str:
    found = ", ".join(f"rank {rank} for the {what}" for rank, what in sorted(waits.items()))
    advice = (
        "all ranks must enter settled(), checkpoints and finish() alike"
        if len(set(waits.values())) > 1
        else "if the network is that slow, raise Options(timeout_seconds=...)"
    )
    return f"{found}; {advice}"
