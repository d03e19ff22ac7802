"""A rank that dies before a group is made: the others hear of it at once, not after their time-out."""

import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore

from stretto.errors import CommunicationError, PeerFailed
from stretto.groups import announce_death
from stretto.groups.connections import connections
from stretto.groups.meeting import Meeting
from stretto.groups.wrapped import gloo_group
from stretto_lab.train.workers import host_store
from tests.draws import draws
from tests.processes import rank_outcomes, run_ranks

LONG = timedelta(seconds=60)
RANKS = 3
SOON_SECONDS = 10.0
"""On a busy machine; the time-out is six times as long."""


@dataclass(frozen=True)
class Death:
    """Of one rank, and when."""

    ranks: int
    victim: int
    moment: str
    """comes: once it has come, while another has not; connects: once all have come; told: it lives, but its supervisor
    says that it is dead."""


def drawn(seed: int) -> Death:
    rng = random.Random(seed)
    ranks = rng.randint(2, 5)
    return Death(ranks, rng.randrange(ranks), ("comes", "connects", "told")[seed % 3])


def meeting_of(rank: int, ranks: int) -> Meeting:
    store = PrefixStore("meeting", dist.distributed_c10d._get_default_store())
    return Meeting(store, rank, range(ranks), LONG.total_seconds(), connections())


def found(meeting: Meeting, rank: int, ranks: int) -> tuple[tuple[int, ...], str, float]:
    """Return whom a meeting names, in which words, and how long after the death."""
    store = dist.distributed_c10d._get_default_store()
    own = store.clone()
    try:
        meeting.wait()
        meeting.connect(lambda: gloo_group(PrefixStore("group", store), rank, ranks, LONG, None))
    except PeerFailed as error:
        return error.ranks, str(error), time.monotonic() - float(own.get("died"))
    return (), "nothing", 0.0


def die(store: dist.Store) -> None:
    store.set("died", str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def meets(rank: int, death: Death) -> tuple[tuple[int, ...], str, float]:
    store = dist.distributed_c10d._get_default_store().clone()
    others = [other for other in range(death.ranks) if other != death.victim]
    if rank != death.victim:
        if death.moment == "comes" and rank == others[0]:
            store.wait(["died"], LONG)
        whom = found(meeting_of(rank, death.ranks), rank, death.ranks)
        store.set(f"over/{rank}", "")
        return whom
    if death.moment == "told":
        store.set("died", str(time.monotonic()))
        announce_death(store, rank, "told")
        store.wait([f"over/{other}" for other in others], LONG)
        return (), "", 0.0
    meeting = meeting_of(rank, death.ranks)
    if death.moment == "comes":
        own = store.clone()

        def die_once_here() -> None:
            own.wait([f"meeting/connections/{rank}"], LONG)
            die(own)

        threading.Thread(target=die_once_here).start()
    meeting.wait()
    die(store)
    return (), "", 0.0


def test_whoever_dies_before_a_group_is_there_is_named_by_all_others() -> None:
    for death in map(drawn, draws(12)):
        for outcome in rank_outcomes(death.ranks, meets, death):
            if outcome.rank == death.victim:
                continue
            assert outcome.error is None, (death, outcome)
            ranks, text, seconds = outcome.value
            assert ranks == (death.victim,), (death, outcome)
            assert f"rank {death.victim} died" in text
            assert seconds < SOON_SECONDS, (death, outcome)


def waits_beside_one_that_closes(rank: int, moment: str, shares: str) -> str:
    """Wait in vain for the last rank, while rank 0 closes what it had, before it comes or once it is there."""
    store = dist.distributed_c10d._get_default_store()
    before = connections()
    old = [dist.new_group()]
    watched = connections() - (before if shares == "nothing else" else set())
    if rank == RANKS - 1:
        store.wait(["waited/0", "waited/1"], LONG)
        return ""

    def close(own: dist.Store, others: range) -> None:
        own.wait([f"meeting/connections/{other}" for other in others], LONG)
        dist.destroy_process_group(old[0])
        old.clear()

    meeting = Meeting(PrefixStore("meeting", store), rank, range(RANKS), 2.5, watched)
    if rank == 0 and moment == "before it comes":
        close(store, range(1, RANKS - 1))
    elif rank == 0:
        threading.Thread(target=close, args=(store.clone(), range(RANKS - 1))).start()
    try:
        meeting.wait()
    except CommunicationError as error:
        store.set(f"waited/{rank}", "")
        return str(error)
    return "nothing"


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("moment", ["before it comes", "once it is there"])
def test_a_rank_that_closes_what_it_had_is_not_taken_for_dead(moment: str) -> None:
    for shares in ("the default group, too", "nothing else"):
        for text in run_ranks(RANKS, waits_beside_one_that_closes, moment, shares)[:-1]:
            assert f"its ranks [{RANKS - 1}] did not come within 2.5 s" in text, shares


def test_all_name_the_one_that_was_found_dead_first_and_nobody_who_left_because_of_it() -> None:
    job = PrefixStore("job", host_store("127.0.0.1", 0))
    for rank, dead in enumerate((2, 0)):
        announce_death(job, dead, "killed")
        with pytest.raises(PeerFailed, match="rank 2 died") as raised:
            Meeting(PrefixStore("meeting", job), rank, range(RANKS), LONG.total_seconds(), ()).wait()
        assert raised.value.ranks == (2,)
