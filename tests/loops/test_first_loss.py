"""A loss that a `GradScaler` has scaled, or that is computed in float16, is noticed at the first micro-batch."""

import logging
import random
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import stretto as st
from stretto.errors import UsageError
from tests.draws import seeds
from tests.loops import habits

Scale = Callable[[torch.amp.GradScaler, Tensor], Tensor]
FORMS: dict[str, Scale] = {
    "scaled": lambda scaler, loss: scaler.scale(loss),
    "a part of it": lambda scaler, loss: scaler.scale(loss / 4),
    "divided after it": lambda scaler, loss: scaler.scale(loss) / 4,
    "in a list": lambda scaler, loss: scaler.scale([loss])[0],
    "one of two": lambda scaler, loss: loss + scaler.scale(loss).reshape(()),
    "widened": lambda scaler, loss: scaler.scale(loss).double(),
}
WAYS: list[Callable[[st.DataParallel, Tensor], object]] = [
    lambda parallel, loss: parallel.backward(loss),
    lambda parallel, loss: parallel.micro_batch(lambda _: loss, torch.ones(2, 4)),
    lambda parallel, loss: parallel.accumulate(loss),
]
STRATEGIES = (st.ZeRO1(), st.ACCO(), st.DDP(), st.LocalSGD())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(4))
def test_a_scaled_loss_is_refused_and_the_scaler_named(form: str, seed: int) -> None:
    draw = random.Random(f"{form} {seed}")
    scale = 2.0 ** draw.randint(1, 24)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    model = habits.network()
    parallel = habits.job(model, draw.choice(STRATEGIES))
    loss = FORMS[form](scaler, model(torch.ones(2, 4)).square().mean())
    way = draw.choice(WAYS)
    with pytest.raises(UsageError, match=rf"step 0.*GradScaler .* by {re.escape(str(scale))},.*bfloat16"):
        way(parallel, loss)


@pytest.mark.parametrize("seed", seeds(8))
def test_any_other_factor_is_the_users_own_also_where_a_scaler_lives(seed: int) -> None:
    draw = random.Random(seed)
    factor = 2.0 ** draw.randint(1, 24)
    others = [
        torch.amp.GradScaler("cpu", init_scale=2 * factor),
        torch.amp.GradScaler("cpu", init_scale=factor, enabled=False),
    ]
    for scaler in others:
        scaler.scale(torch.ones(1))
    model = habits.network()
    parallel = habits.job(model, draw.choice(STRATEGIES))
    times = draw.choice([factor, torch.tensor(factor), nn.Parameter(torch.tensor(factor))])
    for _ in range(4):
        loss = others[1].scale(model(torch.ones(2, 4)).square().mean() * times)
        parallel.backward(loss)
    parallel.finish()
    assert parallel.steps == 2


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "computed in float16" in record.getMessage()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_float16_that_no_forward_pass_of_the_whole_model_shows_is_told_once(
    dtype: torch.dtype, strategy: st.Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    model = habits.network()
    parallel = habits.job(model, strategy)
    with caplog.at_level(logging.WARNING, "stretto"):
        for _ in range(4):
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                hidden = model[0](torch.ones(2, 4))  # parts alone: no hook of the model hears of it
                loss = model[2](torch.tanh(hidden)).float().square().mean()
            parallel.backward(loss)
        parallel.finish()
    assert len(messages(caplog)) == (dtype is torch.float16)


def test_a_compiled_model_under_float16_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = habits.network()
    parallel = habits.job(model)
    compiled = torch.compile(model, backend="aot_eager")
    with caplog.at_level(logging.WARNING, "stretto"):
        with torch.autocast("cpu", torch.float16):
            loss = compiled(torch.ones(2, 4)).float().square().mean()
        parallel.backward(loss)
        parallel.commit()
        parallel.finish()
    assert len(messages(caplog)) == 1
