"""Whoever changes gradients, parameters or the optimizer behind the engine's back is told at once, and where.

Each hand is tried in the middle of an accumulation and right after an update, on a synchronous and an overlapping
strategy: the very next micro-batch has to raise.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from stretto.errors import (
    EstimateShown,
    GradientsTouched,
    OptimizerStepped,
    ParametersTouched,
    StrettoError,
)
from tests.bits import unequal
from tests.errors.tiny import BOTH_KINDS, TinyJob, says, tiny_model

WHERE = "rank 0, after step 1"
MOMENTS = {"half accumulated": TinyJob.until_half_accumulated, "after an update": TinyJob.until_update}


def first_weight(job: TinyJob) -> nn.Parameter:
    weight: nn.Parameter = job.model.get_parameter("0.weight")
    return weight


def clip(job: TinyJob) -> None:
    nn.utils.clip_grad_norm_(job.model.parameters(), 1e-3)


def clip_without_effect(job: TinyJob) -> None:
    nn.utils.clip_grad_norm_(job.model.parameters(), 1e9)


def scale_one_gradient(job: TinyJob) -> None:
    first_weight(job).grad.mul_(0.5)


def fill_with_zeros(job: TinyJob) -> None:
    job.optimizer.zero_grad(set_to_none=False)


def drop_gradients(job: TinyJob) -> None:
    job.optimizer.zero_grad()


def assign_gradient(job: TinyJob) -> None:
    first_weight(job).grad = torch.ones(3, 4)


def rebind_data(job: TinyJob) -> None:
    first_weight(job).data = torch.ones(3, 4)


def convert(job: TinyJob) -> None:
    job.model.to(torch.bfloat16)


def write_one(job: TinyJob) -> None:
    with torch.no_grad():
        first_weight(job).add_(1.0)


def load_weights(job: TinyJob) -> None:
    job.model.load_state_dict(tiny_model().state_dict())


def replace_parameter(job: TinyJob) -> None:
    job.model[0].weight = nn.Parameter(torch.ones(3, 4))


def remove_layer(job: TinyJob) -> None:
    job.model[2] = nn.Identity()


def add_layer(job: TinyJob) -> None:
    job.model.append(nn.Linear(1, 1))


def add_group(job: TinyJob) -> None:
    job.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def remove_from_group(job: TinyJob) -> None:
    job.optimizer.param_groups[0]["params"].pop()


def split_group(job: TinyJob) -> None:
    parameters = job.optimizer.param_groups[0]["params"]
    job.optimizer.add_param_group({"params": [parameters.pop()], "lr": 0.0})


IN_PLACE = (clip, clip_without_effect, scale_one_gradient, fill_with_zeros)
REBOUND = (rebind_data, convert)
WRITTEN = (write_one, load_weights)


@pytest.mark.parametrize("strategy", BOTH_KINDS)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    ("hand", "kind", "parts"),
    [
        *((hand, GradientsTouched, ("changed outside backward", "clip_norm")) for hand in IN_PLACE),
        (drop_gradients, GradientsTouched, ("the gradient of '2.bias' was replaced", "zero_grad")),
        (
            assign_gradient,
            GradientsTouched,
            ("the gradient of '0.weight' was replaced", "do not assign .grad"),
        ),
        *((hand, ParametersTouched, ("storage of parameter", "before wrapping")) for hand in REBOUND),
        *((hand, ParametersTouched, ("was written between updates", "before wrapping")) for hand in WRITTEN),
    ],
)
def test_a_change_behind_the_engines_back_is_told_at_the_next_micro_batch(
    hand: Callable[[TinyJob], None],
    kind: type[StrettoError],
    parts: tuple[str, ...],
    moment: str,
    strategy: str,
) -> None:
    job = TinyJob(strategy)
    MOMENTS[moment](job)
    hand(job)
    with pytest.raises(kind) as caught:
        job.micro_batch()
    assert says(caught.value, WHERE, *parts)


@pytest.mark.parametrize("strategy", BOTH_KINDS)
@pytest.mark.parametrize(
    ("hand", "parts"),
    [
        (replace_parameter, ("1 trainable parameters that it did not have",)),
        (add_layer, ("2 trainable parameters that it did not have",)),
        (remove_layer, ("'2.bias' was removed", "new DataParallel")),
        (add_group, ("hold [4, 1] parameters, [4] when it was wrapped", "before wrapping")),
        (remove_from_group, ("hold [3] parameters, [4] when it was wrapped", "requires_grad_(False)")),
        (split_group, ("hold [3, 1] parameters, [4] when it was wrapped", "before wrapping")),
    ],
)
def test_a_model_or_optimizer_of_another_build_is_told_before_its_round_takes_off(
    hand: Callable[[TinyJob], None], parts: tuple[str, ...], strategy: str
) -> None:
    job = TinyJob(strategy)
    job.until_half_accumulated()
    hand(job)
    with pytest.raises(ParametersTouched) as caught:
        job.until_update()
    assert says(caught.value, WHERE, *parts)


@pytest.mark.parametrize("hand", [clip, drop_gradients, write_one])
@pytest.mark.parametrize("strategy", BOTH_KINDS)
def test_finish_hands_over_nothing_that_was_touched(strategy: str, hand: Callable[[TinyJob], None]) -> None:
    job = TinyJob(strategy)
    job.until_half_accumulated()
    hand(job)
    with pytest.raises((GradientsTouched, ParametersTouched)) as caught:
        job.parallel.finish()
    assert says(caught.value, WHERE)


@pytest.mark.parametrize("strategy", BOTH_KINDS)
def test_what_an_own_backward_has_left_is_counted_as_it_is(strategy: str) -> None:
    clipped, weighed = TinyJob(strategy), TinyJob(strategy)
    for job in (clipped, weighed):
        job.until_update()
    clipped.loss().backward()
    for parameter in clipped.model.parameters():
        parameter.grad.mul_(0.5)
    clipped.parallel.count_micro_batch()
    (weighed.loss() * 0.5).backward()
    weighed.parallel.count_micro_batch()
    for job in (clipped, weighed):
        job.micro_batch()
        job.parallel.finish()
    # A half is a power of two: every gradient is halved exactly, before the sum as after it.
    assert unequal(clipped.model.parameters(), weighed.model.parameters()) == []


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("strategy", BOTH_KINDS)
def test_an_own_backward_with_create_graph_counts_like_any_other(strategy: str) -> None:
    jobs = [TinyJob(strategy), TinyJob(strategy)]
    for create_graph, job in enumerate(jobs):
        job.until_update()
        job.loss().backward(create_graph=bool(create_graph))
        job.parallel.count_micro_batch()
        job.micro_batch()
        job.parallel.finish()
        job.model.zero_grad()  # breaks the cycle of references
    assert unequal(jobs[0].model.parameters(), jobs[1].model.parameters()) == []


@pytest.mark.parametrize("strategy", BOTH_KINDS)
def test_gradients_of_another_backward_are_told_and_can_be_dropped(strategy: str) -> None:
    struck, clean, refused = (TinyJob(strategy) for _ in range(3))
    for job in (struck, clean, refused):
        job.until_half_accumulated()
    for job in (struck, refused):
        job.model(torch.ones(2, 4)).sum().backward()  # a look at the gradients, between two micro-batches
    with pytest.raises(GradientsTouched) as caught:
        refused.micro_batch()
    assert says(caught.value, WHERE, "not this job's", "parallel.discard()", "parallel.count_micro_batch()")
    struck.parallel.discard()
    for job in (struck, clean):
        job.until_update()
        job.parallel.finish()
    assert unequal(struck.model.parameters(), clean.model.parameters()) == []


def test_a_loop_that_never_counts_is_told_at_the_end() -> None:
    job = TinyJob("zero1")
    job.loss().backward()
    with pytest.raises(GradientsTouched) as caught:
        job.parallel.finish()
    assert says(caught.value, "rank 0, after step 0", "not this job's")


def test_what_another_backward_leaves_behind_the_last_micro_batch_does_no_harm() -> None:
    job = TinyJob("zero1")
    job.until_update()
    job.loss().backward()
    job.parallel.finish()
    assert job.parallel.steps == 1


def step_by_hand(job: TinyJob) -> None:
    job.optimizer.step()


def step_by_scaler(job: TinyJob) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(job.optimizer)


def unscale_and_step_by_scaler(job: TinyJob) -> None:
    # That `unscale_` writes gradients leaves no trace that could be seen; the step that follows does.
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(job.optimizer)
    scaler.step(job.optimizer)


@pytest.mark.parametrize("hand", [step_by_hand, step_by_scaler, unscale_and_step_by_scaler])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("strategy", BOTH_KINDS)
def test_stepping_the_optimizer_raises_before_anything_moves(
    strategy: str, moment: str, hand: Callable[[TinyJob], None]
) -> None:
    job = TinyJob(strategy)
    MOMENTS[moment](job)
    before = [parameter.detach().clone() for parameter in job.model.parameters()]
    with pytest.raises(OptimizerStepped) as caught:
        hand(job)
    assert says(caught.value, WHERE, "by hand (or by a GradScaler)", "remove the call")
    assert unequal(before, job.model.parameters()) == []


def test_the_optimizer_is_the_users_again_after_finish() -> None:
    job = TinyJob()
    job.until_update()
    job.parallel.finish()
    job.loss().backward()
    clip(job)
    job.optimizer.step()


@pytest.mark.parametrize("strategy", ["wp", "acco"])
def test_an_estimate_is_not_given_out_as_the_models_state(strategy: str) -> None:
    job = TinyJob(strategy)
    job.until_update()
    while job.parallel.job.model.shown != "estimate":
        job.micro_batch()
    with pytest.raises(EstimateShown) as caught:
        job.model.state_dict()
    assert says(caught.value, "rank 0, after step", "parallel.settled()", "finish()")


def test_a_prediction_is_given_out_neither_but_the_committed_parameters_are() -> None:
    job = TinyJob("wp")
    job.until_update()
    with job.parallel.settled():
        inside = {name: value.clone() for name, value in job.model.state_dict().items()}
    with pytest.raises(EstimateShown):
        job.model.state_dict()
    job.parallel.finish()
    assert inside.keys() == job.model.state_dict().keys()
