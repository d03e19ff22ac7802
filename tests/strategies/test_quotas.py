"""Micro-batches are split over rounds and ranks; names lead to strategies."""

import itertools

import pytest

from stretto import ACCO, DDP
from stretto.engine.options import Clock, Total, plan_quota
from stretto.errors import ConfigError, UnknownName
from stretto.strategies import STRATEGIES, strategy_by_name


@pytest.mark.parametrize("micro_batches", range(2, 12))
@pytest.mark.parametrize("rounds", [1, 2])
def test_split_is_even_and_complete_with_the_larger_part_last(micro_batches: int, rounds: int) -> None:
    quotas = ACCO().quotas(micro_batches, rounds)
    assert sum(quotas) == micro_batches
    assert list(quotas) == sorted(quotas)
    assert max(quotas) - min(quotas) <= 1
    assert min(quotas) >= 1


@pytest.mark.parametrize(("first", "micro_batches"), [(1, 4), (2, 4), (3, 4), (1, 2)])
def test_acco_splits_where_it_is_told(first: int, micro_batches: int) -> None:
    assert ACCO(first=first).quotas(micro_batches, 2) == (first, micro_batches - first)


@pytest.mark.parametrize(("first", "micro_batches"), [(0, 4), (4, 4), (5, 4), (-1, 4)])
def test_acco_refuses_a_split_that_leaves_a_half_empty(first: int, micro_batches: int) -> None:
    with pytest.raises(ConfigError, match="first must be at least 1 and leave at least one"):
        plan_quota(ACCO(first=first), micro_batches, 2)


def test_fewer_micro_batches_than_rounds_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2 micro-batches per rank and update, got 1"):
        plan_quota(ACCO(), 1, 2)
    assert plan_quota(DDP(), 1, 1).minima == (1,)


def test_a_fixed_number_is_the_same_whether_the_lane_is_free_or_not() -> None:
    quota = plan_quota(ACCO(), 5, 2)
    assert quota.minima == quota.maxima == (2, 3)


def test_a_total_is_dealt_out_in_turn_and_leaves_every_rank_enough() -> None:
    for total, ranks in itertools.product(range(1, 20), range(1, 8)):
        if total < 2 * ranks:
            with pytest.raises(
                ConfigError, match=rf"Total\(micro_batches={total}\) leaves {total // ranks} to a rank"
            ):
                plan_quota(ACCO(), Total(total), 2, 0, ranks)
            continue
        quotas = [plan_quota(ACCO(), Total(total), 2, rank, ranks) for rank in range(ranks)]
        counts = [sum(quota.minima) for quota in quotas]
        assert sum(counts) == total
        assert max(counts) - min(counts) <= 1


def test_a_clock_has_the_same_range_in_every_round() -> None:
    quota = plan_quota(ACCO(), Clock(minimum=2, maximum=4), 2)
    assert (quota.minima, quota.maxima) == ((2, 2), (4, 4))


def test_every_strategy_has_one_name() -> None:
    assert list(STRATEGIES) == [
        "ddp",
        "zero1",
        "dpu",
        "wp",
        "acco",
        "average",
        "local",
        "diloco",
        "paft-sync",
        "paft-dyn",
    ]
    assert [strategy_by_name(name).name for name in STRATEGIES] == list(STRATEGIES)


def test_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        UnknownName,
        match="'zero3'; there are ddp, zero1, dpu, wp, acco, average, local, diloco, paft-sync, paft-dyn",
    ):
        strategy_by_name("zero3")


@pytest.mark.parametrize("number", [0, -1])
def test_a_total_of_nothing_is_refused_where_it_is_made(number: int) -> None:
    with pytest.raises(ConfigError, match=f"micro_batches must be at least 1, found {number}"):
        Total(number)
