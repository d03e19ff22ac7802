"""A job that loads an earlier state goes on as a new one that loads it: nothing stays of the course that was left."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import stretto as st
from stretto.strategies import STRATEGIES
from stretto_lab.virtual import VirtualCluster

EVERY = [
    st.LocalSGD(0.5),
    st.DiLoCo(4, fragments=2, delay=1),
    *(kind() for name, kind in STRATEGIES.items() if name not in ("local", "diloco")),
]


def new_job(strategy: st.Strategy, wire: str, group: dist.ProcessGroup) -> st.DataParallel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler, options = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), st.Options(wire=wire)
    return st.DataParallel(
        model, optimizer, strategy, micro_batches=2, scheduler=scheduler, group=group, options=options
    )


def train(parallel: st.DataParallel, updates: int, seed: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    last = parallel.steps + updates
    while parallel.steps < last:
        loss: Tensor = parallel.model(torch.randn(8, 16, generator=generator)).square().mean()
        parallel.backward(size * loss)
    parallel.commit()


@pytest.mark.long(keep=2)
@pytest.mark.parametrize("strategy", EVERY, ids=lambda strategy: strategy.name)
def test_a_job_that_loads_a_state_goes_on_as_a_new_one(strategy: st.Strategy) -> None:
    def program(rank: int, group: dist.ProcessGroup, wire: str) -> list[dict[str, Any]]:
        parallel = new_job(strategy, wire, group)
        train(parallel, 3, seed=rank)
        state = copy.deepcopy(parallel.state_dict())
        train(parallel, 2, seed=10 + rank, size=1e4)  # what a user would go back for
        ended = []
        for job in (parallel, None):
            if job is None:
                job = new_job(strategy, wire, group)
            job.load_state_dict(copy.deepcopy(state))
            train(job, 3, seed=20 + rank)
            job.finish()
            ended.append(copy.deepcopy(job.model.state_dict()))
        return ended

    for wire in ("fp32", "int4"):
        for back, new in VirtualCluster(2).run(functools.partial(program, wire=wire)).values:
            torch.testing.assert_close(back, new, rtol=0, atol=0, msg=f"{wire}: {{}}".format)
