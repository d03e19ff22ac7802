"""Writes that a plain loop allows: each counts, is put back, or is told; and models and jobs of odd kinds."""

import copy
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import stretto
from stretto import ACCO, DDP, DPU, LocalSGD, WeightPrediction, ZeRO1
from stretto.errors import GradientsTouched, ParametersTouched, UnsupportedOptimizer
from stretto.strategies import Strategy
from tests.bits import unequal
from tests.draws import FIRST_SEED, draws

EVERY = pytest.mark.parametrize(
    "strategy", [ZeRO1(), DDP(), ACCO(), DPU(), WeightPrediction(), LocalSGD(0.5)], ids=lambda one: one.name
)


def batches(seed: int, count: int = 8) -> list[Tensor]:
    return [torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * seed + i)) for i in range(count)]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def swap(model: nn.Module, average: nn.Module, how: str) -> None:
    if how == "load_state_dict":
        model.load_state_dict(average.state_dict())
        return
    with torch.no_grad():
        for own, other in zip(model.parameters(), average.parameters(), strict=True):
            (own.data if how == ".data" else own).copy_(other)


def train(strategy: Strategy, seed: int, ways: list[str]) -> list[Tensor]:
    """Train, and at every update swap an average in and out in one of the ways."""
    model = network(seed)
    average = AveragedModel(model, use_buffers=True)
    parallel = stretto.DataParallel(model, sgd(model), strategy, micro_batches=2)

    def evaluate(update: stretto.Update) -> None:
        with parallel.settled():
            average.update_parameters(model)
            if ways:
                held = copy.deepcopy(model)
                swap(model, average.module, ways[update.step % len(ways)])
                model.eval()
                model(torch.ones(2, 3))
                model.train()
                swap(model, held, ways[(update.step + 1) % len(ways)])

    for batch in parallel.feed(batches(seed), on_update=evaluate):
        parallel.backward(model(batch).square().mean())
    parallel.finish()
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


@EVERY
def test_an_average_swapped_in_and_out_of_a_settled_model_leaves_no_trace(strategy: Strategy) -> None:
    draw = random.Random(FIRST_SEED)
    for seed in draws(17):
        ways = [draw.choice(["copy_", "load_state_dict", ".data"]) for _ in range(2)]
        if "load_state_dict" in ways:
            ways = ["load_state_dict"]  # which alone brings buffers back
        assert unequal(train(strategy, seed, ways), train(strategy, seed, [])) == [], (seed, ways)


@EVERY
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("is_rebound", [False, True])
def test_a_swap_that_is_not_taken_back_is_told(strategy: Strategy, is_rebound: bool, saves: bool) -> None:
    """At the end of the block, by a save in it, or by the next micro-batch, which sees that memory was exchanged."""
    model = network()
    parallel = stretto.DataParallel(model, sgd(model), strategy, micro_batches=2)
    for batch in batches(0, 4):
        parallel.backward(model(batch).square().mean())

    def write_and_train() -> None:
        with parallel.settled():
            if is_rebound:
                model[0].weight.data = torch.zeros(4, 3)
            else:
                swap(model, network(1), "copy_")
            if saves:
                stretto.checkpoint.save(parallel, "saved")
        parallel.backward(model(batches(1)[0]).square().mean())

    with pytest.raises(ParametersTouched, match=r"parameter .[\d.a-z]+. was (replaced|written inside)"):
        write_and_train()


class Fused(torch.autograd.Function):
    """A product whose backward pass adds the weight's gradient to `.grad` itself."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(input)
        ctx.weight = weight
        return input @ weight.detach().T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (input,) = ctx.saved_tensors
        own = gradients[0].T @ input
        if ctx.weight.grad is None:
            ctx.weight.grad = own
        else:
            ctx.weight.grad += own
        return gradients[0] @ ctx.weight.detach(), None


class Chain(nn.Module):
    """Layers of which some are fused."""

    def __init__(self, fused: list[bool]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in fused)
        self.fused = fused

    def forward(self, input: Tensor) -> Tensor:
        for layer, is_fused in zip(self.layers, self.fused, strict=True):
            input = input.requires_grad_() if not input.requires_grad else input
            input = torch.tanh(Fused.apply(input, layer.weight) if is_fused else layer(input))
        return input.square().mean()


def test_gradients_that_an_autograd_function_writes_count_as_in_a_plain_loop() -> None:
    draw = random.Random(FIRST_SEED)
    for seed in draws(100):
        torch.manual_seed(seed)
        fused = [draw.random() < 0.5 for _ in range(draw.randint(1, 4))]
        weight, allow = draw.choice([1.0, 2.0, 0.25]), draw.random() < 0.5
        model = Chain(fused)
        plain = copy.deepcopy(model)
        optimizer = sgd(plain)
        for number, batch in enumerate(batches(seed, 6)):
            (plain(batch) / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        options = stretto.Options(allow_unused=allow)
        strategy = draw.choice([ZeRO1(), DDP()])
        parallel = stretto.DataParallel(model, sgd(model), strategy, micro_batches=2, options=options)
        for batch in parallel.feed(batches(seed, 6)):
            parallel.backward(model(batch), weight=weight)
        parallel.finish()
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(
                own, other, rtol=1e-5, atol=1e-6
            )  # a sum of two, halved before or after


def test_gradients_that_a_function_writes_without_the_weight_of_a_narrow_loss_are_told() -> None:
    model = Chain([True, False])
    parallel = stretto.DataParallel(model, sgd(model))
    with pytest.raises(GradientsTouched, match="an autograd function has added to its gradient directly"):
        parallel.backward(model(torch.ones(2, 3)).bfloat16(), weight=2.0)


class Siamese(nn.Module):
    """A network, and a target that follows it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.online = nn.Linear(3, width)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))

    def forward(self, input: Tensor) -> Tensor:
        return (self.online(input) - self.target(input + 1)).square().mean()


def following(draw: random.Random) -> tuple[nn.Module, Callable[[], None]]:
    model = Siamese(draw.choice([1, 8, 40]))

    def follow() -> None:
        for slow, fast in zip(model.target.parameters(), model.online.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)

    return model, follow


def clipped(draw: random.Random) -> tuple[nn.Module, Callable[[], None]]:
    model = network(draw.randrange(100))
    matrices = [parameter.data for parameter in model.parameters() if parameter.ndim == 2]
    chosen = draw.sample(matrices, draw.choice([1, 2]))
    ways = [lambda one: one.clamp_(-0.1, 0.1), lambda one: one.mul_(0.9), lambda one: one[0].zero_()]
    way = draw.choice(ways)
    return model, lambda: [way(one) for one in chosen]


@pytest.mark.parametrize(
    ("writing", "told"), [(following, r"\.data"), (clipped, r"shown parameters.*through \.data")]
)
@pytest.mark.parametrize("strategy", [ZeRO1(), DDP(), ACCO()], ids=lambda strategy: strategy.name)
def test_what_is_written_through_data_under_guards_ends_the_job_with_what_to_write(
    strategy: Strategy, writing: Callable[..., Any], told: str
) -> None:
    """Every round would be left out, and nothing trained."""
    for seed in draws(34):
        model, write = writing(random.Random(seed))
        parallel = stretto.DataParallel(model, sgd(model), strategy, micro_batches=2, guards="standard")
        feed = parallel.feed(batches(seed, 20), on_update=lambda _, write=write: write())
        with pytest.raises((ParametersTouched, stretto.errors.StateCorrupt), match=told):
            deque(parallel.backward(model(batch).square().mean()) for batch in feed)  # run at once


class Sharded(torch.optim.Optimizer):
    """As PyTorch's ZeroRedundancyOptimizer: its own optimizer has this rank's share."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.optim = torch.optim.AdamW(parameters[:1])


def test_an_optimizer_that_shards_is_refused_with_the_one_that_it_shards() -> None:
    model = network()
    with pytest.raises(UnsupportedOptimizer, match=r"expected the AdamW over all parameters, as in AdamW\("):
        stretto.DataParallel(model, Sharded(list(model.parameters())))
