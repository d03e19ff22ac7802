"""`torch.autocast` around more than the forward pass changes nothing else: not the step, and not what is shown."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import stretto as st
from stretto.errors import UsageError
from tests.bits import unequal

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05),  # multiplies matrices
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 1, bias=False))


def batch(index: int) -> Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(index))


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output: Tensor = model(inputs)
    return output.float().square().mean()


def plain(make: Optimizer) -> list[Tensor]:
    model = network()
    optimizer = make(list(model.parameters()))
    for index in range(6):
        loss_of(model, batch(index)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("strategy", [st.ZeRO1(), st.DPU(), st.DiLoCo(2)], ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_autocast_around_the_whole_loop_is_autocast_around_the_forward_pass(
    name: str, strategy: st.Strategy
) -> None:
    def trained(*, is_around: bool) -> list[Tensor]:
        model = network()
        parallel = st.DataParallel(model, OPTIMIZERS[name](list(model.parameters())), strategy)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_around):
            for index in range(6):
                parallel.backward(loss_of(model, batch(index)))
            parallel.finish()
        return [parameter.detach() for parameter in model.parameters()]

    inside, around = trained(is_around=False), trained(is_around=True)
    assert unequal(inside, around) == []
    if strategy.name == "zero1":
        assert unequal(inside, plain(OPTIMIZERS[name])) == []


def test_micro_batches_that_are_replayed_under_autocast_see_the_mended_values() -> None:
    def trained(*, is_struck: bool) -> tuple[list[Tensor], list[str]]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        actions: list[str] = []
        with st.DataParallel(model, optimizer, guards=[st.AtRest()]) as parallel:
            for index in range(3):
                if is_struck and index == 1:
                    model[0].weight.detach().numpy()[0, 5] = 1e4
                with torch.autocast("cpu", torch.bfloat16):
                    update = parallel.micro_batch(
                        lambda one: model(one).float().square().mean(), batch(index)
                    )
                assert update is not None
                actions += [incident.action for incident in update.incidents]
            parallel.finish()
        return [parameter.detach() for parameter in model.parameters()], actions

    (sound, nothing), (struck, actions) = trained(is_struck=False), trained(is_struck=True)
    assert nothing == []
    assert len(actions) == 1
    assert actions[0].startswith("mended")
    assert unequal(sound, struck) == []


@pytest.mark.parametrize("strategy", [st.ZeRO1(), st.ACCO()], ids=str)
def test_autocast_to_float16_is_refused_at_the_first_forward_pass(strategy: st.Strategy) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        st.DataParallel(model, optimizer, strategy, micro_batches=2),
        pytest.raises(UsageError, match="expected autocast to bfloat16"),
        torch.autocast("cpu", torch.float16),
    ):
        model(torch.ones(3, 4))
