"""How often batches are used: counts, bounds, means and lengths of every plan."""

import itertools
import math
import random
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
import torch

from stretto import Auto, Bernoulli, DataParallel, EchoLoader, EchoOptions, Even, Ready, errors
from stretto.echo import Cosine, Linear, MultiStep, Plan, StepRecord
from stretto.echo.buffer import HeldBatch
from stretto.echo.measured import free_uses
from stretto.echo.text import parse_plan
from tests.draws import seeds
from tests.echo.sources import Numbers, Tap


def numbers(loader: EchoLoader[torch.Tensor]) -> list[int]:
    return [int(batch) for batch in loader]


SCHEDULES: list[Plan] = [
    Even(Cosine(1, 4, 100)),
    Even(Linear(4, 1, 100)),
    Even(MultiStep((1, 3, 2), (20, 70))),
    Even(lambda step: 1 + step % 3),
    Bernoulli(Cosine(1, 0.25, 100)),
    Bernoulli(Linear(0.25, 1, 100)),
]


@pytest.mark.parametrize("seed", seeds(160))
def test_lengths_are_exact_and_every_batch_is_used_as_often_as_the_plan_says(seed: int) -> None:
    """Over three epochs, into which a fraction of uses is carried."""
    rng = random.Random(seed)
    uses, length = rng.choice([rng.randint(1, 3), rng.uniform(1, 8)]), rng.choice([1, 2, 7, 60])
    capped = Bernoulli(rng.uniform(0.1, 1), rng.choice([None, 1, 6]))
    plan = rng.choice([Even(uses), capped, rng.choice(SCHEDULES)])
    loader, total = EchoLoader(Numbers(length), plan, options=EchoOptions(seed=seed)), 0
    for epoch in range(3):
        expected = len(loader)
        handed_out = numbers(loader)
        counts = Counter(handed_out)
        total += len(handed_out)
        assert len(handed_out) == expected
        assert handed_out == sorted(handed_out)
        assert sorted(counts) == [1000 * epoch + position for position in range(length)]
        if plan == Even(uses):
            assert set(counts.values()) <= {math.floor(uses), math.ceil(uses)}
            assert total == math.floor((epoch + 1) * length * Fraction(uses))
        if plan == capped and capped.max_uses:
            assert max(counts.values()) <= capped.max_uses


@pytest.mark.parametrize("block", range(4))
def test_updates_of_several_micro_batches_decide_as_updates_of_one_and_lengths_are_exact(block: int) -> None:
    for case in range(block * 50, (block + 1) * 50):
        draws = random.Random(case)
        plan = draws.choice([*SCHEDULES, Even(draws.uniform(1, 4)), Bernoulli(draws.uniform(0.2, 1), 3)])
        size, groups = draws.randrange(2, 7), draws.randrange(1, 20)
        short = draws.choice([0, draws.randrange(size)])
        options = EchoOptions(seed=case, micro_batches=size)
        loader = EchoLoader(Numbers(size * groups + short), plan, options=options)
        expected = len(loader)
        handed_out = numbers(loader)
        assert len(handed_out) == expected, case
        decided = numbers(EchoLoader(Numbers(groups + (short > 0)), plan, options=EchoOptions(seed=case)))
        if short:  # what there is of the last batches is used once
            decided = [number for number in decided if number < groups] + [groups]
        whole = [number * size + slot for number in decided for slot in range(size)]
        assert handed_out == [number for number in whole if number < size * groups + short], case
        assert loader.mixed_updates == 0
        assert loader.updates == len(decided)


def test_a_job_with_another_number_of_micro_batches_is_refused() -> None:
    model = torch.nn.Linear(1, 1)
    parallel = DataParallel(model, torch.optim.SGD(model.parameters()), micro_batches=3)
    loader = EchoLoader(Numbers(3), options=EchoOptions(micro_batches=2))
    with pytest.raises(errors.ConfigError, match=r"micro_batches=2\): expected the 3 of the job, or None"):
        next(parallel.feed(loader))


@pytest.mark.parametrize("p", [1.0, 0.5, 0.2])
def test_bernoulli_uses_are_geometric(p: float) -> None:
    handed_out = numbers(EchoLoader(Numbers(4000), Bernoulli(p), options=EchoOptions(seed=3)))
    counts = Counter(handed_out).values()
    # Mean of 4000 geometric counts: standard error sqrt(1 - p) / p / sqrt(4000); five of them. Shares of batches used
    # once: p, with standard error below 0.008.
    assert len(handed_out) / 4000 == pytest.approx(
        1 / p, abs=5 * math.sqrt(1 - p) / p / math.sqrt(4000) + 1e-12
    )
    assert sum(count == 1 for count in counts) / 4000 == pytest.approx(p, abs=5 * 0.008)


def test_coins_are_those_of_the_seed_and_the_update() -> None:
    def fresh_steps(seed: int) -> list[bool]:
        loader = EchoLoader(Numbers(100), Bernoulli(0.5), options=EchoOptions(seed=seed))
        return [loader.is_fresh for _ in loader]

    assert fresh_steps(1) == fresh_steps(1)
    assert fresh_steps(1) != fresh_steps(2)


@pytest.mark.parametrize(
    "plan", [Even(2.5), Even(Cosine(1, 4, 60)), Bernoulli(0.4), Bernoulli(0.3, max_uses=2)]
)
def test_ranks_of_one_seed_decide_alike_whatever_their_data_and_their_speed(plan: Plan) -> None:
    def decisions(data: Any) -> list[int]:
        loader = EchoLoader(data, plan, options=EchoOptions(seed=4))
        return [loader.fresh_batches for _ in itertools.islice(loader, 60)]

    tap = Tap()
    tap.pour(*range(60))
    assert decisions(Numbers(60)) == decisions(itertools.count(7)) == decisions(tap)


def test_a_rising_schedule_echoes_late_and_a_falling_one_early() -> None:
    def fresh(plan: Plan) -> list[bool]:
        loader = EchoLoader(Numbers(1000), plan)
        return list(itertools.islice((loader.is_fresh for _ in loader), 200))

    rising, falling = fresh(Even(Linear(1, 4, 200))), fresh(Even(Linear(4, 1, 200)))
    # Loads are the sum of 1 / uses: over a half of the line, 200 / 3 ln(2.5 / 1) = 61 and 200 / 3 ln(4 / 2.5) = 31.
    assert (sum(rising[:100]), sum(rising[100:])) == (pytest.approx(61, abs=2), pytest.approx(31, abs=2))
    assert (sum(falling[:100]), sum(falling[100:])) == (pytest.approx(31, abs=2), pytest.approx(61, abs=2))


def test_schedules_start_and_end_where_they_say() -> None:
    for kind in (Cosine, Linear):
        schedule = kind(1.0, 0.2, 10)
        assert (schedule(0), schedule(10), schedule(99)) == (1.0, 0.2, 0.2)
        assert schedule(5) == pytest.approx(0.6, rel=1e-12)
    steps = MultiStep((1.0, 0.5, 0.2), (3, 6))
    assert [steps(step) for step in (0, 2, 3, 5, 6, 99)] == [1.0, 1.0, 0.5, 0.5, 0.2, 0.2]


def test_the_free_number_of_uses_is_what_loads_take_of_a_use() -> None:
    nan = math.nan
    assert free_uses([0.03] * 8, [nan] + [0.01] * 7, 4) == pytest.approx(3.0, abs=0.011)
    assert free_uses([0.0, 0.0, 0.0, 0.1], [0.01] * 4, 4) == 2.5  # a burst counts by its mean
    assert (
        free_uses([0.025] * 4, [0.01, 0.01, 0.01, 5.0], 4) == 2.5
    )  # an evaluation in between does not count
    assert free_uses([0.001] * 4, [0.01] * 4, 4) == 1.0
    assert free_uses([1.0] * 4, [0.01] * 4, 3.5) == 3.5
    assert free_uses([nan], [nan], 4) == 1.0


def test_auto_measures_without_echo_freezes_and_is_even_from_there() -> None:
    plan = Auto(window=10, skip=2, max_uses=3)
    selector = plan.selector(0)
    held, uses = [HeldBatch(number=0)], []
    for step in range(100):
        is_fresh = step == 0 or selector.select(step, held, lambda: False) is None
        uses.append(is_fresh)
        selector.record(
            StepRecord(
                update=step,
                slot=0,
                is_fresh=is_fresh,
                load_seconds=0.025 if is_fresh else math.nan,
                use_seconds=0.01 if step else math.nan,
            )
        )
    assert all(uses[:10])
    assert selector.state_dict()["uses"] == 2.5
    assert sum(uses[10:]) == 90 / 2.5


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Even(0.5), "uses >= 1, found 0.5"),
        (lambda: Even(math.inf), "uses >= 1"),
        (lambda: Even("2"), r"Even\(uses='2'\): expected a function or a number"),
        (lambda: Bernoulli(max_uses="3"), r"Bernoulli\(max_uses='3'\): expected an integer or None"),
        (lambda: Bernoulli(max_uses=0), "max_uses must be at least 1, found 0"),
        (lambda: Bernoulli(0), "0 < p <= 1, found 0"),
        (lambda: Bernoulli(1.5), "0 < p <= 1, found 1.5"),
        (lambda: Ready(pool=0), "at least 1"),
        (lambda: Auto(window=3, skip=3), "skip < window"),
        (lambda: Cosine(1, 2, 0), "at least 1 step"),
        (lambda: MultiStep((1.0,), (3,)), "one value more"),
        (lambda: EchoOptions(ahead=-1), "at least 0"),
        (lambda: EchoOptions(resume="refetc"), "resume='refetc'.* refetch, drop; did you mean 'refetch'?"),
        (lambda: EchoOptions(ahead=True), r"EchoOptions\(ahead=True\): expected an integer"),
        (lambda: EchoOptions(micro_batches=0), "micro_batches must be at least 1, found 0"),
        (lambda: EchoLoader([1], 2), r"plan=2\): expected a plan.*; did you mean Even\(2\)\?"),
        (lambda: EchoLoader([1], "redy"), "plan='redy'.*: expected a plan.*; did you mean 'Ready'?"),
        (lambda: EchoLoader([1], Ready), r"expected a plan, such as.*; did you mean Ready\(\)\?"),
        (lambda: EchoLoader([1], options={"ahead": 1}), r"options=\{'ahead': 1\}\): expected EchoOptions"),
        (lambda: EchoLoader([1], transform=2), r"transform=2\): expected a function"),
        (lambda: EchoLoader([1], Ready(), options=EchoOptions(ahead=0)), "ahead >= 1"),
        (lambda: list(EchoLoader([1, 2, 3], Even(lambda step: 1 - step))), "update 1: .* found 0"),
        (lambda: parse_plan("evne"), "no echo plan is called 'evne'; there are even, bernoulli, ready, auto"),
        (lambda: parse_plan("even:p=2"), "even has no setting 'p'; there are uses"),
        (lambda: parse_plan("even:uses=two"), "cannot read uses='two'"),
        (lambda: parse_plan("even:uses=sine(1,2)"), "cannot read the schedule"),
        (lambda: parse_plan("even:uses=cosine(1,2)"), "third value"),
    ],
)
def test_what_cannot_be_is_named(make: object, named: str) -> None:
    with pytest.raises(errors.ConfigError, match=named):
        make()


def test_plans_are_read_from_one_line() -> None:
    assert parse_plan("even") == Even(2)
    assert parse_plan("even:uses=2.5") == Even(2.5)
    assert parse_plan("bernoulli:p=cosine(1,0.25)", updates=70) == Bernoulli(Cosine(1, 0.25, 70))
    assert parse_plan("bernoulli:p=0.5:max_uses=6") == Bernoulli(0.5, 6)
    assert parse_plan("even:uses=multistep(1,20,3,70,2)") == Even(MultiStep((1, 3, 2), (20, 70)))
    assert parse_plan("even:uses=linear(4,1,9)") == Even(Linear(4, 1, 9))
    assert parse_plan("ready:pool=4:max_uses=3") == Ready(4, 3)
    assert parse_plan("auto:window=9") == Auto(window=9)


def test_a_plan_that_goes_by_time_has_no_length_of_its_own() -> None:
    with pytest.raises(TypeError, match="not known beforehand"):
        len(EchoLoader(Numbers(3), Ready()))
    with pytest.raises(TypeError):
        len(EchoLoader((n for n in range(3)), Even(2)))
