"""Runs repeat to the bit, and looking at a run does not change it."""

import pytest

from tests.exactness.jobs import Observed, describe, same
from tests.exactness.matrix import WATCHED, repeated

TIMES = ("seconds", "lane_seconds", "exposed_seconds", "sent_bytes")
every_case = pytest.mark.parametrize("index", range(len(WATCHED)), ids=map(describe, WATCHED))


def alike(left: Observed, right: Observed) -> bool:
    return (
        all(map(same, left.shown, right.shown))
        and len(left.shown) == len(right.shown)
        and same(left.final, right.final)
        and same(left.final_statistics, right.final_statistics)
        and records(left) == records(right)
    )


def records(found: Observed) -> list[dict[str, object]]:
    return [
        {name: value for name, value in update.as_json().items() if name not in TIMES}
        for update in found.updates
    ]


@every_case
def test_two_runs_are_bit_identical(index: int) -> None:
    first, second, _ = repeated()
    for rank in range(2):
        assert alike(first[rank][index], second[rank][index])


@every_case
def test_evaluation_inside_settled_changes_nothing(index: int) -> None:
    watched, _, unwatched = repeated()
    for rank in range(2):
        assert watched[rank][index].committed
        assert not unwatched[rank][index].committed
        assert alike(watched[rank][index], unwatched[rank][index])


@every_case
def test_ranks_report_the_same_updates(index: int) -> None:
    (first, second), *_ = repeated()
    assert records(first[index]) == records(second[index])
    assert [update.step for update in first[index].updates] == [1, 2, 3, 4]
