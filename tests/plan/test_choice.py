"""A loop of the user's own asks what to use, on its own ranks and link, and is afterwards as it was."""

import copy
import functools
import itertools
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stretto import DataParallel, ZeRO1
from stretto.errors import ConfigError, PeerFailed
from stretto.groups import Link, register_throttled
from stretto_lab.plan import choose
from stretto_lab.testing import differing
from tests.docs.pages import DOCS, code_blocks
from tests.processes import run_ranks

WORLD_SIZE = 2


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch).square().mean()


def new_job() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.Dropout(0.1), nn.Linear(256, 128))
    return model, torch.optim.AdamW(model.parameters())


def ask_then_train(rank: int) -> tuple[str, list[str], int]:
    model, optimizer = new_job()
    batches = [torch.randn(16, 128) for _ in range(4)]
    random.seed(rank)
    before = copy.deepcopy(model.state_dict())
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with warnings.catch_warnings():
        # In a process of its own pytest's filter does not hold.
        warnings.simplefilter("error", FutureWarning)
        chosen = choose(model, optimizer, loss_of, batches, micro_batches=2)
    assert chosen.ranking is not None
    assert differing(before, model.state_dict()) == []
    assert not optimizer.state
    assert [parameter for parameter in model.parameters() if parameter.grad is not None] == []
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])
    parallel = DataParallel(model, optimizer, chosen.strategy, micro_batches=2, wire=chosen.wire)
    for batch in parallel.feed(batches):
        parallel.backward(loss_of(model, batch))
    parallel.finish()
    return chosen.arm.text, [one.arm for one in chosen.ranking.prices], parallel.steps


@pytest.mark.long
def test_all_ranks_take_the_same_narrow_wire_on_a_slow_link_and_train_with_it() -> None:
    prepare = functools.partial(register_throttled, Link.parse("20mbit"))
    ranks = run_ranks(WORLD_SIZE, ask_then_train, backend="throttled", prepare=prepare)
    assert ranks[0] == ranks[1]
    chosen, priced, steps = ranks[0]
    assert chosen.rpartition("=")[2] in ("int8", "rotated2", "int4")
    assert chosen in priced
    assert steps == 2


def ask_and_fail(rank: int) -> None:
    calls = []

    def draw_and_fail(model: nn.Module, batch: Tensor) -> Tensor:
        calls.append((torch.rand(()), np.random.rand(), random.random()))
        if len(calls) > 2:
            raise ZeroDivisionError
        return loss_of(model, batch)

    model, optimizer = new_job()
    batches = [torch.zeros(1, 128)]
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        choose(model, optimizer, draw_and_fail, batches)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_random_states_are_as_they_were_also_behind_an_error() -> None:
    run_ranks(WORLD_SIZE, ask_and_fail)


def two_batches() -> Iterator[Tensor]:
    for _ in range(2):
        yield torch.zeros(1, 128)


def ask_where_one_rank_has_too_little(rank: int) -> str:
    loader = two_batches() if rank == 1 else itertools.repeat(torch.zeros(1, 128))
    with pytest.raises(ConfigError if rank == 1 else PeerFailed) as caught:
        choose(*new_job(), loss_of, loader)
    return str(caught.value)


def test_ranks_hear_that_another_one_has_batches_that_come_only_once_and_are_not_enough() -> None:
    waiting, gave_up = run_ranks(WORLD_SIZE, ask_where_one_rank_has_too_little)
    assert gave_up == "plan: expected more than 2 micro-batches from the loader, found 2"
    assert gave_up in waiting


def test_a_rank_that_is_alone_takes_the_default_and_measures_nothing() -> None:
    def refuse(*_: Any) -> Tensor:
        raise AssertionError

    chosen = choose(*new_job(), refuse, [])
    assert (chosen.strategy, chosen.wire, chosen.ranking) == (ZeRO1(), "fp32", None)


def run_the_page(rank: int) -> tuple[str, int]:
    model = nn.Linear(3, 1)
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(4)],
        "loss_function": nn.functional.mse_loss,
    }
    (source,) = code_blocks(DOCS / "plan.md", "tests/plan/test_choice.py")
    exec(source, names)
    return names["chosen"].arm.text, names["parallel"].world_size


@pytest.mark.long
def test_the_example_of_the_page_runs() -> None:
    ranks = run_ranks(WORLD_SIZE, run_the_page)
    assert ranks[0] == ranks[1]
    assert ranks[0][1] == WORLD_SIZE
