"""The counter of synchronising calls: what it counts on a machine without a device, and what not."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.synchronising import Synchronisations
from stretto.groups import SoloGroup

SYNCHRONISING: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool(x.isfinite().all()),
    "if": lambda x: 1 if x.any() else 0,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: np.asarray(x),
    "cpu": lambda x: x.cpu(),
    "cpu and numpy": lambda x: x.cpu().numpy(),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x + 1),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "write by mask": lambda x: x.__setitem__(x > 0, x.sum()),
    "unique": lambda x: x.unique(),
    "result of an operation": lambda x: (2 * x).sum().item(),
    "bytes to the device": lambda x: torch.frombuffer(bytearray(8), dtype=torch.int8).to(x.device),
    "number to the device": lambda x: torch.tensor(1.0, device=x.device),
}
QUIET: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: torch.add(x, 1.0, out=torch.empty_like(x)),
    "choice on the device": lambda x: torch.where(x > 0, x, -x),
    "the same device": lambda x: x.to(x.device),
    "bytes to the device, without waiting": lambda x: torch.frombuffer(bytearray(8), dtype=torch.int8).to(
        x.device, non_blocking=True
    ),
    "another dtype": lambda x: x.to(torch.float64),
    "made there": lambda x: torch.zeros(3, device=x.device),
    "host's own": lambda x: torch.tensor(1.0).add(1).item(),
    "host's array": lambda x: torch.from_numpy(np.ones(3)).tolist(),
    "copied before": lambda x: torch.zeros(2).tolist(),
}


@pytest.mark.parametrize("call", SYNCHRONISING.values(), ids=SYNCHRONISING.keys())
def test_a_call_that_needs_a_result_counts_every_time(call: Callable[[Tensor], object]) -> None:
    counted, x = Synchronisations(), torch.randn(5)
    with counted.watching():
        call(x)
        call(x)
    assert list(counted.lines.values()) == [2]
    assert "testing/test_synchronising.py" in next(iter(counted.lines))


@pytest.mark.parametrize("call", QUIET.values(), ids=QUIET.keys())
def test_a_call_that_leaves_results_where_they_are_does_not_count(call: Callable[[Tensor], object]) -> None:
    counted, x = Synchronisations(), torch.randn(5)
    with counted.watching():
        call(x)
    assert not counted.lines


def test_lanes_of_jobs_are_watched_as_long_as_the_caller_is() -> None:
    counted, x = Synchronisations(), torch.randn(5)
    lane = counted.on(SoloGroup()).lane_runtime(overlaps=True)
    lane.spawn(x.tolist).result()
    with counted.watching():
        lane.spawn(x.tolist).result()
    lane.spawn(x.tolist).result()
    lane.join()
    assert counted.lines.total() == 1
