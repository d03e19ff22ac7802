"""Real ranks of which one dies, or stops answering, while its node waits for it: it is named, and nobody hangs."""

import os
import signal
from datetime import timedelta

import pytest

import stretto as st
from tests.diloco.jobs import Course, go_on, start
from tests.errors.test_failures import default_store, lanes_left
from tests.processes import Outcome, rank_outcomes

RANKS = 4
TIMEOUT_SECONDS = 3.0
LONG = timedelta(seconds=60)


def train(rank: int, ending: str) -> str:
    """Train until an error; the last rank ends after update 2, while a fragment is under way."""
    parallel = start(
        rank,
        None,
        st.DiLoCo(interval=2, delay=1, worker="node"),
        options={"ranks_per_node": 2, "timeout_seconds": TIMEOUT_SECONDS if "silence" in ending else 600.0},
    )
    course = Course([], [], [], 0, parallel)
    go_on(parallel, range(2), course)
    try:
        if rank == RANKS - 1:
            if ending == "death":
                os.kill(os.getpid(), signal.SIGKILL)
            if ending == "error":
                with parallel:
                    raise ValueError("column 'text' is missing")
            default_store().wait([f"over/{other}" for other in range(RANKS - 1)], LONG)
        if ending == "silence beside a busy node" and rank < RANKS // 2:
            default_store().wait([f"over/{RANKS - 2}"], LONG)  # computing, it answers nobody
        go_on(parallel, range(2, 100), course)
    except st.StrettoError as error:
        told = f"{type(error).__name__}: {error} lanes left: {lanes_left()}"
        default_store().set(f"over/{rank}", "")
        return told
    return "nothing happened"


def outcomes(ending: str) -> list[Outcome]:
    """Of the ranks that did not end it."""
    found = rank_outcomes(RANKS, train, ending)[:-1]
    assert [one.error for one in found] == [None] * (RANKS - 1)
    return found


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(
    ("ending", "kind", "cause"),
    [
        ("death", "PeerFailed", "rank 3 died or closed its connection"),
        ("error", "PeerFailed", "rank 3, after step 2: ValueError: column 'text' is missing"),
        ("silence", "PeerSilent", "no answer for 3 s from ranks [3]; look at what these ranks do"),
        (
            "silence beside a busy node",
            "PeerSilent",
            "no answer for 3 s from ranks [3]; look at what these ranks do",
        ),
    ],
)
def test_a_rank_that_ends_inside_a_node_is_named_by_all_others(ending: str, kind: str, cause: str) -> None:
    for outcome in outcomes(ending):
        assert outcome.value.startswith(f"{kind}: rank {outcome.rank}, after step")
        assert cause in outcome.value
        assert "lanes left: []" in outcome.value
