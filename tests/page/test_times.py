"""Times of an average update, by hand."""

import numpy as np
import pytest

from stretto_lab.page.times import of_totals, of_updates


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_updates_have_no_average(count: int) -> None:
    names = ("training_seconds", "exposed_seconds", "wait_seconds", "lane_seconds")
    assert of_updates({name: np.ones(count) for name in names}) is None


def test_the_totals_of_an_arm_are_spread_over_its_updates() -> None:
    waits = {"exposed_seconds": 2.0, "lane_seconds": 2.0, "wait_seconds": 1.0}
    found = of_totals({"updates": 4.0, "seconds": 8.0, **waits})
    assert found is not None
    assert (found.seconds, found.compute, found.exposed, found.data) == (2.0, 1.25, 0.5, 0.25)


def test_a_method_that_cannot_tell_its_parts_is_not_divided() -> None:
    totals = {"updates": 4.0, "seconds": 8.0, "exposed_seconds": np.nan, "wait_seconds": 1.0}
    found = of_totals(totals)
    assert found is not None
    assert np.isnan(found.compute)
    assert (found.seconds, found.data) == (2.0, 0.25)
