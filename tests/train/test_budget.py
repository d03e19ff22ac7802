"""A run is as long as a number of fresh samples, on all ranks alike: to the bit, under clocks, echoes and a resume."""

import math
import random
from pathlib import Path
from typing import Any

import pytest

from stretto.engine import Clock
from stretto.schedules import Cosine
from stretto.strategies import STRATEGIES
from stretto_lab.observe import read_json_lines
from stretto_lab.train.arms import parse_arm
from stretto_lab.train.budget import Budget
from stretto_lab.train.outcome import Outcome
from stretto_lab.train.simulation import SimulateConfig, simulate
from tests.draws import seeds
from tests.recipes.files import expect_same_bits_after_a_kill
from tests.train.runs import model_bits, tiny_run, train
from tests.train.tiny import Tiny

STAYING = (
    "ddp", "zero1", "dpu", "wp", "acco", "acco:first=1", "local:rate=0.3", "local:rate=0.4:plan=bernoulli",
    "diloco:interval=3", "average:3", "paft-sync:interval=3", "paft-sync:interval=2:overlap=on", "paft-dyn:maximum=4",
)  # fmt: skip
HEARING = tuple(text for text in STAYING if not any(name in text for name in ("local", "diloco", "average")))


def ran(folder: str, **settings: Any) -> tuple[list[Outcome], list[dict[str, Any]], dict[str, bytes]]:
    """Return the outcomes of all ranks, the records of all updates, and the model's bits."""
    chosen = {"network": "1mbit,1ms", "micro_batch_ms": 3.0, "run_dir": folder, **settings}
    outcomes = simulate(SimulateConfig(**chosen)).values
    return list(outcomes), read_json_lines(Path(folder, "updates.jsonl")), model_bits(folder)


def test_all_strategies_are_tried() -> None:
    assert {part for text in STAYING for part in STRATEGIES if part in text} == set(STRATEGIES) - {"compute"}


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("case", seeds(8))
def test_fixed_counts_end_as_the_corresponding_updates_do_to_the_bit(case: int) -> None:
    draw = random.Random(case)
    ranks, micro_batches, batch, updates = (draw.randint(*ends) for ends in ((1, 4), (2, 4), (4, 9), (4, 8)))
    each = ranks * micro_batches * batch
    shared = {
        "task": Tiny(batch=batch),
        "ranks": ranks,
        "micro_batches": micro_batches,
        "strategy": draw.choice(STAYING),
        "seed": case,
    }
    by_updates = ran("updates", updates=updates, **shared)
    # The budget need not divide: the last update is the first at or beyond it.
    by_samples = ran("samples", samples=updates * each - draw.randrange(each), **shared)
    assert len(by_updates[1]) == updates
    assert by_samples[1] == by_updates[1]
    assert by_samples[2] == by_updates[2]
    assert by_samples[0][0].fresh_samples == sum(record["fresh_samples"] for record in by_samples[1])


@pytest.mark.long(keep=2)
@pytest.mark.parametrize("case", seeds(16))
def test_a_run_ends_with_the_first_update_at_or_beyond_or_where_it_overlaps_one_later(case: int) -> None:
    draw = random.Random(case)
    strategy = draw.choice(HEARING)
    overlaps = parse_arm(strategy).overlaps
    echo = draw.choice(("none", "even:uses=1.5", "bernoulli:p=0.5", "bernoulli:p=cosine(1,0.3)", "ready"))
    ranks, micro_batches, budget = draw.randint(2, 4), draw.randint(2, 3), draw.randint(150, 600)
    has_clock = overlaps and "@" not in strategy and draw.random() < 0.7
    outcomes, updates, _ = ran(
        "run",
        task=Tiny(),
        ranks=ranks,
        micro_batches=micro_batches,
        strategy=strategy,
        echo=echo,
        slow_loader="5,jitter=0.5" if echo == "ready" else "none",
        slow={1: draw.uniform(1, 3)},
        clock=Clock(minimum=2, maximum=6) if has_clock else None,
        samples=budget,
        seed=case,
    )
    spent, total = [], 0
    for record in updates:
        total += record["fresh_samples"]
        assert record["fresh_samples"] <= record["samples"]
        spent.append(total)
    first = next(index for index, so_far in enumerate(spent) if so_far >= budget)
    is_fixed = echo == "none" and not has_clock
    late = len(spent) - 1 - first
    assert late <= (overlaps and not is_fixed)
    assert {outcome.updates for outcome in outcomes} == {len(spent)}
    # What was loaded is what was counted, on all ranks: nothing is lost after the end, and nothing counted twice.
    assert spent[-1] == 8 * sum(outcome.fresh_batches for outcome in outcomes)


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(
    "strategy", ["local:rate=0.3", "local:rate=cosine(1,0.2):plan=bernoulli", "diloco:interval=3"]
)
@pytest.mark.parametrize("echo", ["even:uses=2", "bernoulli:p=0.4", "bernoulli:p=cosine(1,0.25)"])
def test_ranks_that_step_alone_end_at_the_same_update_with_what_all_have_loaded(
    strategy: str, echo: str
) -> None:
    outcomes, updates, _ = ran(
        "run", task=Tiny(), ranks=3, micro_batches=2, strategy=strategy, echo=echo, samples=500
    )
    assert len({(outcome.updates, outcome.fresh_batches) for outcome in outcomes}) == 1
    before = sum(record["fresh"] for record in updates[:-1])
    assert 3 * 8 * before < 500 <= 3 * 8 * outcomes[0].fresh_batches


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("zero1", {}),
        ("zero1", {"echo": "bernoulli:p=cosine(1,0.25)"}),
        ("acco", {"echo": "even:uses=1.5"}),
        ("local:rate=linear(1,0.3):plan=bernoulli", {"echo": "bernoulli:p=linear(1,0.3)"}),
        ("local:rate=cosine(1,0.2)", {}),
    ],
)
def test_a_killed_run_goes_on_to_the_same_bits(
    strategy: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(strategy=strategy, updates=None, samples=500, **settings)
    expect_same_bits_after_a_kill(run, monkeypatch, "tests.train.tiny.quadrant_loss", 31)


def test_learning_rates_follow_the_samples_under_a_clock() -> None:
    # Tiny's rate is 0.01 * 0.97 ** n after n nominal updates, of 3 ranks with 2 micro-batches of 8.
    _, updates, _ = ran(
        "run",
        task=Tiny(),
        ranks=3,
        micro_batches=2,
        strategy="acco",
        clock=Clock(minimum=1, maximum=6),
        samples=900,
    )
    spent = 0
    for record in updates:
        assert record["learning_rates"][0] == pytest.approx(0.01 * 0.97 ** (spent // 48), rel=1e-12)
        spent += record["fresh_samples"]
    assert len({record["fresh_samples"] for record in updates}) > 1


def test_a_stock_method_ends_at_the_same_budget() -> None:
    ours = train(tiny_run(strategy="ddp", updates=None, samples=300, echo="even:uses=1.5"))
    theirs = train(tiny_run(strategy="torch-ddp", updates=None, samples=300, echo="even:uses=1.5"))
    assert [one.updates for one in ours] == [one.updates for one in theirs]
    assert ours[0].fresh_samples == theirs[0].fresh_samples >= 300


def test_a_budget_goes_on_on_other_numbers_of_ranks() -> None:
    budget = Budget(1000, 48)
    budget.go_on(step=7, samples=300)
    assert budget.last_update(7) == 7 + math.ceil(700 / 48)
    assert budget.share() == 0.3
    budget.go_on(step=7, samples=None)  # a run that counted updates until now
    assert budget.spent == 7 * 48


def test_a_schedule_without_steps_is_as_long_as_the_run() -> None:
    arm = parse_arm("local:rate=cosine(1,0.1)")
    assert arm.options["rate"] == Cosine(1, 0.1, None)
    assert arm.strategy() == parse_arm("local:rate=0.55").strategy()  # without a run, its mean
