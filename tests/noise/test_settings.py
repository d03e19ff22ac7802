"""What the settings of noise do: bursts, bias, ranks, averages and seeds; and what they leave alone, to the bit."""

import dataclasses
import functools
import math

import pytest
import torch

import stretto as st
from stretto.errors import ConfigError, CorruptionError, ReplicasDiverged, StateCorrupt
from tests.bits import unequal
from tests.noise.jobs import NUMEL, UPDATES, Case, Seen, added, run

VARIANCE = 0.04
FAR = 5 * math.sqrt(2 / NUMEL)
"""Of the variance of one update's noise on one rank: five standard deviations."""
STRATEGIES = (st.DDP(), st.ZeRO1(), st.WeightPrediction(), st.ACCO(), st.LocalSGD(), st.PAFTSync(interval=2))
NAMED = {"argvalues": STRATEGIES, "ids": [strategy.name for strategy in STRATEGIES]}


def same(left: list[Seen], right: list[Seen]) -> bool:
    return all(
        len(one.shown) == len(other.shown) and all(map(torch.equal, one.shown, other.shown))
        for one, other in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("strategy", **NAMED)
def test_noise_of_variance_zero_changes_no_bit(strategy: st.Strategy) -> None:
    case = Case(strategy=strategy, ranks=3, weights=(3.0, 0.7))
    assert same(run(case), run(case.with_noise(st.Noise(0.0))))


@functools.cache
def clean(ranks: int) -> list[Seen]:
    return run(Case(strategy=st.DDP(), ranks=ranks))


def test_a_burst_alone_leaves_the_updates_before_it_as_they_are() -> None:
    noisy = run(Case(strategy=st.ZeRO1()).with_noise(st.Noise(0.0, every=(4, 1.0))))
    plain = run(Case(strategy=st.ZeRO1()))
    for one, other in zip(noisy, plain, strict=True):
        assert unequal(one.masters[:4], other.masters[:4]) == []
        assert not torch.equal(one.masters[4], other.masters[4])


@pytest.mark.parametrize(("rank", "hit"), [(1, (1,)), ((0, 2), (0, 2)), ("all", (0, 1, 2))])
def test_only_the_ranks_that_are_named_are_hit(rank: int | tuple[int, ...], hit: tuple[int, ...]) -> None:
    noisy = run(Case(strategy=st.DDP(), ranks=3).with_noise(st.Noise(VARIANCE, rank=rank)))
    everybody = run(Case(strategy=st.DDP(), ranks=3).with_noise(st.Noise(VARIANCE)))
    for number, found in enumerate(noisy):
        expected = everybody[number] if number in hit else clean(3)[number]
        assert unequal(found.masters, expected.masters) == []


def test_draws_follow_the_seed() -> None:
    case = Case(strategy=st.DDP())
    assert same(run(case.with_noise(st.Noise(VARIANCE))), run(case.with_noise(st.Noise(VARIANCE, seed=0))))
    other = run(case.with_noise(st.Noise(VARIANCE, seed=1)))
    assert not same(run(case.with_noise(st.Noise(VARIANCE))), other)


@pytest.mark.parametrize(
    "strategy",
    [st.LocalSGD(rate=1), st.LocalSGD(rate=0.5), st.DiLoCo(interval=1, outer_lr=1.0, outer_momentum=0.0)],
    ids=["local", "local, every other update", "diloco"],
)
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_noise_on_averages_is_on_the_weights_that_each_rank_holds(strategy: st.Strategy, wire: str) -> None:
    """Without a learning rate replicas are equal, so that the noise of the first average is all that parts them."""
    noise = st.Noise(0.0, averages=VARIANCE)
    case = Case(strategy=strategy, rate=0.0, weights=(1.0,), options=st.Options(wire=wire)).with_noise(noise)
    found = run(case)
    first = 1 if strategy != st.LocalSGD(rate=0.5) else 2
    for seen in found:
        assert [values for values in seen.masters[:first] if not torch.equal(values, seen.masters[0])] == []
    apart = [seen.masters[first] - seen.masters[0] for seen in found]
    shown = [seen.shown[2 * first - 1] - seen.shown[0] for seen in found]
    for draws in (*apart, *shown):
        assert float(draws.var()) == pytest.approx(VARIANCE, rel=FAR)
    assert abs(float(torch.corrcoef(torch.stack(apart))[0, 1])) < 6 / math.sqrt(NUMEL)
    assert [seen for seen in found if not (seen.padding == 0).all()] == []


@pytest.mark.parametrize("overlap", [False, True])
def test_noise_on_averages_parts_replicas_that_paft_has_united(overlap: bool) -> None:
    noise = st.Noise(VARIANCE, averages=0.25)
    case = Case(strategy=st.PAFTSync(interval=2, overlap=overlap), ranks=2)
    alike, parted = run(case.with_noise(st.Noise(VARIANCE))), run(case.with_noise(noise))
    second = 3 if overlap else 2  # the update behind which, or within which, the first average comes
    between = [parts[0].masters[second] - parts[1].masters[second] for parts in (alike, parted)]
    own = 2 * VARIANCE if overlap else 0.0  # an update's noise on top
    assert float(between[0].var()) == pytest.approx(own, rel=FAR, abs=1e-9)
    assert float(between[1].var()) == pytest.approx(2 * 0.25 + own, rel=FAR)


def test_an_average_of_equal_replicas_sends_nothing_that_could_be_hit() -> None:
    case = Case(strategy=st.PAFTSync(interval=1), ranks=3)
    assert same(run(case), run(case.with_noise(st.Noise(0.0, averages=1.0))))


@pytest.mark.parametrize("strategy", [st.DDP(), st.ZeRO1(), st.ACCO()], ids=["ddp", "zero1", "acco"])
def test_the_norm_and_the_clip_are_those_of_what_a_rank_steps_with(strategy: st.Strategy) -> None:
    case = Case(strategy=strategy).with_noise(st.Noise(1.0), clip_norm=0.5)
    for seen in run(case):
        lengths = (-torch.stack(seen.masters).double().diff(dim=0)).norm(dim=1)
        for update, length in zip(seen.updates, lengths, strict=True):
            # 12,026 coordinates of variance at least 1.
            assert update.gradient_norm > 100
            if strategy.name == "ddp":
                assert float(length) == pytest.approx(0.5, rel=1e-4)


def test_guards_find_noise_on_one_rank_and_undo_it_to_the_bit() -> None:
    for guard in (st.AtRest(), st.ReplicaGuard()):
        case = dataclasses.replace(Case(strategy=st.DDP(), ranks=3), guards=(guard,))
        found = run(case.with_noise(st.Noise(VARIANCE, rank=1)))
        assert same(found, clean(3))
        incidents = [incident for update in found[0].updates for incident in update.incidents]
        assert {incident.ranks for incident in incidents} == {(1,)}


@pytest.mark.parametrize(
    ("guard", "error"),
    [(st.AtRest(), StateCorrupt), (st.ReplicaGuard(), ReplicasDiverged)],
    ids=["rest", "replica"],
)
def test_guards_end_a_job_whose_ranks_are_all_hit(guard: st.Guard, error: type[CorruptionError]) -> None:
    with pytest.raises(error):
        run(
            dataclasses.replace(Case(strategy=st.DDP(), ranks=3), guards=(guard,)).with_noise(
                st.Noise(VARIANCE)
            )
        )


@pytest.mark.parametrize("strategy", [st.DDP(), st.ZeRO1()], ids=["ddp", "zero1"])
def test_after_a_round_that_is_left_out_an_update_has_the_noise_that_it_would_have_had(
    strategy: st.Strategy,
) -> None:
    noise = st.Noise(VARIANCE)
    whole = Case(strategy=strategy, micro_batches=1, options=st.Options(nonfinite="skip"))
    gap = dataclasses.replace(whole, poisoned=(0, 2), lengths=(UPDATES + 2,) * 2)
    found, expected = (added(run(case.with_noise(noise)), run(case)) for case in (gap, whole))
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape == (UPDATES, one.shape[1])
        assert float((one - other).abs().max()) < 1e-5  # the rounding of parameters up to 20


@pytest.mark.parametrize("rank", [2, (0, 5)])
def test_a_rank_that_is_not_there_is_refused(rank: int | tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"names rank [25]; the run has ranks 0 to 1"):
        run(Case(strategy=st.DDP()).with_noise(st.Noise(1.0, rank=rank)))
