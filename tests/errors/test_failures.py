"""A rank that dies, raises or stops answering ends the job on every other rank, which names it and the cause.

Nobody sleeps: who must act later waits for a key in the store, and the default timeout of ten minutes makes a rank
that notices by anything but the failure itself overrun the test's.
"""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch import Tensor

import stretto as st
from stretto.errors import NonFinite
from stretto_lab.train.workers import host_store
from tests.errors.tiny import BOTH_KINDS, TinyJob
from tests.processes import Outcome, rank_outcomes

SECONDS_TO_NOTICE = 60.0
"""A look into the store, the answers to an alarm, and room for a busy machine; the timeout is 600 s."""
TIMEOUT_SECONDS = 3.0
LONG = timedelta(seconds=60)
JOBS = tuple(zip((2, 3), BOTH_KINDS, strict=True))
"""World sizes and strategies: a lone survivor, and two that both have a lane under way."""


def default_store() -> dist.Store:
    """The store that all ranks share."""
    store: dist.Store = dist.group.WORLD.get_group_store()
    return store


def lanes_left() -> list[str]:
    """The communication lanes that have not ended within a look into the store and more."""
    lanes = [thread for thread in threading.enumerate() if thread.name.startswith("stretto-lane")]
    for lane in lanes:
        lane.join(timeout=SECONDS_TO_NOTICE)
    return [lane.name for lane in lanes if lane.is_alive()]


def train_until_failure(job: TinyJob, first: st.Update) -> str:
    """Train on and return the error that ends the job; more updates than anybody commits alone."""
    try:
        for _ in range(100):
            job.until_update()
    except st.StrettoError as error:
        return f"{type(error).__name__}: {error} lanes left: {lanes_left()}"
    return f"nothing happened after {first}"


def last_rank_is_killed(rank: int, world_size: int, strategy: str) -> str:
    job = TinyJob(strategy)
    first = job.until_update()
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return train_until_failure(job, first)


def last_rank_raises(rank: int, world_size: int, strategy: str) -> str:
    job = TinyJob(strategy)
    first = job.until_update()
    if rank == world_size - 1:
        try:
            with job.parallel:
                job.loss()  # takes off, so that a lane is in flight where there is one
                raise ValueError("column 'text' is missing")
        finally:
            default_store().set("left", str(lanes_left()))
    # Nobody helps the lane of the last rank to complete its round.
    assert default_store().get("left") == b"[]"
    return train_until_failure(job, first)


def loss_function_of_the_last_rank_raises(rank: int, world_size: int) -> str:
    def loss_function(batch: Tensor) -> Tensor:
        # Of a type that elsewhere every rank finds by itself.
        raise NonFinite(f"{len(batch)} samples without a label")

    job = TinyJob("zero1")
    first = job.until_update()
    if rank == world_size - 1:
        job.parallel.micro_batch(loss_function, job.batch())
    return train_until_failure(job, first)


def last_rank_falls_silent(rank: int, world_size: int, strategy: str) -> str:
    job = TinyJob(strategy, options=st.Options(timeout_seconds=TIMEOUT_SECONDS))
    first = job.until_update()
    others = [f"over/{other}" for other in range(world_size - 1)]
    if rank == world_size - 1:
        default_store().wait(others, LONG)
        return train_until_failure(job, first)
    told = train_until_failure(job, first)
    default_store().set(f"over/{rank}", "")
    return told


def move_store_to_rank_0(rank: int, world_size: int) -> None:
    """Start the default group anew over a store that ends with rank 0, as without a launcher."""
    shared = default_store()
    if rank == 0:
        own = host_store("127.0.0.1", 0)
        shared.set("port", str(own.port))
    else:
        own = dist.TCPStore("127.0.0.1", int(shared.get("port")), is_master=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size)


def keeper_of_the_store_is_killed(rank: int, world_size: int) -> str:
    move_store_to_rank_0(rank, world_size)
    job = TinyJob("acco")
    first = job.until_update()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return train_until_failure(job, first)


def keeper_of_the_store_raises(rank: int, world_size: int) -> str:
    move_store_to_rank_0(rank, world_size)
    job = TinyJob("acco")
    with job.parallel:
        first = job.until_update()
        if rank == 0:
            raise ValueError("column 'text' is missing")
        return train_until_failure(job, first)


def only_rank_0_settles(rank: int, world_size: int) -> str:
    """A prediction is shown, so settling needs all ranks; the others go on training."""
    job = TinyJob("wp", options=st.Options(timeout_seconds=TIMEOUT_SECONDS))
    first = job.until_update()
    if rank == 0:
        try:
            with job.parallel.settled():
                return "settled"
        except st.StrettoError as error:
            return f"{type(error).__name__}: {error}"
    return train_until_failure(job, first)


def check_others(outcomes: list[Outcome], *parts: str) -> None:
    """Every rank but the last has raised in time, ended its lane, and says all parts."""
    *others, last = outcomes
    for outcome in others:
        assert outcome.error is None, outcome.error
        for part in (f"rank {outcome.rank}, after step", "lanes left: []", *parts):
            assert part in outcome.value
        assert outcome.finished - last.finished < SECONDS_TO_NOTICE


@pytest.mark.parametrize(("world_size", "strategy"), JOBS)
def test_a_killed_rank_is_named_by_all_others(world_size: int, strategy: str) -> None:
    outcomes = rank_outcomes(world_size, last_rank_is_killed, world_size, strategy)
    assert f"exit code -{signal.SIGKILL.value}" in str(outcomes[-1].error)
    check_others(outcomes, "PeerFailed: ", f"rank {world_size - 1} died or closed its connection")


@pytest.mark.parametrize(("world_size", "strategy"), JOBS)
def test_a_rank_whose_loop_raises_tells_the_others_why(world_size: int, strategy: str) -> None:
    outcomes = rank_outcomes(world_size, last_rank_raises, world_size, strategy)
    assert "ValueError: column 'text' is missing" in str(outcomes[-1].error)
    cause = f"rank {world_size - 1}, after step 1: ValueError: column 'text' is missing"
    check_others(outcomes, "PeerFailed: ", cause)


def test_an_error_of_the_library_that_a_loss_function_raises_is_told_like_any_other() -> None:
    outcomes = rank_outcomes(2, loss_function_of_the_last_rank_raises, 2)
    check_others(outcomes, "PeerFailed: ", "rank 1, after step 1: NonFinite: 2 samples without a label")


@pytest.fixture(scope="module")
def silences() -> dict[tuple[int, str], list[Outcome]]:
    """The outcomes of silent ranks by world size and strategy; side by side, as all they do is wait."""
    with ThreadPoolExecutor(len(JOBS)) as pool:
        runs = [pool.submit(rank_outcomes, size, last_rank_falls_silent, size, name) for size, name in JOBS]
        return {case: run.result() for case, run in zip(JOBS, runs, strict=True)}


@pytest.mark.parametrize(("world_size", "strategy"), JOBS)
def test_a_silent_rank_is_named_by_all_others_after_the_timeout(
    silences: dict[tuple[int, str], list[Outcome]], world_size: int, strategy: str
) -> None:
    outcomes = silences[world_size, strategy]
    incident = f"no answer for {TIMEOUT_SECONDS:g} s from ranks [{world_size - 1}]"
    check_others(outcomes, "PeerSilent: ", incident, "raise Options(timeout_seconds=...)")
    # It comes back to a job that has ended, and is told that it was waited for.
    assert outcomes[-1].error is None, outcomes[-1].error
    assert incident in outcomes[-1].value


def test_a_rank_that_keeps_the_store_is_named_when_it_dies() -> None:
    for outcome in rank_outcomes(3, keeper_of_the_store_is_killed, 3)[1:]:
        assert outcome.error is None, outcome.error
        assert "PeerFailed: " in outcome.value
        ways = (
            "rank 0 died or closed its",
            "rank 0, which keeps the store, died",
            "the rank that keeps the store, usually rank 0, died",  # before the ranks have told who keeps it
        )
        assert any(way in outcome.value for way in ways), outcome.value


def test_a_rank_that_keeps_the_store_stays_until_its_cause_was_heard() -> None:
    for outcome in rank_outcomes(3, keeper_of_the_store_raises, 3)[1:]:
        assert outcome.error is None, outcome.error
        assert "rank 0, after step 1: ValueError: column 'text' is missing" in outcome.value


def test_ranks_that_wait_for_different_things_are_told_what() -> None:
    for outcome in rank_outcomes(2, only_rank_0_settles, 2):
        assert outcome.error is None, outcome.error
        for part in ("PeerSilent: ", "every rank is there", "rank 0 for the gather of bucket 0", "settled()"):
            assert part in outcome.value
