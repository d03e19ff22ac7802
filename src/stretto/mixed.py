"""A hash of whole numbers from operations of torch: it runs where they are, and is equal on every device."""

import torch
from torch import Tensor

_PLACE, *_FACTORS = 0x1E3779B97F4A7C15, 0x36E8FEB86659FD93, 0x20761D6478BD642F
"""Of the hash on devices: odd, below 2^63, with bits that look drawn."""


def mixed(numbers: Tensor, length: int, first: int = 0, step: int = 0) -> Tensor:
    """Return one number of each row, `(rows,)` int64; the same for the same row, length and seed.

    Args:
        numbers: `(rows, n)` int64; overwritten.
        length: Of what the rows were made of.
        first: Seed of the first row.
        step: From one row's seed to the next. The device makes them itself, so nothing is sent.
    """
    # What a number is mixed with is its place, so that two that have changed places show.
    mixed = _mixed(numbers.add_(_series(_PLACE, _PLACE, numbers.device, numbers.size(1)))).sum(1)
    return _mixed(
        mixed.add_(_signed(length * _PLACE)).add_(_series(first, step, numbers.device, len(numbers)))
    )


def _series(first: int, step: int, device: torch.device, count: int) -> Tensor:
    return torch.arange(count, device=device).mul_(_signed(step)).add_(_signed(first))


def _signed(number: int) -> int:
    """Return a number modulo 2^64 as int64 holds it."""
    return (number + 2**63) % 2**64 - 2**63


def _mixed(words: Tensor) -> Tensor:
    """Mix each word's bits, in place: different words stay different, and every bit changes many."""
    for factor in _FACTORS:
        words.bitwise_xor_((words >> 32).bitwise_and_(2**32 - 1)).mul_(factor)
    return words.bitwise_xor_((words >> 32).bitwise_and_(2**32 - 1))
