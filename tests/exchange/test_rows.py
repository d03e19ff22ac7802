"""The bits of a row depend on its values and on who sends it, not on what is packed beside it, nor on who computes."""

import itertools
import random
import sys

import pytest
import torch
from torch import Tensor

from stretto.exchange import WIRES, PackedWire
from stretto.exchange.fused import FusedWire
from stretto.flat import ALIGNMENT
from tests.draws import draws
from tests.exchange.fused import FUSED, same
from tests.exchange.values import of_every_size

DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.float16)
PACKED = [wire for wire in WIRES.values() if isinstance(wire, PackedWire)]
ROTATED = [wire for wire in PACKED if wire.is_unbiased]


def written(wire: PackedWire, rows: Tensor) -> Tensor:
    """What each row becomes, `(rows, bytes)`."""
    content = torch.full((wire.num_bytes(rows.numel()),), 171, dtype=torch.uint8)
    wire.write(rows.view(-1), content)
    return content.view(len(rows), -1)


def random_rows(rng: random.Random) -> Tensor:
    """Rows of random number, length, dtype and sizes of values, some of them zeros, or not finite."""
    count, blocks = rng.choice(
        [(1, 700), (2, 513), (3, 5), (17, 1), (33, 4), (rng.randint(1, 40), rng.randint(1, 40))]
    )
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    alike = torch.randn(count * blocks * ALIGNMENT, generator=generator)
    rows = rng.choice([alike, of_every_size(len(alike), generator)]).view(count, -1)
    if rng.random() < 0.3:
        rows[rng.randrange(count)] = rng.choice([0.0, torch.inf, torch.nan])
    return rows.to(rng.choice(DTYPES))


@pytest.mark.parametrize("wire", PACKED, ids=lambda wire: wire.name)
def test_a_row_alone_has_the_bits_that_it_has_among_others(wire: PackedWire) -> None:
    for seed in draws(100):
        rng = random.Random(seed)
        rows, stream, number = random_rows(rng), rng.choice(["sums", "changes"]), rng.randrange(10**6)
        rank, senders = rng.randrange(2000), [rng.randrange(2000) for _ in rows]
        together = written(wire.drawn(stream, number, *[rank] * len(rows)), rows)
        several = rng.sample(range(len(rows)), rng.randint(1, len(rows)))
        found = written(wire.drawn(stream, number, *[rank] * len(several)), rows[several])
        assert torch.equal(found, together[several]), seed

        read = wire.drawn(stream, number, *senders).read(together.view(-1)).view(len(rows), -1)
        of_these = wire.drawn(stream, number, *[senders[row] for row in several])
        found = of_these.read(together[several].reshape(-1)).view(len(several), -1)
        assert same(found, read[several]), seed


@pytest.mark.parametrize("wire", FUSED, ids=lambda wire: f"{type(wire).__name__} {wire.name}")
def test_without_a_gpu_and_compiled_a_pass_has_the_bits_of_torchs_operations(wire: FusedWire) -> None:
    for seed in draws(100):
        rng = random.Random(seed)
        rows = random_rows(rng)
        drawn = wire.drawn("sums", seed, *range(seed, seed + len(rows)))
        expected = torch.zeros(rows.numel() // ALIGNMENT, wire.block_bytes, dtype=torch.uint8)
        drawn.pack(rows.to(torch.float32).view(-1, ALIGNMENT), expected)
        assert torch.equal(written(drawn, rows).view_as(expected), expected), seed
        assert same(drawn.read(expected.view(-1)), drawn.unpack(expected).view(-1)), seed
    assert "stretto.exchange.kernels" not in sys.modules


@pytest.mark.parametrize("wire", ROTATED, ids=lambda wire: wire.name)
def test_products_are_exact_so_that_no_order_of_additions_changes_them(wire: PackedWire) -> None:
    """Blocks along which sums are largest: alike, with one value, or along a row of the rotation."""
    for seed, rank in itertools.product(draws(20), range(3)):
        drawn = wire.drawn("sums", seed, rank)
        turn, *_ = drawn._own(torch.device("cpu"))
        blocks = torch.cat([turn.t(), turn.t().sign(), turn, torch.eye(ALIGNMENT), torch.ones(1, ALIGNMENT)])
        steps = (blocks / blocks.norm(dim=-1, keepdim=True) * 4000 + 0.999).floor()
        exact = steps.double() @ turn.double()
        assert torch.equal((steps @ turn).double(), exact), seed
        content = written(drawn, blocks.view(1, -1))
        # What arrives is a scale times whole numbers of units of 2^-20.
        arrived = drawn.read(content.view(-1)).view_as(blocks).double()
        scales = content.view(len(blocks), -1)[:, -2:].contiguous().view(torch.bfloat16).double()
        units = arrived / scales * 2.0**20
        assert float(units.abs().max()) < 2**24, seed
