"""The report to the other ranks when a rank leaves because of an error, and its wait until they have read it."""

import time
from collections.abc import Collection

from stretto.engine.stall_diagnosis import ANSWER_SECONDS, closed_ranks
from stretto.engine.watcher import Watcher
from stretto.errors import (
    CommunicationError,
    NonFinite,
    PeerSilent,
    Quarantined,
    RanksDisagree,
    ReplicaNonFinite,
    UnusedParameters,
    WorkerDisagrees,
)
from stretto.groups.connections import Connection

_POLL_SECONDS = 0.05
"""Seconds between two checks of which ranks have read this rank's report."""
_SEEN_BY_ALL = (NonFinite, Quarantined, RanksDisagree, UnusedParameters)
"""Errors that every rank finds and raises without a report, from the same round report or incidents."""
_OF_ONE_WORKER = (ReplicaNonFinite, WorkerDisagrees)
"""Errors of these that only the ranks of one worker find."""


def tell(
    watcher: Watcher,
    connections: Collection[Connection],
    error: BaseException,
    where: str,
    *,
    is_users: bool = False,
) -> bool:
    """Report to the other ranks why this rank leaves.

    Args:
        watcher: Reads and writes the store.
        connections: Connections of the job's group.
        error: The reason.
        where: Rank and step.
        is_users: Whether the user's code raised it, so that its type does not show which ranks know it.

    Returns:
        Whether the error was reported: not an error from another rank, nor an error that every rank finds alone.
    """
    known = isinstance(error, _SEEN_BY_ALL) and not isinstance(error, _OF_ONE_WORKER)
    is_told = is_users or not (known or isinstance(error, CommunicationError))
    if is_told:
        watcher.say("failure", f"{where}: {type(error).__name__}: {error}", ANSWER_SECONDS)
    if watcher.keeps_store and not (known and not is_told):
        _await_hearing(watcher, connections, error)
    return is_told


def _await_hearing(watcher: Watcher, connections: Collection[Connection], error: BaseException) -> None:
    """Wait until all living ranks have read of an error, or left: the store ends with this process."""
    deadline = time.monotonic() + ANSWER_SECONDS
    gone = {*watcher.silent, *(error.ranks if isinstance(error, PeerSilent) else ())}
    while watcher.look(ANSWER_SECONDS) and time.monotonic() < deadline:
        gone.update(watcher.left, closed_ranks(watcher, connections), watcher.hearers(ANSWER_SECONDS))
        for topic in ("failure", "death"):
            gone.update(watcher.heard(topic))
        if gone.issuperset(watcher.others):
            return
        time.sleep(_POLL_SECONDS)
