"""Gradients from anywhere count as in a plain loop, to the bit, and evaluation in between changes nothing."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import stretto
from stretto.errors import GradientsTouched, ParametersTouched, UsageError
from stretto.strategies import Strategy
from tests.bits import unequal
from tests.loops.habits import (
    BOTH_KINDS,
    Loss,
    batches,
    job,
    mean_square,
    network,
    ours,
    plain,
    same,
    sgd,
)

both_kinds = pytest.mark.parametrize("strategy", BOTH_KINDS, ids=lambda strategy: strategy.name)


def penalty_on_inputs(model: nn.Module, batch: Tensor) -> Tensor:
    inputs = batch.clone().requires_grad_()
    output = model(inputs)
    (gradient,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    return output.square().mean() + (gradient.norm(dim=1) - 1).square().mean()


def penalty_on_parameters(model: nn.Module, batch: Tensor) -> Tensor:
    loss = mean_square(model, batch)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(gradient.square().sum() for gradient in gradients)


def inner_loop(model: nn.Module, batch: Tensor) -> Tensor:
    slow = dict(model.named_parameters())
    loss = functional_call(model, slow, (batch,)).square().mean()
    gradients = torch.autograd.grad(loss, list(slow.values()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(slow.items(), gradients, strict=True)}
    return functional_call(model, fast, (batch + 1,)).square().mean()


@both_kinds
@pytest.mark.parametrize("loss", [penalty_on_inputs, penalty_on_parameters, inner_loop])
def test_gradients_of_gradients_equal_the_plain_loop(loss: Loss, strategy: Strategy) -> None:
    model = ours(network(), loss, strategy=strategy)
    if strategy == BOTH_KINDS[0]:
        assert same(model, plain(network(), loss))


def by_backward(model: nn.Module, batch: Tensor) -> None:
    mean_square(model, batch).backward()


def by_autograd_grad(model: nn.Module, batch: Tensor) -> None:
    parameters = list(model.parameters())
    for parameter, gradient in zip(
        parameters, torch.autograd.grad(mean_square(model, batch), parameters), strict=True
    ):
        parameter.grad = gradient


@both_kinds
@pytest.mark.parametrize("bring", [by_backward, by_autograd_grad])
def test_gradients_from_anywhere_count_as_a_micro_batch(bring: object, strategy: Strategy) -> None:
    model = network()
    parallel = job(model, strategy)
    for batch in parallel.feed(batches()):
        bring(model, batch)
        parallel.count_micro_batch()
    parallel.finish()
    assert parallel.steps == 4
    assert same(model, ours(network(), strategy=strategy))


def in_two_passes(model: nn.Module, batch: Tensor) -> None:
    output = model(batch)
    output.square().mean().backward(retain_graph=True)
    output.abs().mean().backward()


def clipped(model: nn.Module, batch: Tensor) -> None:
    mean_square(model, batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


@pytest.mark.parametrize("bring", [in_two_passes, clipped])
def test_what_is_done_to_gradients_before_counting_is_done_to_the_micro_batch(bring: object) -> None:
    model, twin = network(), network()
    parallel, optimizer = job(model, micro_batches=1), sgd(twin)
    for batch in parallel.feed(batches()):
        bring(model, batch)
        bring(twin, batch)
        parallel.count_micro_batch()
        optimizer.step()
        optimizer.zero_grad()
    parallel.finish()
    assert same(model, twin)


def test_freezing_in_mid_run_equals_the_plain_loop() -> None:
    draws = torch.Generator().manual_seed(0)
    for _ in range(8):
        frozen = torch.rand(4, generator=draws).lt(0.5).tolist()
        frozen[0] = False  # what the first update does not use must be told with allow_unused
        trained = []
        for loop in (ours, plain):
            model = network()
            part, plan = model[0], iter(frozen)

            def freeze(index: int, part: nn.Module = part, plan: Iterator[bool] = plan) -> None:
                if index % 2 == 0:
                    part.requires_grad_(not next(plan))

            trained.append(loop(model, before_batch=freeze))
        assert same(*trained), frozen


def test_unfreezing_what_was_frozen_at_the_start_is_refused() -> None:
    model = network()
    model[0].requires_grad_(False)
    with pytest.raises(ParametersTouched, match="then freeze the parameters that train later"):
        ours(model, before_batch=lambda index: model[0].requires_grad_(index >= 4))


def test_a_model_that_is_frozen_whole_is_told() -> None:
    model = network()
    with pytest.raises(UsageError, match="depends on no parameter that requires a gradient"):
        ours(model, before_batch=lambda index: model.requires_grad_(index < 4))


def nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Linear(4, 4), nn.Linear(4, 1)


def critic_loss(generator: nn.Module, critic: nn.Module, batch: Tensor) -> Tensor:
    return critic(batch).mean() - critic(generator(batch).detach()).square().mean()


def generator_loss(generator: nn.Module, critic: nn.Module, batch: Tensor) -> Tensor:
    return critic(generator(batch)).square().mean()


def adversaries(keeps_apart: str, **arguments: object) -> nn.ModuleList:
    """Train a generator and its critic with a job each."""
    generator, critic = nets()
    first, second = job(generator, **arguments), job(critic, **arguments)
    for batch in first.feed(batches()):
        second.backward(critic_loss(generator, critic, batch))
        critic.requires_grad_(keeps_apart != "freeze")
        first.backward(generator_loss(generator, critic, batch))
        critic.requires_grad_(True)
        if keeps_apart == "discard":
            second.discard()
    first.finish()
    second.finish()
    return nn.ModuleList([generator, critic])


@pytest.mark.parametrize("keeps_apart", ["discard", "freeze"])
def test_a_generator_and_its_critic_train_as_in_a_plain_loop(keeps_apart: str) -> None:
    generator, critic = nets()
    optimizers = sgd(generator), sgd(critic)
    for batch in batches():
        for loss, optimizer in ((critic_loss, optimizers[1]), (generator_loss, optimizers[0])):
            optimizer.zero_grad()
            loss(generator, critic, batch).backward()
            optimizer.step()
    assert same(adversaries(keeps_apart, micro_batches=1), nn.ModuleList([generator, critic]))


def test_both_ways_to_keep_gradients_apart_are_the_same_where_rounds_overlap() -> None:
    assert same(adversaries("discard", strategy=BOTH_KINDS[1]), adversaries("freeze", strategy=BOTH_KINDS[1]))


def test_a_generator_whose_gradients_reach_the_critic_is_told() -> None:
    with pytest.raises(GradientsTouched, match=r"another job .*parallel\.discard\(\)"):
        adversaries("nothing")


@both_kinds
def test_hooks_of_the_user_run_as_in_a_plain_loop(strategy: Strategy) -> None:
    def hooked() -> tuple[nn.Module, list[str], list[Tensor]]:
        model, calls, gradients = network(), [], []
        model[2].register_forward_hook(lambda *_: calls.append("forward"))
        model[2].register_full_backward_hook(lambda *_: calls.append("backward"))
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: 2 * gradient)
            parameter.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
            parameter.register_post_accumulate_grad_hook(lambda one: gradients.append(one.grad.clone()))
        return model, calls, gradients

    (model, calls, gradients), (expected, expected_calls, expected_gradients) = hooked(), hooked()
    ours(model, strategy=strategy)
    plain(expected)
    assert calls == expected_calls
    if strategy == BOTH_KINDS[0]:
        assert same(model, expected)
        # Of a round, what is accumulated; the plain loop has divided it by 2.
        assert unequal(gradients, [2 * gradient for gradient in expected_gradients]) == []


def test_a_hook_that_frees_or_steps_each_gradient_is_told() -> None:
    model = network()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with pytest.raises(GradientsTouched, match="was replaced"):
        ours(model)


def test_losses_kept_over_an_update_raise_where_a_plain_loop_does_and_say_what_to_do() -> None:
    model = network()
    parallel = stretto.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = [mean_square(model, batch) for batch in batches()[:2]]
    parallel.backward(losses[0])
    with pytest.raises(
        UsageError, match=r"expected a forward pass and then its backward pass.*inplace operation"
    ):
        parallel.backward(losses[1])
