"""Whoever changes gradients, parameters or the optimizer behind the engine's back is told at once, and where.

Each hand is tried in the middle of an accumulation and right after an update, on a synchronous and an overlapping
strategy: the very next micro-batch has to raise.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stretto.errors import GradientsTouched, OptimizerStepped, ParametersTouched, StrettoError
from tests.bits import unequal
from tests.errors.tiny import BOTH_KINDS, TinyJob, says, tiny_model

WHERE = "rank 0, after step 1"
MOMENTS = {"half accumulated": TinyJob.until_half_accumulated, "after an update": TinyJob.until_update}
Hand = Callable[[TinyJob], Any]

both_kinds = pytest.mark.parametrize("strategy", BOTH_KINDS)
both_moments = pytest.mark.parametrize("moment", MOMENTS)


def first_weight(job: TinyJob) -> nn.Parameter:
    weight: nn.Parameter = job.model.get_parameter("0.weight")
    return weight


def clip(job: TinyJob, most: float = 1e-3) -> None:
    nn.utils.clip_grad_norm_(job.model.parameters(), most)


CHANGED = GradientsTouched, ("changed outside backward", "clip_norm")
REBOUND = ParametersTouched, ("storage of parameter", "before wrapping")
WRITTEN = ParametersTouched, ("was written between updates", "before wrapping")
HANDS: dict[str, tuple[Hand, type[StrettoError], tuple[str, ...]]] = {
    "gradients are clipped": (clip, *CHANGED),
    "gradients are clipped without effect": (lambda job: clip(job, 1e9), *CHANGED),
    "one gradient is scaled": (lambda job: first_weight(job).grad.mul_(0.5), *CHANGED),
    "gradients are filled with zeros": (lambda job: job.optimizer.zero_grad(set_to_none=False), *CHANGED),
    "gradients are dropped": (
        lambda job: job.optimizer.zero_grad(),
        GradientsTouched,
        ("the gradient of '2.bias' was replaced", "zero_grad"),
    ),
    "a gradient is assigned": (
        lambda job: setattr(first_weight(job), "grad", torch.ones(3, 4)),
        GradientsTouched,
        ("the gradient of '0.weight' was replaced", "assign .grad only"),
    ),
    "data is rebound": (lambda job: setattr(first_weight(job), "data", torch.ones(3, 4)), *REBOUND),
    "the model is converted": (lambda job: job.model.to(torch.bfloat16), *REBOUND),
    "a parameter is written": (torch.no_grad()(lambda job: first_weight(job).add_(1.0)), *WRITTEN),
    "weights are loaded": (lambda job: job.model.load_state_dict(tiny_model().state_dict()), *WRITTEN),
}


@both_kinds
@both_moments
@pytest.mark.parametrize("name", HANDS)
def test_a_change_behind_the_engines_back_is_told_at_the_next_micro_batch(
    name: str, moment: str, strategy: str
) -> None:
    hand, kind, words = HANDS[name]
    job = TinyJob(strategy)
    MOMENTS[moment](job)
    hand(job)
    with pytest.raises(kind) as caught:
        job.micro_batch()
    assert says(caught.value, WHERE, *words)


def split_group(job: TinyJob) -> None:
    parameters = job.optimizer.param_groups[0]["params"]
    job.optimizer.add_param_group({"params": [parameters.pop()], "lr": 0.0})


BUILDS: dict[str, tuple[Hand, tuple[str, ...]]] = {
    "a parameter is replaced": (
        lambda job: setattr(job.model[0], "weight", nn.Parameter(torch.ones(3, 4))),
        ("1 trainable parameters that it did not have",),
    ),
    "a layer is added": (
        lambda job: job.model.append(nn.Linear(1, 1)),
        ("2 trainable parameters that it did not have",),
    ),
    "a layer is removed": (
        lambda job: job.model.__setitem__(2, nn.Identity()),
        ("'2.bias' was removed", "new DataParallel"),
    ),
    "a group is added": (
        lambda job: job.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        ("hold [4, 1] parameters, [4] when it was wrapped", "before wrapping"),
    ),
    "a parameter is removed from its group": (
        lambda job: job.optimizer.param_groups[0]["params"].pop(),
        ("hold [3] parameters, [4] when it was wrapped", "requires_grad_(False)"),
    ),
    "a group is split": (
        split_group,
        ("hold [3, 1] parameters, [4] when it was wrapped", "before wrapping"),
    ),
}


@both_kinds
@pytest.mark.parametrize("name", BUILDS)
def test_a_model_or_optimizer_of_another_build_is_told_before_its_round_takes_off(
    name: str, strategy: str
) -> None:
    hand, words = BUILDS[name]
    job = TinyJob(strategy)
    job.until_half_accumulated()
    hand(job)
    with pytest.raises(ParametersTouched) as caught:
        job.until_update()
    assert says(caught.value, WHERE, *words)


@both_kinds
@pytest.mark.parametrize("name", ["gradients are clipped", "gradients are dropped", "a parameter is written"])
def test_finish_hands_over_nothing_that_was_touched(strategy: str, name: str) -> None:
    job = TinyJob(strategy)
    job.until_half_accumulated()
    HANDS[name][0](job)
    with pytest.raises((GradientsTouched, ParametersTouched)) as caught:
        job.parallel.finish()
    assert says(caught.value, WHERE)


def halved(job: TinyJob) -> None:
    job.loss().backward()
    for parameter in job.model.parameters():
        parameter.grad.mul_(0.5)


# A half is a power of two: every gradient is halved exactly, before the sum as after it.
EQUAL: dict[str, tuple[Hand, Hand]] = {
    "gradients that are halved": (halved, lambda job: (job.loss() * 0.5).backward()),
    "with create_graph": (
        lambda job: job.loss().backward(create_graph=True),
        lambda job: job.loss().backward(),
    ),
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@both_kinds
@pytest.mark.parametrize("name", EQUAL)
def test_what_an_own_backward_has_left_is_counted_as_it_is(strategy: str, name: str) -> None:
    jobs = TinyJob(strategy), TinyJob(strategy)
    for job, bring in zip(jobs, EQUAL[name], strict=True):
        job.until_update()
        bring(job)
        job.parallel.count_micro_batch()
        job.micro_batch()
        job.parallel.finish()
        job.model.zero_grad()  # breaks the cycle of references
    assert unequal(jobs[0].model.parameters(), jobs[1].model.parameters()) == []


@both_kinds
def test_gradients_of_another_backward_are_told_and_can_be_dropped(strategy: str) -> None:
    struck, clean, refused = (TinyJob(strategy) for _ in range(3))
    for job in (struck, clean, refused):
        job.until_half_accumulated()
    for job in (struck, refused):
        job.model(torch.ones(2, 4)).sum().backward()  # a look at the gradients, between two micro-batches
    with pytest.raises(GradientsTouched) as caught:
        refused.micro_batch()
    assert says(
        caught.value,
        WHERE,
        "of another job or of loss.backward()",
        "parallel.discard()",
        "parallel.count_micro_batch()",
    )
    struck.parallel.discard()
    for job in (struck, clean):
        job.until_update()
        job.parallel.finish()
    assert unequal(struck.model.parameters(), clean.model.parameters()) == []


def test_a_loop_that_never_counts_is_told_at_the_end_unless_updates_are_behind_it() -> None:
    job = TinyJob("zero1")
    job.loss().backward()
    with pytest.raises(GradientsTouched) as caught:
        job.parallel.finish()
    assert says(caught.value, "rank 0, after step 0", "of another job or of loss.backward()")
    job = TinyJob("zero1")
    job.until_update()
    job.loss().backward()
    job.parallel.finish()
    assert job.parallel.steps == 1


def by_scaler(job: TinyJob, *, unscales: bool = False) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    if unscales:  # that this writes gradients leaves no trace that could be seen; the step that follows does
        scaler.unscale_(job.optimizer)
    scaler.step(job.optimizer)


STEPS: dict[str, Hand] = {
    "by hand": lambda job: job.optimizer.step(),
    "by a scaler": by_scaler,
    "by a scaler that has unscaled": lambda job: by_scaler(job, unscales=True),
    "by a scaler that scales nothing": lambda job: torch.amp.GradScaler("cpu", enabled=False).step(
        job.optimizer
    ),
}


@both_kinds
@both_moments
@pytest.mark.parametrize("name", STEPS)
def test_stepping_the_optimizer_raises_before_anything_moves(strategy: str, moment: str, name: str) -> None:
    job = TinyJob(strategy)
    MOMENTS[moment](job)
    before = [parameter.detach().clone() for parameter in job.model.parameters()]
    with pytest.raises(OptimizerStepped) as caught:
        STEPS[name](job)
    assert says(caught.value, WHERE, "by hand (or by a GradScaler)", "remove the call", "bfloat16 needs none")
    assert unequal(before, job.model.parameters()) == []


@pytest.mark.parametrize("strategy", ["acco", "wp"])
def test_model_and_optimizer_are_the_users_again_after_finish(strategy: str) -> None:
    job = TinyJob(strategy)
    job.until_update()
    job.parallel.finish()
    assert [parameter for parameter in job.model.parameters() if parameter.grad is not None] == []
    job.model.state_dict()
    job.loss().backward()
    clip(job)
    job.optimizer.step()
