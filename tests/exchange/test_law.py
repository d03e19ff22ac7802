"""Over any run, what owners received plus what ranks owe is what ranks contributed to rounds that counted."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from stretto.exchange import WIRES, PackedWire
from stretto.strategies import STRATEGIES
from tests.draws import part
from tests.exchange.accounts import Account, Course, error, settled
from tests.wires import OF_GRADIENTS

SUMMING = [
    name for name in STRATEGIES if name not in ("average", "local", "diloco")
]  # whose ranks step with their own gradients
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
PACKED = [name for name in OF_GRADIENTS if isinstance(WIRES[name], PackedWire) and WIRES[name].has_residual]
CONSERVING = [name for name in OF_GRADIENTS if not WIRES[name].is_unbiased]  # of the others: test_unbiased.py


def check(courses: Sequence[Course], place: Path) -> list[Account]:
    accounts = []
    for course in courses:
        parts = settled(course, place / f"{course.seed}")
        assert error(course, parts) <= 1, course
        accounts += itertools.chain.from_iterable(parts)
    return accounts


NODES = ((2, 1), (2, 2), (4, 2), (4, 4), (3, 3), (6, 3), (6, 2))
"""Ranks, and how many of them a node has."""


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(("shift", "wire"), list(enumerate(CONSERVING)))
def test_nothing_is_lost_or_counted_twice_under_any_strategy(shift: int, wire: str, tmp_path: Path) -> None:
    """On one to four ranks, and between nodes."""
    draws = random.Random(wire)
    alike = [(strategy, ranks, None) for strategy in SUMMING for ranks in (1, 1, 2, 2, 3, 3, 4, 4)]
    nodes = NODES[shift:] + NODES[:shift]  # other pairs on every wire
    on_nodes = [(strategy, *shape) for strategy, shape in zip(SUMMING, nodes, strict=True)]
    courses = [
        Course(
            seed=seed,
            strategy=strategy,
            wire=wire,
            world_sizes=(world_size,),
            dtype=draws.choice(DTYPES),
            verified=draws.random() < 0.25,
            ranks_per_node=ranks_per_node,
        )
        for seed, (strategy, world_size, ranks_per_node) in enumerate(part([*alike, *on_nodes]))
    ]
    accounts = check(courses, tmp_path)
    assert sum(account.left_out for account in accounts) > len(courses) / 4
    is_owing = [
        any(bool(residuals.any()) for residuals in account.residuals.values()) for account in accounts
    ]
    assert any(is_owing) == (wire in PACKED)


def test_a_resumed_job_owes_what_was_owed_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    draws = random.Random(0)
    check(
        [
            Course(
                seed=seed,
                strategy=draws.choice(SUMMING),
                wire=PACKED[seed % len(PACKED)],
                world_sizes=world_sizes,
                dtype=draws.choice(DTYPES),
                verified=draws.random() < 0.5,
                ranks_per_node=2 if not any(size % 2 for size in world_sizes) else None,
            )
            for seed, world_sizes in enumerate(
                part(
                    2
                    * [
                        (1, 4),
                        (4, 1),
                        (2, 3),
                        (3, 2),
                        (2, 2),
                        (4, 3, 2),
                        (1, 2, 1),
                        (3, 4),
                        (2, 4),
                        (4, 2, 4),
                    ]
                )
            )
        ],
        tmp_path,
    )
