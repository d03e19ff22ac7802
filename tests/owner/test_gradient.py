"""Sums of reduced gradients: every part counts once, whatever the nesting."""

import pytest
import torch

from stretto.errors import ConfigError
from stretto.owner import ReducedGradient


def reduced(*values: float, weight: float = 1.0) -> ReducedGradient:
    return ReducedGradient([torch.tensor(values)], weight, 0.0, b"\x01" * len(values))


@pytest.mark.parametrize("left_first", [True, False])
def test_three_parts_add_up_in_either_nesting(left_first: bool) -> None:
    a, b, c = reduced(1.0, 10.0), reduced(2.0, 20.0), reduced(4.0, 40.0, weight=2.0)
    total = (a + b) + c if left_first else a + (b + c)
    total.merge()
    assert total.sums[0].tolist() == [7.0, 70.0]
    assert total.weight == 4.0


def test_merging_twice_adds_once() -> None:
    total = reduced(1.0) + reduced(2.0)
    total.merge()
    total.merge()
    assert total.sums[0].tolist() == [3.0]


def test_a_part_that_went_into_a_sum_cannot_be_used_again() -> None:
    part = reduced(1.0)
    (part + reduced(2.0)).merge()
    with pytest.raises(ConfigError, match="added to another"):
        part.merge()


def test_a_gradient_that_was_stepped_with_cannot_be_added() -> None:
    part = reduced(1.0)
    part.become_mean(1.0)
    with pytest.raises(ConfigError, match="add first, then step"):
        (part + reduced(2.0)).merge()
