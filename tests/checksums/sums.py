"""Whether sums of tensors tell them apart."""

import torch

from stretto.checksums import Sums


def are_alike(one: Sums, other: Sums) -> bool:
    """Whether lengths and all sums are the same."""
    same = torch.equal(one.rows, other.rows) and torch.equal(one.columns, other.columns)
    return one.num_bytes == other.num_bytes and same
