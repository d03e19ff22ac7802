"""Which optimizers may be sharded is found out by trying."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim

from stretto import DDP, DataParallel
from stretto.errors import UnsupportedOptimizer
from stretto.optimizer import check_shardable

ACCEPTED = [
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.ASGD,
    optim.Rprop,
    optim.Adadelta,
    optim.Adagrad,
    optim.RMSprop,
    optim.Adamax,
]
REFUSED = [optim.Adafactor, optim.LBFGS, optim.Muon, optim.SparseAdam]


class LayerwiseSGD(optim.Optimizer):
    """A trust ratio per tensor, as LARS and LAMB have it."""

    def __init__(self, params: object, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.norm() / parameter.grad.norm() * parameter.grad


class SignSGD(LayerwiseSGD):
    """Element-wise, by a stranger."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad.sign()


class Positional(optim.SGD):
    """Its constructor does not take what its groups hold."""

    def __init__(self, params: object, strength: float) -> None:
        super().__init__(params, lr=strength)


def matrix() -> list[Tensor]:
    return [nn.Parameter(torch.ones(4, 3))]


@pytest.mark.parametrize("kind", ACCEPTED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("lr", [0.0, 0.01])
def test_element_wise_optimizer_is_accepted(kind: Callable[..., optim.Optimizer], lr: float) -> None:
    check_shardable(kind(matrix(), lr=lr))


@pytest.mark.parametrize(
    "settings", [{"fused": True}, {"foreach": True}, {"amsgrad": True}, {"maximize": True}], ids=str
)
def test_implementation_of_adamw_does_not_matter(settings: dict[str, bool]) -> None:
    check_shardable(optim.AdamW(matrix(), **settings))


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_optimizer_that_sees_shapes_or_closures_is_refused_by_name(
    kind: Callable[..., optim.Optimizer],
) -> None:
    with pytest.raises(UnsupportedOptimizer, match=kind.__name__):
        check_shardable(kind(matrix(), lr=0.01))


def test_strangers_are_judged_by_what_they_do() -> None:
    check_shardable(SignSGD(matrix()))
    with pytest.raises(UnsupportedOptimizer, match="LayerwiseSGD cannot be cut into shards"):
        check_shardable(LayerwiseSGD(matrix()))


def test_class_that_cannot_be_built_again_is_refused() -> None:
    with pytest.raises(UnsupportedOptimizer, match="Positional cannot be built over flat slices"):
        check_shardable(Positional(matrix(), 0.1))


def test_probe_does_not_touch_the_users_optimizer() -> None:
    parameters = matrix()
    optimizer = optim.AdamW(parameters, lr=0.5)
    check_shardable(optimizer)
    assert torch.equal(parameters[0], torch.ones(4, 3))
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not optimizer.state


def test_refusal_comes_with_wrapping() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(UnsupportedOptimizer, match="Adafactor"):
        DataParallel(model, optim.Adafactor(model.parameters()), DDP())
