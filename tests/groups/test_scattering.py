"""The reduce-scatter that jobs use on Gloo has the bits of Gloo's own."""

import random

import pytest
import torch
import torch.distributed as dist

from stretto.groups.collectives import method_of
from tests.processes import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
REDUCTIONS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX)


def scattered(rank: int) -> None:
    """Random tensors, by both; all ranks draw the same shapes."""
    group, rng = dist.group.WORLD, random.Random(0)
    for _ in range(40):
        shape = (rng.randint(1, 9), rng.randint(1, 3000)) if rng.random() < 0.5 else (rng.randint(1, 20000),)
        dtype, options = rng.choice(DTYPES), dist.ReduceScatterOptions()
        options.reduceOp = rng.choice(REDUCTIONS)
        draws = torch.Generator().manual_seed(rng.randrange(10**6) + rank)
        values = torch.randn(shape[0] * dist.get_world_size(), *shape[1:], generator=draws).to(dtype)
        before, ours, theirs = (
            values.clone(),
            torch.empty(shape, dtype=dtype),
            torch.empty(shape, dtype=dtype),
        )
        method_of(group, "reduce_scatter_single")(ours, values, options).wait()
        dist.reduce_scatter_tensor(theirs, values, options.reduceOp)
        assert torch.equal(ours, theirs), (shape, dtype)
        assert torch.equal(values, before)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_has_the_bits_of_gloos_own_and_leaves_its_input(ranks: int) -> None:
    run_ranks(ranks, scattered)
