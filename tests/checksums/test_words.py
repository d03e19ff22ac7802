"""Comparison by bytes."""

import pytest
import torch

from stretto.checksums import same_bytes


def test_zeros_of_either_sign_are_not_the_same_bytes() -> None:
    assert not same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_what_is_not_a_number_is_the_same_as_its_copy() -> None:
    values = torch.tensor([float("nan"), 1.0, 2.0])
    assert same_bytes(values, values.clone())


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 100])
def test_a_change_of_any_byte_tells_at_any_length_and_alignment(length: int, start: int) -> None:
    content = torch.arange(length + 1, dtype=torch.uint8)[start : start + length]
    for index in range(length):
        other = content.clone()
        other[index] ^= 1
        assert not same_bytes(content, other)
