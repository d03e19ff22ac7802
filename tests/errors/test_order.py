"""Calls in an order that would corrupt the run, or after its end, are refused; what is allowed stays allowed."""

import threading

import pytest
import torch
from torch import Tensor, nn

import stretto as st
from stretto.errors import ConfigError, Finished, GradientsTouched, OutOfTurn
from tests.bits import unequal
from tests.errors.tiny import BOTH_KINDS, STRATEGIES, TinyJob, says

WHERE = "rank 0, after step 1"


def lane_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("stretto-lane")}


def test_a_round_is_not_closed_while_another_one_is_in_flight() -> None:
    job = TinyJob("acco")
    job.until_in_flight()
    with pytest.raises(OutOfTurn) as caught:
        job.parallel.job.compute.close_round()
    assert says(caught.value, WHERE, "a round is to be ready while one is in flight")


@pytest.mark.parametrize("strategy", BOTH_KINDS)
def test_a_landing_without_take_off_is_out_of_turn(strategy: str) -> None:
    job = TinyJob(strategy)
    job.until_update()
    with pytest.raises(OutOfTurn) as caught:
        job.parallel.job.compute._land()
    assert says(caught.value, WHERE, "landing without take-off")


@pytest.mark.parametrize("strategy", ["dpu", "wp", "acco"])
def test_settling_while_a_round_is_in_flight_shows_the_newest_update_and_changes_nothing(
    strategy: str,
) -> None:
    looking, straight = TinyJob(strategy), TinyJob(strategy)
    for job in (looking, straight):
        job.until_in_flight()
    for _ in range(2):
        before = [parameter.detach().clone() for parameter in looking.model.parameters()]
        with looking.parallel.settled():
            looking.model.state_dict()
            masters = looking.parallel.job.sharded.masters
            assert torch.equal(looking.model[0].weight.flatten(), newest(looking, masters))
        assert unequal(before, looking.model.parameters()) == []
    for job in (looking, straight):
        job.until_update()
        job.parallel.finish()
    assert unequal(looking.model.parameters(), straight.model.parameters()) == []


def newest(job: TinyJob, masters: list[Tensor]) -> Tensor:
    """The masters of the first layer's weight, on a rank that owns everything."""
    slot = next(slot for slot in job.parallel.job.layout.slots if slot.name == "0.weight")
    return masters[0][slot.start : slot.stop]


def test_settling_in_mid_flight_is_refused_under_a_clock() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = st.DataParallel(model, optimizer, st.DPU(), micro_batches=st.Clock(minimum=2, maximum=8))
    while parallel.backward(model(torch.ones(2, 4)).sum()) is None:
        pass
    parallel.backward(model(torch.ones(2, 4)).sum())
    with pytest.raises(OutOfTurn) as caught, parallel.settled():
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


@pytest.mark.parametrize("strategy", BOTH_KINDS)
def test_after_finish_every_use_is_refused_and_the_lane_is_joined(strategy: str) -> None:
    before = lane_threads()
    job = TinyJob(strategy)
    job.until_half_accumulated()
    assert len(lane_threads() - before) == (strategy == "acco")
    job.parallel.finish()
    assert lane_threads() <= before
    loss = job.loss()
    uses = {
        "backward": lambda: job.parallel.backward(loss),
        "step": lambda: job.parallel.count_micro_batch(),
        "micro_batch": lambda: job.parallel.micro_batch(lambda batch: job.model(batch).sum(), job.batch()),
        "feed": lambda: next(job.parallel.feed([job.batch()])),
        "finish": lambda: job.parallel.finish(),
    }
    for name, use in uses.items():
        with pytest.raises(Finished) as caught:
            use()
        assert says(caught.value, "rank 0, after step", "finish() was called", "make a new DataParallel"), (
            name
        )


@pytest.mark.parametrize("strategy", BOTH_KINDS)
def test_after_an_error_every_use_is_refused_and_names_it(strategy: str) -> None:
    before = lane_threads()
    job = TinyJob(strategy)
    job.until_half_accumulated()
    job.model.zero_grad()
    with pytest.raises(GradientsTouched):
        job.micro_batch()
    loss = job.loss()
    for use in (
        lambda: job.parallel.backward(loss),
        lambda: job.parallel.count_micro_batch(),
        lambda: next(job.parallel.feed([job.batch()])),
        lambda: job.parallel.settled().__enter__(),
        lambda: job.parallel.finish(),
    ):
        with pytest.raises(Finished) as caught:
            use()
        assert says(caught.value, WHERE, "GradientsTouched", "make a new DataParallel")
    for thread in lane_threads() - before:
        thread.join(timeout=10)
        assert not thread.is_alive()


@pytest.mark.parametrize("strategy", BOTH_KINDS)
def test_after_an_error_the_model_can_be_wrapped_again(strategy: str) -> None:
    job = TinyJob(strategy)
    job.until_half_accumulated()
    job.model.zero_grad()
    with pytest.raises(GradientsTouched):
        job.micro_batch()
    again = TinyJob(strategy, model=job.model)
    assert again.until_update().step == 1
    again.parallel.finish()


def test_an_empty_loader_is_refused() -> None:
    job = TinyJob()
    with pytest.raises(ConfigError) as caught:
        next(job.parallel.feed([]))
    assert says(caught.value, "rank 0, after step 0", "no batch", "at least one per rank")


def test_an_unknown_end_of_data_is_refused() -> None:
    job = TinyJob()
    with pytest.raises(ConfigError) as caught:
        next(job.parallel.feed([job.batch()], until="some"))
    assert says(caught.value, "until='some'", "'any' or 'all'")


def test_a_loop_that_skips_its_last_batch_ends_with_the_data() -> None:
    job = TinyJob()
    for number, batch in enumerate(job.parallel.feed([job.batch() for _ in range(3)])):
        if number < 2:
            job.parallel.backward(job.model(batch).sum())
    job.parallel.finish()
    assert job.parallel.steps == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loop_may_skip_batches_before_the_end_and_feed_again_for_the_next_epoch(strategy: str) -> None:
    job = TinyJob(strategy)
    data = [job.batch() for _ in range(9)]
    steps = []
    for _ in range(3):
        for number, batch in enumerate(job.parallel.feed(data)):
            if number != 4:
                job.parallel.backward(job.model(batch).square().mean())
        steps.append(job.parallel.steps)
    job.parallel.finish()
    # 8 micro-batches an epoch, 2 per update; the last ones may still be in flight when an epoch ends.
    assert steps[0] >= 3
    assert steps[1] >= steps[0] + 4
    assert steps[2] >= steps[1] + 4


class Sometimes(nn.Module):
    """Uses one of its two parameters only where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 1, bias=False)
        self.never = nn.Linear(4, 1, bias=False)

    def forward(self, batch: Tensor) -> Tensor:
        """Leave `never` out."""
        output: Tensor = self.always(batch)
        return output


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_parameter_that_is_never_used_is_named_at_the_first_update(strategy: str) -> None:
    job = TinyJob(strategy, model=Sometimes())
    with pytest.raises(st.errors.UnusedParameters) as caught:
        job.until_update()
    assert says(
        caught.value, WHERE, "1 parameters", "'never.weight'", "on any rank", "Options(allow_unused=True)"
    )
