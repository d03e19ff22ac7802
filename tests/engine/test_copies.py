"""Copies of a model belong to no job, and hold committed parameters: an estimate is not copied."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import stretto


def in_mid_job() -> tuple[nn.Module, stretto.DataParallel]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    parallel = stretto.DataParallel(model, optimizer, stretto.WeightPrediction(), micro_batches=1)
    for _ in range(3):
        parallel.backward(model(torch.ones(2, 3)).square().mean())
    return model, parallel


TAKERS = {
    "deepcopy": copy.deepcopy,
    "average": AveragedModel,
    "pickle": pickle.dumps,
    "torch.save": lambda module: torch.save(module, io.BytesIO()),
    "state_dict": lambda module: module.state_dict(),
}


@pytest.mark.parametrize("of_part", [False, True], ids=["model", "part"])
@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
def test_no_estimate_leaves_the_model_as_a_copy(take: Callable[[nn.Module], object], of_part: bool) -> None:
    model, parallel = in_mid_job()
    taken = model[2] if of_part else model
    with pytest.raises(stretto.errors.EstimateShown, match=r"rank 0, after step 2: .*parallel\.settled"):
        take(taken)
    with parallel.settled():
        take(taken)
    parallel.backward(model(torch.ones(2, 3)).square().mean())
    parallel.finish()
    take(taken)
