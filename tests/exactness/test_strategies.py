"""Every strategy equals its equations to the bit: each set of parameters it shows, first to last."""

import itertools

import pytest

from tests.exactness.checks import check, expected_counts
from tests.exactness.jobs import describe, rate, same
from tests.exactness.matrix import CASES, CASES_BY_WORLD_SIZE, CLIP_NORM, RUNS, describe_run, observed
from tests.exactness.reference import trace


@pytest.mark.long(keep=6)
@pytest.mark.parametrize("run", RUNS, ids=describe_run)
def test_every_state_shown_equals_the_equations(run: tuple[int, int]) -> None:
    world_size, index = run
    case = CASES_BY_WORLD_SIZE[world_size][index]
    counts = expected_counts(case, world_size)
    check([found[index] for found in observed(world_size)], trace(case, world_size, counts), counts)


@pytest.mark.parametrize("run", RUNS, ids=describe_run)
def test_every_update_uses_the_rate_its_schedule_gives(run: tuple[int, int]) -> None:
    world_size, index = run
    base = (0.1,) if CASES_BY_WORLD_SIZE[world_size][index].optimizer == "sgd" else (0.01, 0.03)
    updates = observed(world_size)[0][index].updates
    assert [u.learning_rates for u in updates] == [
        tuple(b * rate(k) for b in base) for k in range(len(updates))
    ]


def test_clipping_clips_some_updates_and_not_others() -> None:
    norms = [
        update.gradient_norm
        for case, found in zip(CASES, observed(2)[0], strict=True)
        if case.options.clip_norm is not None
        for update in found.updates
    ]
    share = sum(norm > CLIP_NORM for norm in norms) / len(norms)
    assert 0.1 < share < 0.9


@pytest.mark.parametrize("name", ["wp", "acco"])
def test_estimates_are_not_what_is_committed(name: str) -> None:
    index = next(i for i, case in enumerate(CASES) if case.strategy.name == name)
    found = observed(2)[0][index]
    assert not any(same(found.shown[1], state) for state in found.committed)


def test_cases_lead_to_different_parameters() -> None:
    finals = [found.final for found in observed(2)[0]]
    alike = [
        {CASES[i].strategy.name, CASES[j].strategy.name}
        for i, j in itertools.combinations(range(len(CASES)), 2)
        if same(finals[i], finals[j])
    ]
    # The replicated and the sharded optimizer add the same terms in the same order; only norms may differ.
    assert [pair for pair in alike if pair != {"ddp", "zero1"}] == [], [describe(case) for case in CASES]
