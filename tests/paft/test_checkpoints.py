"""A checkpoint of replicas that differ but should not: their mean for everyone but the same ranks."""

from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist

import stretto as st
from stretto import checkpoint
from stretto_lab.virtual import VirtualCluster
from tests.paft.noisy import flat, network, values


def job(rank: int, group: dist.ProcessGroup, strategy: st.Strategy) -> st.DataParallel:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return st.DataParallel(model, optimizer, strategy, group=group, options=st.Options(bucket_bytes=2**20))


def test_other_ranks_begin_with_the_mean(tmp_path: Path) -> None:
    def saving(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        parallel = job(rank, group, st.PAFTSync(interval=4))
        for update in range(3):
            if (rank, update) == (1, 2):
                parallel.job.sharded.masters[0].add_(0.01)
            parallel.backward(parallel.model(torch.ones(4, 6) * (update + rank)).square().mean())
        checkpoint.save(parallel, tmp_path)
        own = flat(values(parallel.model))
        with parallel.settled():
            return own, flat(values(parallel.model))

    def loading(rank: int, group: dist.ProcessGroup) -> Tensor:
        parallel = job(rank, group, st.DDP())
        checkpoint.load(parallel, tmp_path)
        return flat(values(parallel.model))

    saved = VirtualCluster(3).run(saving).values
    third = torch.tensor(1 / 3)
    mean = (saved[0][0] * third + saved[1][0] * third) + saved[2][0] * third
    assert not torch.equal(saved[0][0], saved[1][0])
    for found in VirtualCluster(2).run(loading).values:
        assert torch.equal(found, mean)
        assert torch.equal(found, saved[0][1])
