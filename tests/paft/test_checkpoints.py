"""A checkpoint of replicas that differ but should not: exact for the same ranks, their mean for everyone else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

import stretto as st
from stretto import checkpoint
from stretto_lab.faults import Fault, FaultPlan, Injector, strike_memory
from stretto_lab.virtual import VirtualCluster
from tests.paft.noisy import flat, network, same, values

SAVED_AT, UPDATES = 3, 12
STRATEGIES = {
    "sync": st.PAFTSync(interval=4),
    "sync, state averaged": st.PAFTSync(interval=4, state=True),
    "dyn": st.PAFTDyn(first=2, maximum=9),
    "sync, an average due beside the next gradients": st.PAFTSync(interval=3, overlap=True),
    "dyn, an average due beside the next gradients": st.PAFTDyn(
        first=3, maximum=9, estimate="paper", overlap=True
    ),
}

SCALED = Fault(site="reduced gradient", rank=1, lasts="sticky", extent="all", pattern="scale")


class Job:
    """One rank's job, in which rank 1 gets other gradients, and during the second update other masters."""

    def __init__(self, rank: int, group: dist.ProcessGroup, strategy: st.Strategy) -> None:
        self.rank = rank
        self.model = network()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        options = st.Options(bucket_bytes=2**20)
        self.parallel = st.DataParallel(
            self.model, optimizer, strategy, micro_batches=1, group=group, options=options
        )
        strike_memory(self.parallel, Injector(FaultPlan((SCALED,)), rank))
        self.records: list[tuple[Any, ...]] = []

    def train(self, first: int, last: int) -> "Job":
        for index in range(first, last):
            if index == 2 and self.rank == 1:
                self.parallel.job.sharded.masters[0].add_(0.01)
            generator = torch.Generator().manual_seed(10 * index + self.rank)
            update = self.parallel.backward(
                self.model(torch.randn(4, 6, generator=generator)).square().mean()
            )
            assert update is not None
            self.records.append((update.gap, update.interval, update.noise, update.divergence, update.loss))
        return self


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_same_ranks_go_on_to_the_bit(name: str, tmp_path: Path) -> None:
    strategy = STRATEGIES[name]

    def straight(rank: int, group: dist.ProcessGroup) -> tuple[list[Tensor], Any, bool]:
        job = Job(rank, group, strategy).train(0, SAVED_AT)
        checkpoint.save(job.parallel, tmp_path)
        differed = "replica" in job.parallel.job.replica.state_dict()
        job.train(SAVED_AT, UPDATES)
        job.parallel.finish()
        return values(job.model), job.records[SAVED_AT:], differed

    def resumed(rank: int, group: dist.ProcessGroup) -> tuple[list[Tensor], Any]:
        job = Job(rank, group, strategy)
        checkpoint.load(job.parallel, tmp_path)
        job.train(SAVED_AT, UPDATES)
        job.parallel.finish()
        return values(job.model), job.records

    expected, found = (VirtualCluster(3).run(program).values for program in (straight, resumed))
    for (values_of, records, differed), (values_now, records_now) in zip(expected, found, strict=True):
        assert differed
        assert same(values_of, values_now)
        assert records == records_now


def test_other_ranks_begin_with_the_mean(tmp_path: Path) -> None:
    def saving(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        job = Job(rank, group, STRATEGIES["sync"]).train(0, SAVED_AT)
        checkpoint.save(job.parallel, tmp_path)
        own = flat(values(job.model))
        with job.parallel.settled():
            return own, flat(values(job.model))

    def loading(rank: int, group: dist.ProcessGroup) -> Tensor:
        job = Job(rank, group, st.DDP())
        checkpoint.load(job.parallel, tmp_path)
        return flat(values(job.model))

    saved = VirtualCluster(3).run(saving).values
    third = torch.tensor(1 / 3)
    mean = (saved[0][0] * third + saved[1][0] * third) + saved[2][0] * third
    assert not torch.equal(saved[0][0], saved[1][0])
    for found in VirtualCluster(2).run(loading).values:
        assert torch.equal(found, mean)
        assert torch.equal(found, saved[0][1])
