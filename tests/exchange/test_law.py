"""Over any run, what owners received plus what ranks owe is what ranks contributed to rounds that counted."""

import functools
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stretto.exchange import WIRES, PackedWire
from stretto.exchange.feedback import ErrorFeedback
from stretto.flat import Layout, plan_layout
from stretto.strategies import STRATEGIES
from tests.exchange.accounts import SHAPES, Account, Course, error, settled
from tests.exchange.values import of_every_size
from tests.wires import OF_GRADIENTS

SUMMING = [
    name for name in STRATEGIES if name not in ("average", "local", "diloco")
]  # whose ranks step with their own gradients
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
PACKED = [name for name in OF_GRADIENTS if isinstance(WIRES[name], PackedWire) and WIRES[name].owes]
CONSERVING = [name for name in OF_GRADIENTS if not WIRES[name].is_unbiased]  # of the others: test_unbiased.py


def check(courses: Sequence[Course], place: Path) -> list[Account]:
    accounts = []
    for course in courses:
        parts = settled(course, place / f"{course.seed}")
        assert error(course, parts) <= 1, course
        accounts += itertools.chain.from_iterable(parts)
    return accounts


@pytest.mark.parametrize("wire", CONSERVING)
def test_nothing_is_lost_or_counted_twice_under_any_strategy_on_one_to_four_ranks(
    wire: str, tmp_path: Path
) -> None:
    draws = random.Random(wire)
    courses = [
        Course(
            seed=seed,
            strategy=strategy,
            wire=wire,
            world_sizes=(world_size,),
            dtype=draws.choice(DTYPES),
            verified=draws.random() < 0.25,
        )
        for seed, (strategy, world_size) in enumerate(itertools.product(SUMMING, (1, 1, 2, 2, 3, 3, 4, 4)))
    ]
    accounts = check(courses, tmp_path)
    assert len(courses) * len(CONSERVING) >= 200
    assert sum(account.left_out for account in accounts) > len(courses) / 4
    is_owing = [any(bool(owed.any()) for owed in account.owed.values()) for account in accounts]
    assert any(is_owing) == (wire in PACKED)


@pytest.mark.parametrize(("shift", "wire"), list(enumerate(CONSERVING)))
def test_nothing_is_lost_or_counted_twice_between_nodes(shift: int, wire: str, tmp_path: Path) -> None:
    draws = random.Random(wire)
    nodes = [(2, 1), (2, 2), (4, 2), (4, 4), (3, 3), (6, 3), (6, 2)]
    courses = [
        Course(
            seed=seed,
            strategy=strategy,
            wire=wire,
            world_sizes=(world_size,),
            dtype=draws.choice(DTYPES),
            verified=draws.random() < 0.5,
            ranks_per_node=ranks_per_node,
        )
        for seed, (strategy, (world_size, ranks_per_node)) in enumerate(
            zip(SUMMING, nodes[shift:] + nodes[:shift], strict=True)  # other pairs on every wire
        )
    ]
    accounts = check(courses, tmp_path)
    is_owing = [any(bool(owed.any()) for owed in account.owed.values()) for account in accounts]
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
                [(1, 4), (4, 1), (2, 3), (3, 2), (2, 2), (4, 3, 2), (1, 2, 1), (3, 4), (2, 4), (4, 2, 4)]
            )
        ],
        tmp_path,
    )


# The same without a job: many more rounds, resumes and changes of the number of ranks.


@functools.cache
def planned(world_size: int, dtype: torch.dtype) -> Layout:
    model = nn.ParameterDict({f"p{i}": nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(SHAPES)})
    model = model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return plan_layout(model, optimizer, world_size=world_size, bucket_bytes=512, widen=False)[0]


def by_parameter(layout: Layout, flat: Tensor) -> Tensor:
    """What is in the parameters' own elements, one after the other."""
    return torch.cat(
        [flat[slot.start : slot.stop].double() for slot in sorted(layout.slots, key=lambda s: s.name)]
    )


@pytest.mark.parametrize("wire", PACKED)
def test_debts_survive_every_sequence_of_rounds_resumes_and_world_sizes(wire: str) -> None:
    for case in range(100):
        draws, generator = random.Random(case), torch.Generator().manual_seed(case)
        dtype, format = draws.choice(DTYPES), WIRES[wire]
        layout = planned(draws.randint(1, 4), dtype)
        ranks = [ErrorFeedback(layout, format) for _ in range(layout.world_size)]
        contributed = received = size = torch.zeros(())
        rounds = draws.randint(1, 6)
        for _ in range(rounds):
            if draws.random() < 0.3:
                states = [rank.state_dict() for rank in ranks]
                layout = planned(draws.randint(1, 4), dtype)
                ranks = [ErrorFeedback(layout, format) for _ in range(layout.world_size)]
                for number, rank in enumerate(ranks):
                    rank.load_state_dicts(states[number :: len(ranks)])
            counts, keeps = draws.random() < 0.7, draws.random() < 0.5
            for rank in ranks:
                used = [draws.random() < 0.6 for _ in layout.slots]
                flat = torch.zeros(layout.sets[0].numel, dtype=dtype)
                for slot in layout.slots:
                    if used[slot.index]:
                        values = of_every_size(slot.numel, generator, largest=3e37)
                        flat[slot.start : slot.stop] = values.to(dtype)
                own = by_parameter(layout, flat)
                (sent,) = rank.begin([flat], used, keeps=keeps)
                for index in range(len(layout.buckets)):
                    rank.add(index)
                assert not keeps or torch.equal(by_parameter(layout, flat), own)
                content = torch.empty(format.num_bytes(sent.numel()), dtype=torch.uint8)
                format.write(sent, content)
                if counts:
                    received = received + by_parameter(layout, format.read(content))
                    contributed = contributed + own
                    size = size + own.abs().amax()
                    rank.settle()
        owed = sum(by_parameter(layout, _flat(layout, rank)) for rank in ranks)
        # Every contribution is rounded once to float32 when the error is added, and debts when they are taken over.
        bound = 2 * 1.2 * 2.0**-24 * size + 12 * 2.0**-149
        assert bool(((received + owed - contributed).abs() <= bound).all()), case


def _flat(layout: Layout, rank: ErrorFeedback) -> Tensor:
    flat = torch.zeros(layout.sets[0].numel, dtype=torch.float64)
    for slot in layout.slots:
        flat[slot.start : slot.stop] = rank.state_dict()[slot.name].flatten()
    return flat
