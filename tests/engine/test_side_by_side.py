"""Buffers compared side by side: the same as one by one, for whatever a module may hold."""

import random

import pytest
import torch
from torch import Tensor

from stretto.engine.buffer_sync import moved
from stretto.engine.buffers import (
    KIND,
    VALUE,
    Buffer,
    are_alike,
    changed_since,
    changes_of,
    copies_of,
    remain_finite,
)
from tests.draws import seeds

SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0)
SHAPES = ((), (0,), (1,), (5,), (3, 4), (2, 1, 3))
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def drawn(draw: random.Random) -> Buffer:
    """Return a buffer of some kind, or none."""
    if draw.random() < 0.1:
        return None
    generator = torch.Generator().manual_seed(draw.randrange(2**30))
    value = torch.randn(draw.choice(SHAPES), generator=generator).to(draw.choice(DTYPES))
    if value.numel() and draw.random() < 0.3:
        value.view(-1)[draw.randrange(value.numel())] = draw.choice(SPECIAL)
    return value.T if value.dim() == 2 and draw.random() < 0.5 else value


def varied(draw: random.Random, value: Buffer) -> Buffer:
    """Return the same, nearly the same, or something else."""
    choice = draw.random()
    if value is None or choice < 0.15:
        return drawn(draw)
    copy = value.clone()
    if value.numel() and choice < 0.5:
        copy.reshape(-1)[draw.randrange(value.numel())] += 1
    return copy


def naive_change(agreed: Buffer, value: Buffer) -> int:
    if not are_alike(agreed, value):
        return KIND
    return 0 if agreed is None or value is None or torch.equal(agreed, value) else VALUE


def naive_moved(now: Tensor, before: Tensor, average: Tensor, is_first: bool) -> Tensor:
    if torch.equal(now, before) or not are_alike(average, now):
        return average
    if is_first:
        return now if torch.equal(average, before) else average
    target = now + (average - before)
    return torch.where(target.isfinite(), target, now)


def are_same_bits(left: Buffer, right: Buffer) -> bool:
    if left is None or right is None or not are_alike(left, right):
        return left is right
    return left.contiguous().view(-1).view(torch.uint8).equal(right.contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize("seed", seeds(40))
def test_what_is_found_side_by_side_is_what_is_found_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    agreed = [drawn(draw) for _ in range(draw.randint(1, 12))]
    values, sound = ([varied(draw, value) for value in agreed] for _ in range(2))
    assert [pair for pair in zip(copies_of(values), values, strict=True) if not are_same_bits(*pair)] == []

    changes = changes_of(agreed, values)
    assert list(changes) == list(map(naive_change, agreed, values))

    broken = [
        bool(change and (~value.isfinite() & before.isfinite()).any())
        for change, value, before in zip(changes, values, sound, strict=True)
        if value is not None and before is not None and value.shape == before.shape
    ]
    assert bool(remain_finite(values, sound, changed_since(agreed, values))) is not any(broken)

    averages = {index: varied(draw, value) for index, value in enumerate(values) if draw.random() < 0.8}
    first = [index for index in averages if draw.random() < 0.3]
    become = moved(values, agreed, averages, first)
    expected = {
        index: naive_moved(now, before, average, index in first)
        for index, average in averages.items()
        if (now := values[index]) is not None
        and (before := agreed[index]) is not None
        and average is not None
        and are_alike(now, before)
    }
    assert become.keys() == expected.keys()
    assert [index for index in expected if not are_same_bits(become[index], expected[index])] == []
