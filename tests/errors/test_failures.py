"""A rank that raises ends the job on every other rank, which names it and the cause.

Nobody sleeps: who must act later waits for a key in the store, and the default timeout of ten minutes makes a rank
that notices by anything but the failure itself overrun the test's.
"""

import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist
from torch import Tensor

import stretto as st
from stretto.errors import NonFinite
from stretto_lab.train.workers import host_store
from tests.errors.tiny import TinyJob
from tests.processes import rank_outcomes

SECONDS_TO_NOTICE = 60.0
"""A look into the store, the answers to an alarm, and room for a busy machine; the timeout is 600 s."""


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


def loss_function_of_the_last_rank_raises(rank: int, world_size: int, strategy: str) -> str:
    def loss_function(batch: Tensor) -> Tensor:
        # Of a type that elsewhere every rank finds by itself.
        raise NonFinite(f"{len(batch)} samples without a label")

    job = TinyJob(strategy)
    first = job.until_update()
    if rank == world_size - 1:
        job.parallel.micro_batch(loss_function, job.batch())
    return train_until_failure(job, first)


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


def keeper_of_the_store_raises(rank: int, world_size: int, strategy: str) -> str:
    move_store_to_rank_0(rank, world_size)
    job = TinyJob(strategy)
    with job.parallel:
        first = job.until_update()
        if rank == 0:
            raise ValueError("column 'text' is missing")
        return train_until_failure(job, first)


def only_rank_0_settles(rank: int, world_size: int) -> str:
    """A prediction is shown, so settling needs all ranks; the others go on training."""
    job = TinyJob("wp", options=st.Options(timeout_seconds=3.0))
    first = job.until_update()
    if rank == 0:
        try:
            with job.parallel.settled():
                return "settled"
        except st.StrettoError as error:
            return f"{type(error).__name__}: {error}"
    return train_until_failure(job, first)


MISSING = "ValueError: column 'text' is missing"


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(
    ("program", "world_size", "strategy", "who", "cause"),
    [
        (last_rank_raises, 2, "zero1", 1, MISSING),
        (last_rank_raises, 3, "acco", 2, MISSING),
        (loss_function_of_the_last_rank_raises, 2, "zero1", 1, "NonFinite: 2 samples without a label"),
        (keeper_of_the_store_raises, 3, "acco", 0, MISSING),
    ],
)
def test_a_rank_whose_loop_raises_tells_the_others_why(
    program: Callable[..., str], world_size: int, strategy: str, who: int, cause: str
) -> None:
    outcomes = rank_outcomes(world_size, program, world_size, strategy)
    assert cause in str(outcomes[who].error)
    for outcome in outcomes[:who] + outcomes[who + 1 :]:
        assert outcome.error is None, outcome.error
        told = f"PeerFailed: rank {outcome.rank}, after step", f"rank {who}, after step 1: {cause}"
        for words in (*told, "lanes left: []"):
            assert words in outcome.value
        assert outcome.finished - outcomes[who].finished < SECONDS_TO_NOTICE


def test_ranks_that_wait_for_different_things_are_told_what() -> None:
    for outcome in rank_outcomes(2, only_rank_0_settles, 2):
        assert outcome.error is None, outcome.error
        for part in ("PeerSilent: ", "every rank is there", "rank 0 for the gather of bucket 0", "settled()"):
            assert part in outcome.value
