"""What ranks send is what the ledger says, to the byte."""

import functools

import pytest
import torch

from stretto import Options
from stretto.engine.report import record_dtype
from stretto.flat import plan_layout
from stretto.strategies.ledger import ledger_of
from tests.exactness.jobs import (
    STRATEGIES,
    WIDTH_IN,
    Case,
    Observed,
    build_model,
    build_optimizer,
    describe,
    train_all,
)
from tests.processes import run_ranks

NORM_BYTES = 8
"""One float64: a clip needs the norm of the sum of two reductions, which is measured over ranks."""
STATISTICS = 2 * WIDTH_IN
"""Elements of BatchNorm's running mean and variance; they travel in float32 with every round."""
CASES = [
    Case(
        strategy=strategy,
        batch_norm=True,
        lengths=(11,),
        settle=False,
        options=Options(bucket_bytes=4096, wire=wire),
    )
    for strategy in STRATEGIES
    for wire in ("fp32", "bf16")
]
CASES_BY_WORLD_SIZE = {
    2: [case for index, case in enumerate(CASES) if index % 4 in (0, 3)],
    3: [case for index, case in enumerate(CASES) if index % 4 in (1, 2)],
}
"""Every pair of a strategy, a wire and a number of ranks."""
RUNS = [(size, case) for size, cases in CASES_BY_WORLD_SIZE.items() for case in cases]


@functools.cache
def observed(world_size: int) -> list[list[Observed]]:
    return run_ranks(world_size, train_all, CASES_BY_WORLD_SIZE[world_size])


@pytest.mark.parametrize(("world_size", "case"), RUNS, ids=lambda v: v if isinstance(v, int) else describe(v))
def test_update_sends_what_the_ledger_says(world_size: int, case: Case) -> None:
    index = CASES_BY_WORLD_SIZE[world_size].index(case)
    model = build_model(case)
    layout, parameters = plan_layout(
        model, build_optimizer(case, model.parameters()), world_size=world_size, bucket_bytes=4096, widen=True
    )
    ledger = ledger_of(case.strategy)
    wire = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.options.wire]
    record = record_dtype(len(parameters), 2).itemsize + 4 * STATISTICS
    control = ledger.rounds * record + (NORM_BYTES if ledger.rounds > 1 else 0)
    others = world_size - 1
    volume = int(ledger.wire_bytes(wire.itemsize)) * layout.numel
    assert volume % world_size == 0
    expected = volume // world_size * others + control * others
    for ranks in observed(world_size):
        committed = ranks[index].updates[: len(ranks[index].updates) - ranks[index].drained]
        assert {update.sent_bytes for update in committed} == {expected}


def test_lone_rank_sends_nothing() -> None:
    for found in train_all(0, CASES[:2]):
        assert {update.sent_bytes for update in found.updates} == {0}
