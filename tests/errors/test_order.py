"""Calls in an order that would corrupt the run, or after its end, are refused; what is allowed stays allowed."""

import threading

import pytest
import torch
from torch import Tensor

import stretto as st
from stretto.errors import ConfigError, Finished, GradientsTouched, OutOfTurn
from tests.bits import unequal
from tests.errors.tiny import BOTH_KINDS, STRATEGIES, TinyJob, says

WHERE = "rank 0, after step 1"


def lane_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("stretto-lane")}


def settled(job: TinyJob) -> list[Tensor]:
    with job.parallel.settled():
        return [parameter.detach().clone() for parameter in job.model.parameters()]


@pytest.mark.parametrize(("strategy", "newest"), [("dpu", 2), ("wp", 2), ("acco", 1)])
def test_settling_while_a_round_is_in_flight_shows_the_newest_update_and_changes_nothing(
    strategy: str, newest: int
) -> None:
    """A round of ACCO in flight there is the first of two, and commits nothing."""
    looking, straight = TinyJob(strategy), TinyJob(strategy)
    looking.until_update()
    looking.loss()  # takes off
    before = [parameter.detach().clone() for parameter in looking.model.parameters()]
    seen = [settled(looking) for _ in range(2)]
    assert unequal(before, looking.model.parameters()) == []
    updates = {straight.until_update().step: settled(straight)}
    straight.loss()
    for job in (looking, straight):
        update = job.until_update()
    updates[update.step] = settled(straight)
    for values in seen:
        assert unequal(values, updates[newest]) == []
    looking.parallel.finish()
    straight.parallel.finish()
    assert unequal(looking.model.parameters(), straight.model.parameters()) == []


def test_settling_in_mid_flight_is_refused_under_a_clock() -> None:
    job = TinyJob("dpu", micro_batches=st.Clock(minimum=2, maximum=8))
    job.until_half_accumulated()
    with pytest.raises(OutOfTurn) as caught, job.parallel.settled():
        pass
    assert says(caught.value, WHERE, "under a Clock", "right after an Update was returned")


def test_training_inside_settled_is_out_of_turn() -> None:
    job = TinyJob("acco")
    job.until_update()
    with pytest.raises(OutOfTurn) as caught, job.parallel.settled():
        job.loss()
    assert says(caught.value, WHERE, "training inside settled()")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_settling_before_training_after_updates_and_after_finish_is_in_turn(strategy: str) -> None:
    job = TinyJob(strategy)
    for prepare in (lambda: None, job.until_update, job.until_update, job.parallel.finish):
        prepare()
        with job.parallel.settled():
            job.model.state_dict()


def test_a_gradient_that_misses_the_take_off_counts_with_its_own_round() -> None:
    through, past = TinyJob("acco"), TinyJob("acco")
    for job in (through, past):
        job.until_update()
    first, squash, last = past.model
    last(squash(first(past.batch()))).sum().backward()  # not through the model, so no take-off before it
    through.model(through.batch()).sum().backward()
    for job in (through, past):
        job.parallel.count_micro_batch()
        job.parallel.finish()
    assert unequal(through.model.parameters(), past.model.parameters()) == []


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("strategy", BOTH_KINDS)
def test_after_finish_and_after_an_error_every_use_is_refused_and_no_lane_stays(
    strategy: str, fails: bool
) -> None:
    before = lane_threads()
    job = TinyJob(strategy)
    job.until_half_accumulated()
    assert len(lane_threads() - before) == (strategy == "acco")
    if fails:
        job.model.zero_grad()
        with pytest.raises(GradientsTouched):
            job.micro_batch()
    else:
        job.parallel.finish()
        assert lane_threads() <= before
    uses = [
        lambda: job.parallel.backward(torch.ones((), requires_grad=True)),
        job.parallel.count_micro_batch,
        lambda: job.parallel.micro_batch(job.loss, job.batch()),
        lambda: next(job.parallel.feed([job.batch()])),
        job.parallel.finish,
    ]
    if fails:
        uses.append(job.parallel.settled().__enter__)
    for use in uses:
        with pytest.raises(Finished) as caught:
            use()
        why = "GradientsTouched" if fails else "finish() was called"
        assert says(caught.value, "rank 0, after step", why, "make a new DataParallel")
    for thread in lane_threads() - before:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_an_unknown_end_of_data_is_refused() -> None:
    job = TinyJob()
    with pytest.raises(ConfigError) as caught:
        next(job.parallel.feed([job.batch()], until="some"))
    assert says(caught.value, "until='some'", "'any' or 'all'")


@pytest.mark.parametrize("skipped", [4, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loop_may_skip_a_batch_also_the_last_and_feed_again_for_the_next_epoch(
    strategy: str, skipped: int
) -> None:
    job = TinyJob(strategy)
    data = [job.batch() for _ in range(9)]
    steps = []
    for _ in range(3):
        for number, batch in enumerate(job.parallel.feed(data)):
            if number != skipped:
                job.parallel.backward(job.loss(batch))
        steps.append(job.parallel.steps)
    job.parallel.finish()
    # 8 micro-batches an epoch, 2 per update; the last ones may still be in flight when an epoch ends.
    assert steps[0] >= 3
    assert steps[1] >= steps[0] + 4
    assert steps[2] >= steps[1] + 4
