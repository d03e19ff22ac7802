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


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: AveragedModel(model).module], ids=["deepcopy", "average"]
)
def test_a_copy_trains_and_saves_by_itself(how: object) -> None:
    model, parallel = in_mid_job()
    with parallel.settled():
        twin = how(model)
    assert parallel.job.model.shown == "estimate"
    twin.state_dict()  # of the job's own model this is an error while it shows an estimate
    steps = parallel.steps
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    twin(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert parallel.steps == steps
    parallel.backward(model(torch.ones(2, 3)).square().mean())
    parallel.finish()
    twin(torch.ones(2, 3))  # also after the job's end


def test_a_model_is_pickled_in_mid_job() -> None:
    model, parallel = in_mid_job()
    content = io.BytesIO()
    with parallel.settled():
        torch.save(model, content)
        content.seek(0)
        loaded = torch.load(content, weights_only=False)
        pairs = zip(loaded.parameters(), model.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    loaded(torch.ones(1, 3)).sum().backward()
    parallel.finish()


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
