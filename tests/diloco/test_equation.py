"""`diloco` is its equation to the bit; its simplest case is `local`, its outer optimizer that of PyTorch."""

import dataclasses
import random

import pytest
import torch

from stretto import Average, DiLoCo, LocalSGD, Options
from stretto_lab.testing import differing
from stretto_lab.virtual import VirtualCluster
from tests.diloco.jobs import RANKS, Naive, drawn, on_cluster, train
from tests.draws import seeds
from tests.exactness.jobs import Case, Observed, same
from tests.exactness.jobs import train as train_case
from tests.processes import run_program

DELAYED = DiLoCo(interval=6, fragments=3, delay=1, mix=0.5)


def averages(seed: int) -> tuple[Average, DiLoCo]:
    """Averages, and the same as an outer step that takes the mean."""
    draws = random.Random(seed)
    every = draws.randint(1, 7)
    strategy = Average(every, draws.choice([None, draws.randint(1, every)]))
    longest = every // strategy.fragments - 1
    strategy = dataclasses.replace(strategy, delay=draws.choice([longest, 0]))
    return strategy, DiLoCo(
        every, strategy.fragments, 1.0, 0.0, delay=strategy.delay, keep_progress=strategy.delay > 0
    )


@pytest.mark.parametrize(
    ("strategy", "equation", "ranks"),
    [
        *((drawn(seed), drawn(seed), 1 + seed % 4) for seed in seeds(20)),
        *((*averages(seed), 2) for seed in seeds(6)),
    ],
    ids=repr,
)
def test_every_replica_is_the_equation_to_the_bit(
    strategy: DiLoCo | Average, equation: DiLoCo, ranks: int
) -> None:
    """From the first update until all ranks end with the mean."""
    expected = Naive(equation, ranks).run()
    for rank, course in enumerate(on_cluster(strategy, ranks)):
        assert differing([of_ranks[rank] for of_ranks in expected], course.shown, f"rank {rank}") == []


def shown(rank: int, group: torch.distributed.ProcessGroup) -> list[torch.Tensor]:
    return train(rank, group, DELAYED).shown


def test_real_ranks_with_a_lane_of_their_own_do_the_same_to_the_bit() -> None:
    expected = Naive(DELAYED).run()
    for rank, found in enumerate(run_program(RANKS, shown)):
        assert differing([of_ranks[rank] for of_ranks in expected], found, f"rank {rank}") == []


def test_the_outer_step_is_sgd_with_nesterov_momentum() -> None:
    """On a lone rank whose fragment leaves after every update, with the way from the anchor as the gradient."""
    strategy = DiLoCo(interval=1, outer_lr=0.7, outer_momentum=0.9)
    naive = Naive(DiLoCo(interval=1, outer_lr=1.0, outer_momentum=0.0))
    anchor = naive.anchor.clone().requires_grad_()
    outer = torch.optim.SGD([anchor], lr=0.7, momentum=0.9, nesterov=True)
    for step, found in enumerate(on_cluster(strategy, ranks=1)[0].shown[:-1]):
        naive.values()[0].copy_(anchor.detach())
        naive.step_alone(step)
        anchor.grad = anchor.detach() - naive.values()[0]
        outer.step()
        assert torch.allclose(found, anchor.detach(), rtol=0, atol=1e-6)  # rounded in another order


CASES = {
    "fp32": Case(lengths=(31,)),
    "tokens and buffers": Case(lengths=(31,), tokens=True, batch_norm=True),
    "bf16 wire": Case(lengths=(40,), options=Options(wire="bf16")),
    "uneven, all": Case(lengths=(13, 40), until="all", batch_norm=True, settle=False),
    "uneven, any": Case(lengths=(13, 40), settle=False),
}


def observed(case: Case, strategy: DiLoCo | LocalSGD) -> list[Observed]:
    case = dataclasses.replace(case, strategy=strategy)
    return list(VirtualCluster(3).run(lambda rank, group: train_case(rank, case, group)).values)


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("name", CASES)
def test_with_a_plain_outer_step_it_is_local_to_the_bit(name: str) -> None:
    """What is shown and committed at every update, buffers, records and the end."""
    local = observed(CASES[name], LocalSGD(rate=1 / 3))
    diloco = observed(CASES[name], DiLoCo(interval=3, outer_lr=1.0, outer_momentum=0.0))
    for ours, theirs in zip(diloco, local, strict=True):
        for field in ("shown", "committed", "statistics"):
            pairs = zip(getattr(ours, field), getattr(theirs, field), strict=True)
            assert [pair for pair in pairs if not same(*pair)] == [], field
        assert same(ours.final, theirs.final)
        assert same(ours.final_statistics, theirs.final_statistics)
        for update, expected in zip(ours.updates, theirs.updates, strict=True):
            for field in ("step", "samples", "weight", "loss", "gap", "micro_batches", "round_index"):
                assert getattr(update, field) == getattr(expected, field)
