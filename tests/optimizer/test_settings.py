"""Whatever is set in an optimizer's groups: the job steps as a plain loop, or ends in one line that shows it."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stretto as st
from stretto.errors import StrettoError, UsageError
from tests.bits import unequal
from tests.errors.tiny import says, tiny_model
from tests.loops.habits import batches

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.01},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adagrad": {"lr": 0.1},
    "RMSprop": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "Adadelta": {"lr": 0.1},
}
REMOVED = object()
ODD: dict[str, Any] = {
    "None": None,
    "removed": REMOVED,
    "a word": "many",
    "negative": -0.5,
    "a tensor": torch.tensor(0.02),
    "a tensor of one": torch.full((1,), 0.02),
    "a tensor of three": torch.full((3,), 0.02),
    "a NumPy number": np.float64(0.02),
    "a list": [0.1, 0.2],
    "a pair": (0.5, 0.6),
    "a triple": (0.5, 0.5, 0.5),
    "true": True,
    "one": 1,
    "complex": 1j,
    "a dictionary": {},
    "a huge integer": 10**400,
    "not a number": math.nan,
    "infinite": math.inf,
}
BEFORE = -1
"""Set before wrapping."""


def made(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = tiny_model()
    return model, getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])


def put(optimizer: torch.optim.Optimizer, setting: str, value: Any) -> None:
    group = optimizer.param_groups[0]
    if value is REMOVED:
        del group[setting]
    else:
        group[setting] = value


def plain(name: str, setting: str, value: Any, at: int) -> list[Tensor] | None:
    """What a plain loop comes to; None if it does not end."""
    model, optimizer = made(name)
    if at == BEFORE:
        put(optimizer, setting, value)
    try:
        for index, batch in enumerate(batches()):
            if index == at:
                put(optimizer, setting, value)
            (model(batch).square().mean() / 2).backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
    except Exception:
        return None
    return [parameter.detach() for parameter in model.parameters()]


def ours(name: str, setting: str, value: Any, at: int, strategy: st.Strategy) -> list[Tensor]:
    model, optimizer = made(name)
    if at == BEFORE:
        put(optimizer, setting, value)
    with st.DataParallel(model, optimizer, strategy, micro_batches=2) as parallel:
        for index, batch in enumerate(batches()):
            if index == at:
                put(optimizer, setting, value)
            parallel.backward(model(batch).square().mean())
        parallel.finish()
    return [parameter.detach() for parameter in model.parameters()]


def cases(count: int) -> list[tuple[str, str, str, int, st.Strategy]]:
    draw = random.Random(0)
    found = []
    for _ in range(count):
        name = draw.choice([*OPTIMIZERS])
        settings = [key for key in made(name)[1].param_groups[0] if key != "params"]
        strategy = draw.choice([st.ZeRO1(), st.ZeRO1(), st.DDP(), st.ACCO(), st.WeightPrediction()])
        setting = draw.choice(["lr", "lr", *settings])
        found.append((name, setting, draw.choice([*ODD]), draw.choice([BEFORE, 0, 2, 4]), strategy))
    return found


def test_an_odd_setting_steps_as_a_plain_loop_or_ends_in_one_line() -> None:
    """Where a plain loop ends with an error, so does the job, with one of its own that shows what was set."""
    for name, setting, word, at, strategy in cases(200):
        case, value = (name, setting, word, at, str(strategy)), ODD[word]
        expected = plain(name, setting, value, at)
        try:
            found = ours(name, setting, value, at, strategy)
        except StrettoError as error:
            told = str(error)
            assert len(told.splitlines()) == 1, case
            assert expected is None or not all(one.isfinite().all() for one in expected), (case, told)
            continue
        assert expected is not None, case
        if isinstance(strategy, st.ZeRO1 | st.DDP):
            pairs = zip(found, expected, strict=True)  # fused kernels round by the lanes of a vector
            assert [
                (one, other) for one, other in pairs if not torch.allclose(one, other, rtol=1e-05, atol=1e-07)
            ] == [], case


@pytest.mark.parametrize("strategy", [st.ZeRO1(), st.WeightPrediction(), st.ACCO()])
def test_the_line_says_where_what_was_set_and_what_to_do(strategy: st.Strategy) -> None:
    with pytest.raises(UsageError) as caught:
        ours("AdamW", "betas", None, 4, strategy)
    assert says(
        caught.value, "rank 0, after step", "raised TypeError", "betas=None", "lr=0.01", "param_groups"
    )


class FindsItsRate(torch.optim.Optimizer):
    """Descends at a rate of its own where it is given none, as Adafactor does."""

    def __init__(self, parameters: Any, lr: float | None = None) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = 0.1 if group["lr"] is None else group["lr"]
                    parameter.sub_(parameter.grad, alpha=rate)


def test_an_optimizer_without_a_rate_by_choice_trains_and_reports_none() -> None:
    model, other = tiny_model(), tiny_model()
    updates: list[st.Update] = []
    with st.DataParallel(model, FindsItsRate(model.parameters())) as parallel:
        for batch in parallel.feed(batches(), on_update=updates.append):
            parallel.backward(model(batch).square().mean())
        parallel.finish()
    optimizer = FindsItsRate(other.parameters())
    for batch in batches():
        optimizer.zero_grad()
        other(batch).square().mean().backward()
        optimizer.step()
    assert unequal(model.parameters(), other.parameters()) == []
    assert [
        (update, rate) for update in updates for rate in update.learning_rates if not math.isnan(rate)
    ] == []
