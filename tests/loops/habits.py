"""A small model, its batches, a plain PyTorch loop and ours: every habit is tried in both."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import stretto
from stretto import ACCO, DPU, WeightPrediction, ZeRO1

Loss = Callable[[nn.Module, Tensor], Tensor]
MICRO_BATCHES = 2
BOTH_KINDS = [ZeRO1(), ACCO()]
OVERLAPPING = [ACCO(), WeightPrediction(), DPU()]


def network() -> nn.Sequential:
    """A model with the same values every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batches(count: int = 8) -> list[Tensor]:
    """Micro-batches `(4, 4)`, the same every time."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 4, generator=generator) for _ in range(count)]


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    """The loss of a loop that does nothing special."""
    output: Tensor = model(batch)
    return output.square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that notices a wrong scale of the gradient, with a state."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain(model: nn.Module, loss: Loss = mean_square, **arguments: Callable) -> nn.Module:
    """Train `model` in a loop as one would write it without the library: dividing by two is exact.

    Args:
        model: Is trained and returned.
        loss: Of a micro-batch.
        arguments: `optimizer`, made from the model; `before_batch`, called with its index.
    """
    optimizer = arguments.get("optimizer", sgd)(model)
    for index, batch in enumerate(batches()):
        arguments.get("before_batch", lambda _: None)(index)
        (loss(model, batch) / MICRO_BATCHES).backward()
        if index % MICRO_BATCHES == 1:
            optimizer.step()
            optimizer.zero_grad()
    return model


def job(
    model: nn.Module,
    strategy: stretto.Strategy | None = None,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    **arguments: object,
) -> stretto.DataParallel:
    """Wrap `model`."""
    return stretto.DataParallel(
        model, make_optimizer(model), strategy, **{"micro_batches": MICRO_BATCHES, **arguments}
    )


def ours(model: nn.Module, loss: Loss = mean_square, **arguments: object) -> nn.Module:
    """Train `model` in the loop of the README."""
    before_batch = arguments.pop("before_batch", lambda _: None)
    parallel = job(model, **arguments)
    for index, batch in enumerate(parallel.feed(batches())):
        before_batch(index)
        parallel.backward(loss(model, batch))
    parallel.finish()
    assert parallel.steps == 4
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models hold the same parameters and buffers, to the bit."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)
