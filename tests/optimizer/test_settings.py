"""Whatever is set in an optimizer's groups: the job steps as a plain loop, or ends in one line that shows it."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stretto as st
from stretto.errors import StrettoError, UsageError
from tests.draws import FIRST_SEED, draws
from tests.errors.tiny import says
from tests.loops import habits

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


def made(name: str) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)(habits.network().parameters(), **OPTIMIZERS[name])


def set_at(name: str, setting: str, value: Any, at: int) -> dict[str, Any]:
    """Return how an optimizer is made, and what is done before a micro-batch of a loop: something is set once."""
    groups: list[dict[str, Any]] = []

    def put() -> None:
        groups[0].pop(setting)
        if value is not REMOVED:
            groups[0][setting] = value

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])
        groups.append(optimizer.param_groups[0])
        if at == BEFORE:
            put()
        return optimizer

    return {"make_optimizer": make, "before_batch": lambda index: put() if index == at else None}


def plain(*case: Any) -> nn.Module | None:
    """What a plain loop comes to; None if it does not end."""
    settings = set_at(*case)
    try:
        return habits.plain(habits.network(), optimizer=settings.pop("make_optimizer"), **settings)
    except Exception:
        return None


def ours(*case: Any, strategy: st.Strategy) -> nn.Module:
    return habits.ours(habits.network(), strategy=strategy, **set_at(*case))


def cases(count: int) -> list[tuple[str, str, str, int, st.Strategy]]:
    draw = random.Random(FIRST_SEED)
    found = []
    for _ in range(count):
        name = draw.choice([*OPTIMIZERS])
        settings = [key for key in made(name).param_groups[0] if key != "params"]
        strategy = draw.choice([st.ZeRO1(), st.ZeRO1(), st.DDP(), st.ACCO(), st.WeightPrediction()])
        setting = draw.choice(["lr", "lr", *settings])
        found.append((name, setting, draw.choice([*ODD]), draw.choice([BEFORE, 0, 2, 4]), strategy))
    return found


def test_an_odd_setting_steps_as_a_plain_loop_or_ends_in_one_line() -> None:
    """Where a plain loop ends with an error, so does the job, with one of its own that shows what was set."""
    for name, setting, word, at, strategy in cases(len(draws(200))):
        case, value = (name, setting, word, at, str(strategy)), ODD[word]
        expected = plain(name, setting, value, at)
        try:
            found = ours(name, setting, value, at, strategy=strategy)
        except StrettoError as error:
            told = str(error)
            assert len(told.splitlines()) == 1, case
            assert expected is None or not all(one.isfinite().all() for one in expected.parameters()), (
                case,
                told,
            )
            continue
        assert expected is not None, case
        if isinstance(strategy, st.ZeRO1 | st.DDP):
            pairs = zip(
                found.parameters(), expected.parameters(), strict=True
            )  # fused kernels round by the lanes of a vector
            assert [
                (one, other) for one, other in pairs if not torch.allclose(one, other, rtol=1e-05, atol=1e-07)
            ] == [], case


@pytest.mark.parametrize("strategy", [st.ZeRO1(), st.WeightPrediction(), st.ACCO()])
def test_the_line_says_where_what_was_set_and_what_to_do(strategy: st.Strategy) -> None:
    with pytest.raises(UsageError) as caught:
        ours("AdamW", "betas", None, 4, strategy=strategy)
    assert says(
        caught.value, "rank 0, after step", "raised TypeError", "betas=None", "lr=0.01", "param_groups"
    )
