"""A hash of integers from PyTorch operations: it runs on their device, and is equal on every device."""

import torch
from torch import Tensor

_PLACE, *_FACTORS = 0x1E3779B97F4A7C15, 0x36E8FEB86659FD93, 0x20761D6478BD642F
"""Constants of the hash on devices: odd, below 2^63, with random-looking bits."""


def mixed(numbers: Tensor, length: int, first: int = 0, step: int = 0) -> Tensor:
    """Return one number for each row, `(rows,)` int64; equal for equal rows, lengths and seeds.

    Args:
        numbers: `(rows, n)` int64; overwritten.
        length: Length of the data from which the rows were made.
        first: Seed of the first row.
        step: Difference between the seeds of two rows. The device computes the seeds, so nothing is sent.
    """
    # What a number is mixed with is its place, so that two that have changed places show.
    mixed = _mixed(numbers.add_(_series(_PLACE, _PLACE, numbers.device, numbers.size(1)))).sum(1)
    return _mixed(
        mixed.add_(_signed(length * _PLACE)).add_(_series(first, step, numbers.device, len(numbers)))
    )


def _series(first: int, step: int, device: torch.device, count: int) -> Tensor:
    return torch.arange(count, device=device).mul_(_signed(step)).add_(_signed(first))


def _signed(number: int) -> int:
    """Return a number modulo 2^64 as a signed int64."""
    return (number + 2**63) % 2**64 - 2**63


def _mixed(words: Tensor) -> Tensor:
    """Mix each word's bits, in place: different words stay different, and every bit changes many others."""
    for factor in _FACTORS:
        words.bitwise_xor_((words >> 32).bitwise_and_(2**32 - 1)).mul_(factor)
    return words.bitwise_xor_((words >> 32).bitwise_and_(2**32 - 1))
