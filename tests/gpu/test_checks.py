"""The checks for the first half hour on a device hold; where there is none they are rehearsed on processors."""

from typing import Any

import pytest
import torch

from benchmarks.first_half_hour import CHECKS, REHEARSED_BY_TESTS, perform
from tests.processes import run_ranks

IS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if IS_CUDA else "cpu"
ON_DEVICES_ALONE = [name for name, check in CHECKS.items() if check.needs_cuda]


def on_rank(rank: int, name: str) -> dict[str, Any]:
    return perform(name, DEVICE)


def run(name: str) -> None:
    """Run a check, which raises where something is not as it should be."""
    ranks = CHECKS[name].ranks
    run_ranks(ranks or 1, on_rank, name, backend="gloo" if ranks else None)


@pytest.mark.long(keep=2)
@pytest.mark.parametrize("name", REHEARSED_BY_TESTS)
def test_a_check_holds(name: str) -> None:
    run(name)


@pytest.mark.gpu
@pytest.mark.skipif(not IS_CUDA, reason="no CUDA device")
@pytest.mark.parametrize("name", ON_DEVICES_ALONE)
def test_a_check_that_needs_a_device_holds(name: str) -> None:
    run(name)
