"""A rank that is late, stopped or dead where others wait for it in FSDP2's collectives is named, and all end."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from stretto import ACCO, Options, ZeRO1
from stretto.strategies import Strategy
from tests.processes import rank_outcomes
from tests.sharded.jobs import WORLD_SIZE, Case, batch, loss_of, sharded

LATE, TIMEOUT_SECONDS, SILENT_SECONDS = 3, 6.0, 4.0


def hanging(rank: int, strategy: Strategy, how: str, where: str) -> None:
    """Rank 3 does not come to a pass through the model, or not out of it, or not out of the backward pass."""
    options = Options(bucket_bytes=512, timeout_seconds=TIMEOUT_SECONDS, silent_seconds=SILENT_SECONDS)
    pids: list[int] = [0] * WORLD_SIZE
    dist.all_gather_object(pids, os.getpid())
    model, parallel = sharded(Case(strategy=strategy, options=options), 2, 2)
    store = dist.distributed_c10d._get_default_store()

    def hang(*_: object) -> None:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        store.wait(["all have ended"])

    try:
        with parallel:
            for index in range(8):
                if (rank, index) == (LATE, 5):
                    if where == "inside":
                        model.mix[1].register_forward_pre_hook(hang)
                    elif where == "back":
                        model.words.register_full_backward_pre_hook(hang)  # all is gathered by then
                    else:
                        hang()
                parallel.backward(loss_of(model, batch(rank, index)))
    finally:
        if rank != LATE and store.add("ended", 1) == WORLD_SIZE - 1:
            store.set("all have ended", "")
            if how == "stop":
                os.kill(pids[LATE], signal.SIGKILL)


CASES: tuple[tuple[Strategy, str, str], ...] = (
    (ACCO(), "late", "before"),
    (ZeRO1(), "late", "inside"),
    (ACCO(), "stop", "inside"),
    (ZeRO1(), "stop", "before"),
    (ACCO(), "kill", "before"),
    (ZeRO1(), "kill", "inside"),
    (ACCO(), "late", "back"),
    (ZeRO1(), "stop", "back"),
)


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(("strategy", "how", "where"), CASES, ids=str)
def test_a_rank_that_leaves_its_node_waiting_in_a_pass_is_named_by_all(
    strategy: Strategy, how: str, where: str
) -> None:
    began = time.monotonic()
    for outcome in rank_outcomes(WORLD_SIZE, hanging, strategy, how, where, timeout_seconds=100):
        if outcome.rank == LATE and how != "late":
            continue
        assert outcome.error is not None
        if outcome.rank != LATE:
            last = outcome.error.strip().splitlines()[-1]
            assert f"rank {LATE}" in last or f"ranks [{LATE}]" in last, outcome.error
            assert "PeerFailed" in last or "PeerSilent" in last
    assert time.monotonic() - began < 90
