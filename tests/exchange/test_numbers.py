"""Numbers at the ends of their ranges: weights, gradients, norms, float64 models and buffers come through whole."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.engine.buffer_sync import average_buffers
from stretto.exchange import FP32, WIRES, Exchange
from stretto.groups.private import private_group
from stretto_lab.virtual import VirtualCluster
from tests.exchange.test_exchange import layout_for, wait
from tests.exchange.values import of_every_size
from tests.wires import OF_GRADIENTS

CASES = 200
CONSERVING = [name for name in OF_GRADIENTS if not WIRES[name].is_unbiased]


class Line(nn.Module):
    """A loss whose gradient is what it is given."""

    def __init__(self, numel: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(numel, dtype=dtype))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.at * gradient).sum()


def job(model: nn.Module, **options: Any) -> stretto.DataParallel:
    optimizer = torch.optim.SGD(model.parameters(), lr=options.pop("lr", 1.0))
    micro_batches = options.pop("micro_batches", 1)
    return stretto.DataParallel(
        model, optimizer, micro_batches=micro_batches, options=stretto.Options(**options)
    )


# Packed gradients


def test_a_parameter_that_is_used_in_turn_receives_what_it_is_owed() -> None:
    for wire in CONSERVING:
        gradient = torch.full((64,), 3e-3)
        gradient[0] = 1.0
        model = nn.ParameterList([nn.Parameter(torch.zeros(64)) for _ in range(2)])
        parallel = job(model, wire=wire, allow_unused=True, bucket_bytes=256)
        for index in range(200):
            parallel.backward((model[index % 2] * gradient).sum())
        parallel.finish()
        # Of 100 steps, less than one step of a block's integers is owed: a seventh, for four bits.
        assert float(model[0].detach()[1:].mean()) == pytest.approx(-100 * 3e-3, abs=1 / 7), wire
        assert float(model[0].detach()[1:].mean()) < -0.15, wire


# float64


@pytest.mark.parametrize("strategy", [stretto.DDP(), stretto.ZeRO1(), stretto.LocalSGD(rate=1.0, state=True)])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_float64_model_stays_float64_and_equals_plain_pytorch(
    strategy: stretto.Strategy, world_size: int
) -> None:
    def network() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 70), nn.BatchNorm1d(70), nn.Tanh(), nn.Linear(70, 2)).double()

    def train(rank: int, group: Any) -> nn.Module:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parallel = stretto.DataParallel(model, optimizer, strategy, group=group)
        for step in range(4):
            parallel.backward(model(batch(step)).square().mean())
        parallel.finish()
        return model

    def batch(step: int) -> Tensor:
        return torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))

    plain = network()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        plain(batch(step)).square().mean().backward()
        optimizer.step()
    for model in VirtualCluster(world_size).run(train).values:  # all ranks have the same batches
        for name, found in model.state_dict().items():
            expected = plain.state_dict()[name]
            # On one rank to the bit; the mean of three equal values is off by a few units of 2^-53.
            bound = 0.0 if world_size == 1 else 1e-14
            assert found.dtype == expected.dtype
            assert torch.allclose(found, expected, rtol=bound, atol=bound), name


# Buffers


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_mean_of_buffers_lies_between_them_and_equal_ones_stay_equal(world_size: int) -> None:
    def means(rank: int, group: Any) -> list[tuple[list[Tensor], list[int], Tensor]]:
        exchange = Exchange(private_group(group), layout_for(world_size), FP32, wait)
        found = []
        for case in range(CASES):
            draws = random.Random(case)
            dtype = draws.choice((torch.float32, torch.bfloat16, torch.float64))
            counts = [draws.randint(0, 3) for _ in range(world_size - 1)] + [1]
            generator = torch.Generator().manual_seed(case)
            values = [of_every_size(9, generator, largest=3e38).to(dtype) for _ in range(world_size)]
            if case % 2:
                values = [values[0]] * world_size
            averages = average_buffers(exchange, [values[rank]], [True], counts, ())
            found.append((values, counts, averages[0]))
        return found

    for found in VirtualCluster(world_size).run(means).values:
        for case, (values, counts, mean) in enumerate(found):
            taking_part = torch.stack([v for v, count in zip(values, counts, strict=True) if count])
            assert mean.dtype == values[0].dtype
            assert bool((mean >= taking_part.amin(0)).all()), case
            assert bool((mean <= taking_part.amax(0)).all()), case
            if case % 2:
                assert torch.equal(mean, values[0]), case


# Norms and weights


def test_the_gradient_norm_neither_over_nor_underflows_for_any_weight() -> None:
    model = Line(100)
    parallel = job(model, clip_norm=1.0, lr=0.0)
    for case in range(CASES):
        draws = random.Random(case)
        weight = draws.choice([1.0, 1e-30, 2.0**60, 10 ** draws.uniform(-30, 18)])
        # Contributions between 1e-37 and 1e37: normal numbers of float32.
        size = 10 ** draws.uniform(max(-37.0, -37 - _log(weight)), min(37.0, 37 - _log(weight)))
        generator = torch.Generator().manual_seed(case)
        gradient = size * (0.1 + 0.9 * torch.rand(100, generator=generator, dtype=torch.float64))
        update = parallel.backward(model(gradient.float()), weight=weight)
        assert update is not None
        assert update.gradient_norm == pytest.approx(float(gradient.norm()), rel=1e-5), case
    parallel.finish()


def _log(weight: float) -> float:
    return float(torch.tensor(weight, dtype=torch.float64).log10())


@pytest.mark.parametrize("weight", [1e-30, 1.0, 2.0**60])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e19])
def test_clipping_works_at_every_weight_and_size(weight: float, size: float) -> None:
    if weight * size > 1e37:
        size = 1e18  # a contribution must fit into float32
    model = Line(4)
    parallel = job(model, clip_norm=1e-6)
    parallel.backward(model(torch.full((4,), size)), weight=weight)
    parallel.finish()
    # Half of the norm each; the library adds 1e-6 to the norm, as PyTorch does.
    assert model.at.detach().tolist() == pytest.approx([-1e-6 * size / (2 * size + 1e-6)] * 4, rel=1e-5)


def test_finite_gradients_whose_sum_is_not_finite_do_not_end_the_job() -> None:
    model = Line(64)
    parallel = job(model, lr=1e-38)
    parallel.backward(model(torch.full((64,), 3e38)))
    parallel.finish()
    assert model.at.detach().tolist() == pytest.approx([-3.0] * 64)


def test_a_large_weight_times_a_large_loss_is_no_loss_that_is_not_finite() -> None:
    model = Line(1)
    model.at.data.fill_(1e30)
    parallel = job(model, lr=0.0)
    update = parallel.backward(model(torch.ones(1)), weight=2.0**60)
    assert update.loss == pytest.approx(1e30)
    parallel.finish()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("parameter", [torch.float32, torch.bfloat16])
def test_weights_act_exactly_whatever_the_dtype_of_the_loss(
    dtype: torch.dtype, parameter: torch.dtype
) -> None:
    model = Line(10, parameter)
    parallel = job(model, micro_batches=2, lr=0.0)
    for case in range(CASES):
        draws = random.Random(case)
        weights = [draws.choice([257.0, 1.0, 2.0**60, draws.uniform(0.01, 1e3)]) for _ in range(2)]
        generator = torch.Generator().manual_seed(case)
        gradients = [torch.randn(10, generator=generator).to(parameter) for _ in range(2)]
        for gradient, weight in zip(gradients, weights, strict=True):
            update = parallel.backward(model(gradient).to(dtype), weight=weight)
        total = sum(w * g.double() for w, g in zip(weights, gradients, strict=True))
        expected = float(total.norm()) / sum(weights)
        # Products and their sum are rounded to float32: relative to the larger terms, which may cancel.
        size = sum(w * float(g.double().norm()) for w, g in zip(weights, gradients, strict=True))
        bound = 2.0**-21 * size / sum(weights)
        assert update.gradient_norm == pytest.approx(expected, rel=1e-6, abs=bound), case
    parallel.finish()
