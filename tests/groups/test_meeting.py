"""A rank that dies before a group is made: the others hear of it at once, not after their time-out."""

import os
import signal
import threading
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore

from stretto.errors import CommunicationError, PeerFailed
from stretto.groups import announce_death
from stretto.groups.connections import connections
from stretto.groups.meeting import Meeting
from stretto.groups.private import private_group
from stretto.groups.wrapped import gloo_group
from tests.processes import rank_outcomes, run_ranks

LONG = timedelta(seconds=60)
RANKS, VICTIM = 3, 2
SOON_SECONDS = 10.0
"""On a busy machine; the time-out is six times as long."""


def meeting_of(rank: int, timeout_seconds: float = 60.0) -> Meeting:
    store = PrefixStore("meeting", dist.distributed_c10d._get_default_store())
    return Meeting(store, rank, range(RANKS), timeout_seconds, connections())


def found(meeting: Meeting, rank: int) -> tuple[tuple[int, ...], str, float]:
    """Return whom a meeting names, in which words, and how long after the death."""
    store = dist.distributed_c10d._get_default_store()
    own = store.clone()
    try:
        meeting.wait()
        meeting.connect(lambda: gloo_group(PrefixStore("group", store), rank, RANKS, LONG, None))
    except PeerFailed as error:
        return error.ranks, str(error), time.monotonic() - float(own.get("died"))
    return (), "nothing", 0.0


def die() -> None:
    dist.distributed_c10d._get_default_store().set("died", str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def dies_before_it_connects(rank: int) -> tuple[tuple[int, ...], str, float]:
    meeting = meeting_of(rank)
    if rank == VICTIM:
        meeting.wait()
        die()
    return found(meeting, rank)


def dies_while_another_is_late(rank: int) -> tuple[tuple[int, ...], str, float]:
    store = dist.distributed_c10d._get_default_store()
    if rank == VICTIM:
        own = store.clone()

        def once_here() -> None:
            own.wait([f"meeting/connections/{VICTIM}"], LONG)
            die()

        threading.Thread(target=once_here).start()
    if rank == 1:
        store.wait(["died"], LONG)
    return found(meeting_of(rank), rank)


def is_told_of_a_death(rank: int) -> tuple[tuple[int, ...], str, float]:
    store = dist.distributed_c10d._get_default_store().clone()
    if rank == VICTIM:
        store.wait(["over/0", "over/1"], LONG)
        return (VICTIM,), f"rank {VICTIM} died (told)", 0.0
    if rank == 0:
        store.set("died", str(time.monotonic()))
        announce_death(store, VICTIM, "told")
    whom = found(meeting_of(rank), rank)
    store.set(f"over/{rank}", "")
    return whom


def test_a_rank_that_dies_is_named_by_all_others_before_a_group_is_there() -> None:
    for case in (dies_before_it_connects, dies_while_another_is_late, is_told_of_a_death):
        for outcome in rank_outcomes(RANKS, case):
            if outcome.rank == VICTIM and case is not is_told_of_a_death:
                continue
            assert outcome.error is None, (case, outcome)
            ranks, text, seconds = outcome.value
            assert ranks == (VICTIM,), (case, outcome)
            assert f"rank {VICTIM} died" in text
            assert seconds < SOON_SECONDS, (case, outcome)


def comes_too_late(rank: int) -> str:
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["over"], LONG)
        return ""
    try:
        private_group(timeout_seconds=0.5)
    except CommunicationError as error:
        store.set("over", "")
        return str(error)
    return "nothing"


def test_who_has_not_come_in_time_is_named() -> None:
    text, _ = run_ranks(2, comes_too_late)
    assert "ranks [1] of it have not come within 0.5 s" in text


def closes_what_it_had(rank: int) -> tuple[tuple[int, ...], str, float]:
    store = dist.distributed_c10d._get_default_store()
    old = dist.new_group()
    if rank == 0:
        store.wait([f"meeting/connections/{other}" for other in range(1, RANKS)], LONG)
        dist.destroy_process_group(old)
    whom = found(meeting_of(rank), rank)
    store.set(f"over/{rank}", "")
    store.wait([f"over/{other}" for other in range(RANKS)], LONG)
    return whom


def test_a_rank_that_closes_other_connections_before_it_comes_is_not_taken_for_dead() -> None:
    assert run_ranks(RANKS, closes_what_it_had) == [((), "nothing", 0.0)] * RANKS
