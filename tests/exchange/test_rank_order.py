"""The sum over ranks is the loop over ranks, to the bit."""

import pytest
import torch
from torch import Tensor

from stretto.exchange.exchange import sum_in_rank_order


def loop(contributions: Tensor, dtype: torch.dtype) -> Tensor:
    total = contributions[0].to(dtype)
    for contribution in contributions[1:]:
        total = total + contribution
    return total


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("world_size", "numel"), [(1, 64), (2, 64), (30, 1), (9, 4096), (256, 64)])
def test_terms_are_added_one_by_one_in_rank_order(world_size: int, numel: int, source: torch.dtype) -> None:
    contributions = (torch.randn(world_size, numel) * 10.0 ** torch.randint(-6, 6, (world_size, 1))).to(
        source
    )
    contributions[:, ::3] = -0.0
    total = torch.empty(numel, dtype=torch.promote_types(source, torch.float32))
    sum_in_rank_order(contributions, total)
    assert bits(total) == bits(loop(contributions, total.dtype))
