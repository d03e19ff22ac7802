"""What every wire format promises, for values of every size: the laws that error feedback and owners rely on."""

import pytest
import torch
from torch import Tensor

from stretto.errors import ConfigError
from stretto.exchange import BF16, FP32, WIRES, PackedWire, Wire
from stretto.flat import ALIGNMENT
from tests.exchange.values import LARGEST, of_every_size

CASES = 250
OF_AVERAGES = {f"{name} of averages": wire.for_averages for name, wire in WIRES.items()}
FORMATS = {**WIRES, **{name: wire for name, wire in OF_AVERAGES.items() if wire not in WIRES.values()}}
PACKED = {name: wire for name, wire in FORMATS.items() if isinstance(wire, PackedWire)}
OWING = {name: wire for name, wire in PACKED.items() if wire.has_residual}
every_wire = pytest.mark.parametrize("wire", FORMATS.values(), ids=list(FORMATS))
every_packed_wire = pytest.mark.parametrize("wire", PACKED.values(), ids=list(PACKED))
every_wire_that_owes = pytest.mark.parametrize("wire", OWING.values(), ids=list(OWING))
LOST = {"int8": 1 / 254, "int4": 1 / 14, "int2": 1 / 2, "int2 of averages": 7 / 9}
"""By how much of its block's largest value a value can be off: half of an integer; or the largest value itself by as
much as it exceeds the scale, which is most in `UNEVEN`."""
UNEVEN = torch.ones(ALIGNMENT).index_fill_(0, torch.tensor(5), 9.0)


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


@every_wire_that_owes
@pytest.mark.parametrize("largest", [LARGEST, 1e38, torch.finfo(torch.float32).tiny, 2.0**-149])
def test_the_ends_of_float32_neither_overflow_nor_turn(wire: PackedWire, largest: float) -> None:
    values = torch.zeros(ALIGNMENT)
    values[::2], values[1::2] = largest, -largest
    found = there_and_back(values, wire)
    assert bool(found.isfinite().all())
    assert bool((found.sign() * values.sign() >= 0).all())
    assert bool((found.abs() <= values.abs()).all())


@pytest.mark.parametrize("name", OWING)
def test_what_is_lost_is_exactly_what_was_not_sent_a_known_part_and_never_all_of_a_block(name: str) -> None:
    """Of the largest value of the block; and errors do not grow, because a part of every block arrives."""
    generator = torch.Generator().manual_seed(0)
    alike = [torch.randn(ALIGNMENT * 8, generator=generator) ** power for power in (1, 3, 9)]
    for case in range(CASES):
        values = torch.cat([random_values(case), UNEVEN, *alike])
        found = there_and_back(values, OWING[name])
        assert torch.equal(found.double() + (values - found).double(), values.double()), case
        whole = values.double().view(-1, ALIGNMENT)
        lost = whole - found.double().view(-1, ALIGNMENT)
        largest = whole.abs().amax(1, keepdim=True)
        # A scale is at least the smallest normal number, and is rounded down to eight bits.
        bound = (largest * LOST[name]).clamp_min(torch.finfo(torch.float32).tiny / 2) * (1 + 2**-7)
        assert bool((lost.abs() <= bound).all()), case
        is_normal = largest[:, 0] >= torch.finfo(torch.float32).tiny
        # A scale that is rounded down to eight bits costs 2 ** -14 of what arrives.
        left = whole.square().sum(1) * (1 - (1 - 2**-14) / ALIGNMENT)
        assert bool((lost.square().sum(1) <= left)[is_normal].all()), case


def test_averages_in_two_bits_lose_a_fifth_of_the_square_of_normally_distributed_values() -> None:
    """The best scale for each block would lose 0.184."""
    values = torch.randn(ALIGNMENT * 4096, generator=torch.Generator().manual_seed(0))
    lost = values - there_and_back(values, WIRES["int2"].for_averages)
    assert float(lost.square().sum() / values.square().sum()) == pytest.approx(0.186, abs=0.002)


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


@every_wire
def test_averages_take_as_many_bytes_in_a_format_of_the_same_name(wire: Wire) -> None:
    assert (wire.for_averages.name, wire.for_averages.num_bytes(64)) == (wire.name, wire.num_bytes(64))


def test_the_sizes_are_those_that_the_pages_say() -> None:
    assert {name: wire.of(torch.float32).num_bytes(64) / 64 for name, wire in WIRES.items()} == {
        "fp32": 4,
        "bf16": 2,
        "int8": 1 + 1 / 16,
        "int4": 1 / 2 + 1 / 32,
        "int2": 1 / 4 + 1 / 32,
        **{f"rotated{bits}": bits / 8 + 1 / 32 for bits in (4, 3, 2, 1)},
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
