"""Gradients from anywhere count as in a plain loop, to the bit, and evaluation in between changes nothing."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

import stretto
from stretto.errors import GradientsTouched, OptimizerStepped, ParametersTouched, UsageError
from stretto.strategies import Strategy
from tests.bits import unequal
from tests.loops.habits import (
    BOTH_KINDS,
    ESTIMATING,
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


def by_functional_grad(model: nn.Module, batch: Tensor) -> None:
    gradients = grad(lambda values: functional_call(model, values, (batch,)).square().mean())(
        {name: parameter.detach() for name, parameter in model.named_parameters()}
    )
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]


def by_a_model_apart(model: nn.Module, batch: Tensor) -> None:
    """The last step of first-order MAML, where the gradient is that of a model which trained on from here."""
    twin = network()
    with torch.no_grad():
        for one, other in zip(twin.parameters(), model.parameters(), strict=True):
            one.copy_(other)
    mean_square(twin, batch).backward()
    for one, other in zip(twin.parameters(), model.parameters(), strict=True):
        other.grad = one.grad


@both_kinds
@pytest.mark.parametrize("bring", [by_backward, by_autograd_grad, by_functional_grad, by_a_model_apart])
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


@both_kinds
def test_evaluation_in_mid_accumulation_changes_nothing(strategy: Strategy) -> None:
    def look(model: nn.Module, batch: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad():
            model(batch)
        with torch.inference_mode():
            model(batch)
        return mean_square(model.train(), batch)

    assert same(ours(network(), look, strategy=strategy), ours(network(), strategy=strategy))


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
    with pytest.raises(ParametersTouched, match="freeze after that what is to train later"):
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
    with pytest.raises(GradientsTouched, match=r"another job's.*parallel\.discard\(\)"):
        adversaries("nothing")


class Clipped(torch.optim.SGD):
    """Clips weights element by element after each step, as a Wasserstein GAN's critic has it."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.2, 0.2)


def test_weights_are_clipped_by_the_optimizer() -> None:
    def clipping(model: nn.Module) -> torch.optim.Optimizer:
        return Clipped(model.parameters(), lr=0.1)

    model = ours(network(), make_optimizer=clipping)
    assert same(model, plain(network(), optimizer=clipping))
    assert [
        parameter
        for parameter in model.parameters()
        if not torch.equal(parameter, parameter.clamp(-0.2, 0.2))
    ] == []


@both_kinds
def test_hooks_of_the_user_run_as_in_a_plain_loop(strategy: Strategy) -> None:
    def hooked() -> tuple[nn.Module, list[str]]:
        model, calls = network(), []
        model[2].register_forward_hook(lambda *_: calls.append("forward"))
        model[2].register_full_backward_hook(lambda *_: calls.append("backward"))
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: 2 * gradient)
            parameter.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
        return model, calls

    (model, calls), (expected, expected_calls) = hooked(), hooked()
    ours(model, strategy=strategy)
    plain(expected)
    assert calls == expected_calls
    if strategy == BOTH_KINDS[0]:
        assert same(model, expected)


def test_a_hook_that_frees_or_steps_each_gradient_is_told() -> None:
    model = network()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with pytest.raises(GradientsTouched, match="was replaced"):
        ours(model)


@pytest.mark.parametrize("strategy", ESTIMATING, ids=lambda strategy: strategy.name)
def test_a_moving_average_of_committed_parameters_is_taken_inside_settled(strategy: Strategy) -> None:
    model = network()
    average = copy.deepcopy(model).requires_grad_(False)
    committed, parallel = [], job(model, strategy)
    for batch in parallel.feed(batches()):
        if parallel.backward(mean_square(model, batch)):
            with parallel.settled(), torch.no_grad():
                committed.append([parameter.clone() for parameter in model.parameters()])
                for one, other in zip(average.parameters(), model.parameters(), strict=True):
                    one.lerp_(other, 0.5)
    parallel.finish()
    expected = [parameter.detach().clone() for parameter in network().parameters()]
    for values in committed:
        expected = [one.lerp(other, 0.5) for one, other in zip(expected, values, strict=True)]
    assert unequal(expected, average.parameters()) == []


def test_the_step_of_a_gradient_scaler_that_scales_nothing_is_told() -> None:
    model = network()
    parallel = job(model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    parallel.backward(scaler.scale(mean_square(model, batches()[0])))
    with pytest.raises(OptimizerStepped, match="bfloat16 needs none"):
        scaler.step(parallel.optimizer)


def test_losses_kept_over_an_update_raise_where_a_plain_loop_does_and_say_what_to_do() -> None:
    model = network()
    parallel = stretto.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = [mean_square(model, batch) for batch in batches()[:2]]
    parallel.backward(losses[0])
    with pytest.raises(
        UsageError, match=r"expected a forward pass and then its backward pass.*inplace operation"
    ):
        parallel.backward(losses[1])
