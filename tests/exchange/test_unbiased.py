"""What an unbiased wire brings is, on average over draws, what was contributed; and errors of messages are independent.

The sister of the law that `test_law.py` checks. A mean of n independent errors, each of mean zero, lies beyond five of
its standard deviations in one case of 1.7 million. These are estimated from the errors themselves.
"""

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.exchange import WIRES, Exchange, Rotated
from stretto.exchange.rotated import normal_levels
from stretto.flat import Layout
from stretto.strategies import STRATEGIES
from stretto_lab.virtual import VirtualCluster
from tests.exchange.accounts import Course, settled
from tests.exchange.test_exchange import layout_for, wait
from tests.exchange.values import of_every_size

UNBIASED = {name: wire for name, wire in WIRES.items() if isinstance(wire, Rotated)}
LOST = {"rotated1": 0.564, "rotated2": 0.128, "rotated3": 0.0338, "rotated4": 0.0091}
"""E ‖x̂ - x‖² / ‖x‖². On blocks without end it would be 1 / (1 - D) - 1, with D what the levels lose of a normally
distributed value: 0.571, 0.133, 0.0358, 0.0096. The mean square of a block of 64 is known, so that it loses less."""
SUMMING = [name for name in STRATEGIES if name not in ("average", "local", "diloco")]
DRAWS, RANKS, BLOCKS = 300, 2, 60
every_wire = pytest.mark.parametrize("wire", UNBIASED)


def arrived(values: Tensor, wire: str, stream: str = "sums", round_index: int = 0, rank: int = 0) -> Tensor:
    """What becomes of values, in float64."""
    drawn = UNBIASED[wire].drawn(stream, round_index, rank)
    content = torch.empty(drawn.num_bytes(values.numel()), dtype=torch.uint8)
    drawn.write(values.view(-1), content)
    return drawn.read(content).double().view(values.shape)


def blocks(generator: torch.Generator) -> Tensor:
    """Blocks of every kind, `(BLOCKS, 64)`: dense, with heavy tails, alike, with few values, of every normal size."""
    found = torch.randn(BLOCKS, 64, generator=generator)
    found[10:20] **= 5
    found[20:24] = found[20:24, :1]
    for index, row in enumerate(found[24:40]):
        row[torch.randperm(64, generator=generator)[1 + index % 4 :]] = 0.0
    found[36:40] = found[36:40].sign()
    for row in found[40:]:
        row[:] = of_every_size(64, generator, largest=1e37)
        row[0] = max(float(row[0]), 2.0**-120)  # below, a scale is zero mostly: see the test after the next
    return found


def directions(values: Tensor) -> list[Tensor]:
    """Unit vectors that depend on a block alone: along it; at right angles to it, to its small or its large values.

    An estimate that is biased and keeps signs and order is off along one of these.
    """
    sizes = values.double() / values.double().abs().amax(-1, keepdim=True)
    found = [sizes, sizes.sign(), sizes**3]
    along = sizes / sizes.norm(dim=-1, keepdim=True)
    others = [one - (one * along).sum(-1, keepdim=True) * along for one in found[1:]]
    return [along, *(one / one.norm(dim=-1, keepdim=True).clamp_min(1e-9) for one in others)]


def deviations(errors: Tensor) -> float:
    """How many standard deviations the mean of independent errors is from zero."""
    return float(errors.mean().abs() / (errors.std() / math.sqrt(len(errors))).clamp_min(1e-12))


@pytest.mark.long(keep=1)
@every_wire
def test_on_average_over_draws_what_arrives_is_what_was_sent(wire: str) -> None:
    """36,000 cases; those that share a uniform rotation are added up before they count as one."""
    errors: list[list[Tensor]] = [[], [], []]
    lost = []
    for number in range(DRAWS):
        values = blocks(torch.Generator().manual_seed(number))
        sizes = values.double().norm(dim=-1, keepdim=True)
        found = [(arrived(values, wire, "sums", number, rank) - values) / sizes for rank in range(RANKS)]
        for kind, direction in enumerate(directions(values)):
            errors[kind].append(sum((one * direction).sum() for one in found))
        lost.append(torch.cat([one.square().sum(-1) for one in found]).mean())
    assert [kind for kind in errors if not deviations(torch.stack(kind)) < 5] == []
    assert float(torch.stack(lost).mean()) == pytest.approx(LOST[wire], rel=0.02)


@every_wire
def test_along_a_block_nothing_is_lost_but_what_its_scale_is_rounded_by(wire: str) -> None:
    for number in range(50):
        values = blocks(torch.Generator().manual_seed(number))[:40]
        along = (arrived(values, wire, "sums", number) * values).sum(-1) / values.double().square().sum(-1)
        assert bool(((along - 1).abs() < 2.0**-7).all()), number


@every_wire
def test_values_below_the_smallest_normal_number_arrive_on_average(wire: str) -> None:
    """A scale that 16 bits cannot hold is zero mostly, and the smallest number that they hold now and then."""
    values = torch.full((2000, 64), 2.0**-135)
    found = torch.stack([arrived(values, wire, "sums", number).mean() for number in range(60)]) * 2.0**135
    assert deviations(found - 1) < 5


def test_a_message_may_be_of_any_length() -> None:
    """More blocks than 2 ** 31 / 40503, by which the rounding of scales goes on from block to block."""
    values = torch.ones(54_000, 64)
    assert float((arrived(values, "rotated4") - 1).square().mean()) < 2 * LOST["rotated4"]


def test_ends_of_float32_neither_overflow_nor_vanish() -> None:
    for wire, largest in itertools.product(UNBIASED, (torch.finfo(torch.float32).max, 1e38)):
        values = torch.zeros(4, 64)
        values[0, 5], values[1], values[2, ::2], values[3, :2] = largest, largest, -largest, largest
        found = arrived(values, wire)
        assert bool(found.isfinite().all())
        along = (found * values.double()).sum(-1) / values.double().square().sum(-1)
        assert bool((along > 0.5).all())  # where all are the largest number, what would exceed it ends there


def random_flats(layout: Layout) -> list[Tensor]:
    """Flat sets whose padding is zero."""
    flats = [torch.zeros(one.numel, dtype=one.accumulation_dtype) for one in layout.sets]
    for slot in layout.slots:
        values = torch.randn(slot.numel, generator=torch.Generator().manual_seed(slot.index))
        flats[slot.set_index][slot.start : slot.stop] = values
    return flats


def contributions(rank: int, group: Any, wire: str, rounds: int) -> Tensor:
    """Sums of what ranks contribute who contribute the same, less what they should be, `(rounds, numel)`."""
    layout = layout_for(group.size())
    exchange = Exchange(group, layout, WIRES[wire], wait)
    flats = random_flats(layout)
    errors = []
    for number in range(rounds):
        exchange.begin_round(number)
        sums = [torch.empty(bucket.numel) for bucket in layout.buckets]
        exchange.all_reduce(flats, sums)
        whole = [flats[b.set_index][b.start : b.stop].float() * group.size() for b in layout.buckets]
        errors.append(torch.cat(sums) - torch.cat(whole))
    assert exchange.residuals == []
    return torch.stack([*errors, torch.cat(whole)])


@pytest.mark.long(keep=1)
@every_wire
def test_errors_of_ranks_and_of_rounds_that_send_the_same_are_independent(wire: str) -> None:
    """So that of N ranks over R rounds N·R times the error of one is left, and not its square."""
    ranks, rounds = 8, 16
    *errors, whole = VirtualCluster(ranks).run(lambda r, g: contributions(r, g, wire, rounds)).values[0]
    one = LOST[wire] * float(whole.square().sum()) / ranks**2
    of_rounds = [float(error.square().sum()) / (ranks * one) for error in errors]
    of_all = float(torch.stack(errors).sum(0).square().sum()) / (ranks * rounds * one)
    # A sum comes back in bf16: 2 ** -9 of itself, which is 8 times as large as what one rank sends.
    rounding = (ranks * 2.0**-9) ** 2 / LOST[wire]
    assert 0.75 < sum(of_rounds) / rounds < 1.25 + rounding
    assert 0.5 < of_all < 2 + rounds * rounding


@pytest.mark.long(keep=1)
@every_wire
def test_under_any_strategy_owners_receive_on_average_what_was_contributed(wire: str, tmp_path: Path) -> None:
    draws = random.Random(wire)
    shares, errors = [], []
    for seed, (strategy, world_size) in enumerate(itertools.product(SUMMING, (1, 2, 2, 3, 4))):
        each = draws.choice([None, 1, world_size]) if world_size > 1 else None
        course = Course(
            seed, strategy, wire, (world_size,), torch.float32, draws.random() < 0.3, ranks_per_node=each
        )
        (accounts,) = settled(course, tmp_path / f"{seed}")
        assert not any(
            bool(residuals.any()) for account in accounts for residuals in account.residuals.values()
        )
        for name in accounts[0].contributed:
            received = sum(account.received[name] for account in accounts)
            contributed = sum(account.contributed[name] for account in accounts)
            squares = sum(account.squares.get(name, torch.zeros(1)) for account in accounts)
            if each == world_size or float(squares.sum()) < 1e-60:
                continue  # ranks of one node are added before they are packed
            # An error is as large in all directions at right angles to its block, of which padding is left out.
            foreseen = sum(float(b.sum()) * (len(b) - 1) / 63 for b in squares.split(64))
            error = received - contributed
            errors.append(float((error * contributed.sign()).sum() / foreseen**0.5) / error.numel() ** 0.5)
            shares.append(float(error.square().sum()) / foreseen)
    assert deviations(torch.tensor(errors)) < 5
    assert deviations(torch.tensor(shares) - LOST[wire]) < 5


def test_what_follows_from_sums_is_sent_with_another_rotation() -> None:
    values = torch.randn(64)
    assert not torch.equal(arrived(values, "rotated2", "sums"), arrived(values, "rotated2", "changes"))


def test_levels_are_the_means_of_the_values_that_are_nearest_to_them() -> None:
    """Max, table 1."""
    assert normal_levels(1) == pytest.approx([-0.7980, 0.7980], abs=2e-4)
    assert normal_levels(2) == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=5e-4)
    assert normal_levels(3)[4:] == pytest.approx([0.2451, 0.7560, 1.344, 2.152], abs=5e-4)
    assert normal_levels(4)[8:] == pytest.approx(
        [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], abs=5e-4
    )


def test_a_users_autocast_and_default_dtype_change_nothing() -> None:
    values = torch.randn(4, 64)
    expected = arrived(values, "rotated3", round_index=5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = arrived(values, "rotated3", round_index=5)
    assert torch.equal(found, expected)
