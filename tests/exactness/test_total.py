"""Micro-batches of all ranks together: however many each rank has of them, an update is that of one rank alone."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import stretto as st
from stretto_lab.virtual import VirtualCluster

TOTAL = st.Total(12)
UPDATES = 6
TOLERANCE = 1e-9
"""Of sums of 36 doubles in another order, through six steps; a wrong weight changes the third digit."""


def trained(strategy: st.Strategy, ranks: int) -> tuple[Tensor, list[int]]:
    """Return the parameters after some updates on so many ranks, and the samples of each update."""

    def program(rank: int, group: ProcessGroup) -> tuple[Tensor, list[int]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        parallel = st.DataParallel(model, optimizer, strategy, micro_batches=TOTAL, group=group)
        every = range(rank, TOTAL.micro_batches, ranks)
        numbers = [update * TOTAL.micro_batches + turn for update in range(UPDATES) for turn in every]
        samples: list[int] = []
        with parallel:
            for number in parallel.feed(numbers, on_update=lambda update: samples.append(update.samples)):
                inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(number)).double()
                parallel.backward((model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean())
            parallel.finish()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), samples

    return VirtualCluster(ranks).run(program).values[0]


@pytest.mark.parametrize("strategy", [st.DDP(), st.ZeRO1(), st.DPU(), st.WeightPrediction()], ids=str)
def test_an_update_is_the_same_on_ranks_that_do_not_divide_its_micro_batches(strategy: st.Strategy) -> None:
    alone, expected = trained(strategy, 1)
    for ranks in (5, 7):
        together, samples = trained(strategy, ranks)
        assert samples == expected
        torch.testing.assert_close(together, alone, rtol=0, atol=TOLERANCE)


def test_ranks_that_hold_unequal_parts_of_two_rounds_commit_all_samples() -> None:
    _, expected = trained(st.ACCO(), 1)
    assert sum(expected) > 0
    for ranks in (3, 5):
        assert sum(trained(st.ACCO(), ranks)[1]) == sum(expected)
