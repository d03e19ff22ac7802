"""Every strategy equals its equations to the bit: each set of parameters it shows, first to last."""

import itertools

import pytest

from tests.exactness.checks import check, expected_counts
from tests.exactness.jobs import Case, describe, rate, same
from tests.exactness.matrix import CASES, CLIP_NORM, GROUPS, ROUNDED, RUNS, UNUSED, describe_run, observed
from tests.exactness.reference import trace


@pytest.mark.long(keep=len(RUNS))
@pytest.mark.parametrize("run", RUNS, ids=describe_run)
def test_every_state_shown_equals_the_equations(run: tuple[str, int]) -> None:
    name, index = run
    world_size, cases = GROUPS[name]
    counts = expected_counts(cases[index], world_size)
    check([found[index] for found in observed(name)], trace(cases[index], world_size, counts), counts)


@pytest.mark.long(keep=len(RUNS))
@pytest.mark.parametrize("run", RUNS, ids=describe_run)
def test_every_update_uses_the_rate_its_schedule_gives(run: tuple[str, int]) -> None:
    name, index = run
    base = (0.1,) if GROUPS[name][1][index].optimizer == "sgd" else (0.01, 0.03)
    updates = observed(name)[0][index].updates
    assert [u.learning_rates for u in updates] == [
        tuple(b * rate(k) for b in base) for k in range(len(updates))
    ]


def test_clipping_clips_some_updates_and_not_others() -> None:
    norms = [
        update.gradient_norm
        for case, found in zip(CASES, observed("two")[0], strict=True)
        if case.options.clip_norm is not None
        for update in found.updates
    ]
    share = sum(norm > CLIP_NORM for norm in norms) / len(norms)
    assert 0.1 < share < 0.9


@pytest.mark.parametrize("name", ["wp", "acco"])
def test_estimates_are_not_what_is_committed(name: str) -> None:
    index = next(i for i, case in enumerate(CASES) if case.strategy.name == name)
    found = observed("two")[0][index]
    assert not any(same(found.shown[1], state) for state in found.committed)


def test_cases_lead_to_different_parameters() -> None:
    finals = [found.final for found in observed("two")[0]]
    alike = [
        {CASES[i].strategy.name, CASES[j].strategy.name}
        for i, j in itertools.combinations(range(len(CASES)), 2)
        if same(finals[i], finals[j])
    ]
    # The replicated and the sharded optimizer add the same terms in the same order; only norms may differ.
    assert [pair for pair in alike if pair != {"ddp", "zero1"}] == [], [describe(case) for case in CASES]


@pytest.mark.parametrize("index", range(len(ROUNDED)), ids=map(describe, ROUNDED))
def test_what_an_owner_shows_is_what_it_sends_or_would_send_alone(index: int) -> None:
    first, second = (found[index] for found in observed("rounded"))
    assert [pair for pair in zip(first.shown, second.shown, strict=True) if not same(*pair)] == []
    assert same(first.final, second.final)
    # A replicated optimizer sends gradients only: its parameters are rounded to the model's dtype, not to the wire.
    if ROUNDED[index].strategy.name != "ddp":
        for state in observed("rounded alone")[0][index].shown[1:]:
            assert same(state, [value.bfloat16().to(value.dtype) for value in state])


def test_a_zero_gradient_would_not_be_the_same_as_none() -> None:
    never = next(i for i, case in enumerate(UNUSED) if case.branch == "never")
    always_used = trace(
        Case(strategy=UNUSED[never].strategy, lengths=(19,)), 2, expected_counts(UNUSED[never], 2)
    )
    found = observed("unused")[0][never]
    assert not same(found.final, always_used.committed[-1])
    names = ["branch.weight", "branch.bias"]
    unmoved = [i for i, (a, b) in enumerate(zip(found.final, found.shown[0], strict=True)) if a.equal(b)]
    assert len(unmoved) == len(names)
