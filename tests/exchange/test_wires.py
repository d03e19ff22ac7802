"""What every wire format promises, for values of every size: the laws that error feedback and owners rely on."""

import pytest
import torch
from torch import Tensor

from stretto.errors import ConfigError
from stretto.exchange import BF16, FP32, WIRES, PackedWire, Wire
from stretto.flat import ALIGNMENT
from tests.exchange.values import LARGEST, of_every_size

CASES = 250
PACKED = [wire for wire in WIRES.values() if isinstance(wire, PackedWire)]
every_wire = pytest.mark.parametrize("wire", WIRES.values(), ids=list(WIRES))
every_packed_wire = pytest.mark.parametrize("wire", PACKED, ids=[wire.name for wire in PACKED])
LEVELS = {"int8": 127, "int4": 7, "int2": 1}
"""The largest integer."""


def there_and_back(values: Tensor, wire: Wire) -> Tensor:
    content = torch.full((wire.of(values.dtype).num_bytes(values.numel()),), 171, dtype=torch.uint8)
    before = values.clone()
    wire.of(values.dtype).write(values, content)
    assert torch.equal(values.nan_to_num(), before.nan_to_num())
    return wire.of(values.dtype).read(content)


def random_values(case: int) -> Tensor:
    generator = torch.Generator().manual_seed(case)
    numel = ALIGNMENT * int(torch.randint(1, 9, (), generator=generator))
    return of_every_size(numel, generator)


@every_wire
def test_finite_values_stay_finite_and_zeros_stay_zeros(wire: Wire) -> None:
    for case in range(CASES):
        values = random_values(case).clamp(-3.38e38, 3.38e38)  # the largest value of bf16 is 3.39e38
        found = there_and_back(values, wire)
        assert bool(found.isfinite().all()), case
        for block, arrived in zip(values.view(-1, ALIGNMENT), found.view(-1, ALIGNMENT), strict=True):
            assert bool(block.any()) or not bool(arrived.any()), case


@every_packed_wire
@pytest.mark.parametrize("largest", [LARGEST, 1e38, torch.finfo(torch.float32).tiny, 2.0**-149])
def test_the_ends_of_float32_neither_overflow_nor_turn(wire: PackedWire, largest: float) -> None:
    values = torch.zeros(ALIGNMENT)
    values[::2], values[1::2] = largest, -largest
    found = there_and_back(values, wire)
    assert bool(found.isfinite().all())
    assert bool((found.sign() * values.sign() >= 0).all())
    assert bool((found.abs() <= values.abs()).all())


@every_packed_wire
def test_what_is_lost_and_what_is_sent_are_exactly_what_was_there(wire: PackedWire) -> None:
    for case in range(CASES):
        values = random_values(case)
        found = there_and_back(values, wire)
        assert torch.equal(found.double() + (values - found).double(), values.double()), case


@every_packed_wire
def test_a_value_is_off_by_half_a_step_of_its_block_at_most(wire: PackedWire) -> None:
    for case in range(CASES):
        values = random_values(case)
        lost = (values.double() - there_and_back(values, wire).double()).abs().view(-1, ALIGNMENT)
        largest = values.double().abs().view(-1, ALIGNMENT).amax(1, keepdim=True)
        # Half a scale, and for the largest value what a scale that was rounded down to eight bits cannot reach.
        tiny = torch.finfo(torch.float32).tiny
        bound = (largest / LEVELS[wire.name]).clamp_min(tiny) / 2 * (1 + 2**-7)
        assert bool((lost <= bound).all()), case


@every_packed_wire
def test_a_value_that_is_not_finite_is_seen_by_the_owner_in_its_block_alone(wire: PackedWire) -> None:
    for case in range(CASES):
        values = random_values(case)
        place = case % values.numel()
        whole = there_and_back(values, wire).view(-1, wire.block)
        values[place] = (torch.nan, torch.inf, -torch.inf)[case % 3]
        found = there_and_back(values, wire).view(-1, wire.block)
        others = torch.arange(len(found)) != place // wire.block
        assert not bool(found[place // wire.block].isfinite().all()), case
        assert torch.equal(found[others], whole[others]), case


@every_wire
def test_nothing_is_packed_into_nothing(wire: Wire) -> None:
    assert wire.num_bytes(0) == 0
    assert there_and_back(torch.zeros(0), wire).numel() == 0


def test_the_sizes_are_those_that_the_pages_say() -> None:
    assert {name: wire.of(torch.float32).num_bytes(64) / 64 for name, wire in WIRES.items()} == {
        "fp32": 4,
        "bf16": 2,
        "int8": 1 + 1 / 16,
        "int4": 1 / 2 + 1 / 32,
        "int2": 1 / 4 + 1 / 32,
    }


def test_a_plain_wire_is_never_wider_than_what_is_stored_and_float64_stays_float64() -> None:
    assert FP32.of(torch.float64).dtype == torch.float64
    assert FP32.of(torch.float32).dtype == torch.float32
    assert FP32.of(torch.bfloat16).dtype == torch.bfloat16
    assert {BF16.of(dtype).dtype for dtype in (torch.float64, torch.float32, torch.bfloat16)} == {
        torch.bfloat16
    }


def test_a_block_that_would_lie_in_two_parameters_is_refused_where_the_class_is_made() -> None:
    with pytest.raises(ConfigError, match="a block that divides 64, found 96"):
        type("Ninety", (PackedWire,), {"block": 96})
