"""`diloco` is its equation to the bit; its simplest case is `local`, its outer optimizer that of PyTorch."""

import dataclasses
import random

import pytest
import torch

from stretto import Average, DiLoCo, LocalSGD, Options
from stretto_lab.virtual import VirtualCluster
from tests.diloco.jobs import RANKS, Naive, on_cluster, train
from tests.exactness.jobs import Case, Observed, same
from tests.exactness.jobs import train as train_case
from tests.processes import run_program

STRATEGIES = [
    DiLoCo(interval=3),
    DiLoCo(interval=4, fragments=2, outer_lr=0.5, outer_momentum=0.0),
    DiLoCo(interval=5, fragments=1, delay=4),
    DiLoCo(interval=6, fragments=3, delay=1, mix=0.5),
    DiLoCo(interval=2, fragments=2, outer_lr=1.3, outer_momentum=0.6),
    DiLoCo(interval=5, delay=3, keep_progress=True),
    DiLoCo(interval=6, fragments=2, delay=2, mix=0.25, keep_progress=True),
    DiLoCo(interval=3, outer_momentum=0.6, nesterov=False),
    DiLoCo(interval=4, fragments=2, mix=0.75),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_every_replica_is_the_equation_to_the_bit(strategy: DiLoCo) -> None:
    expected = Naive(strategy).run()
    for rank, course in enumerate(on_cluster(strategy)):
        assert len(course.shown) == len(expected)
        for step, (found, of_ranks) in enumerate(zip(course.shown, expected, strict=True)):
            assert torch.equal(found, of_ranks[rank]), f"rank {rank}, update {step + 1}"


@pytest.mark.parametrize("seed", range(6))
def test_averages_are_the_equation_with_a_plain_outer_step_to_the_bit(seed: int) -> None:
    draws = random.Random(seed)
    every = draws.randint(1, 7)
    strategy = Average(every, draws.choice([None, draws.randint(1, every)]))
    longest = every // strategy.fragments - 1
    strategy = dataclasses.replace(strategy, delay=draws.choice([longest, 0]))
    plain = DiLoCo(
        every, strategy.fragments, 1.0, 0.0, delay=strategy.delay, keep_progress=strategy.delay > 0
    )
    expected = Naive(plain).run()
    for rank, course in enumerate(on_cluster(strategy)):
        assert [
            (one, of_ranks)
            for one, of_ranks in zip(course.shown, expected, strict=True)
            if not torch.equal(one, of_ranks[rank])
        ] == []


def shown(rank: int, group: torch.distributed.ProcessGroup) -> list[torch.Tensor]:
    return train(rank, group, STRATEGIES[3]).shown


def test_real_ranks_with_a_lane_of_their_own_do_the_same_to_the_bit() -> None:
    expected = Naive(STRATEGIES[3]).run()
    for rank, found in enumerate(run_program(RANKS, shown)):
        assert [
            (one, of_ranks)
            for one, of_ranks in zip(found, expected, strict=True)
            if not torch.equal(one, of_ranks[rank])
        ] == []


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


def test_an_outer_step_that_is_not_plain_is_not_local() -> None:
    plain, fast = (on_cluster(DiLoCo(interval=3, outer_lr=lr, outer_momentum=0.0)) for lr in (1.0, 0.7))
    assert torch.equal(plain[0].shown[1], fast[0].shown[1])
    assert not torch.equal(plain[0].shown[2], fast[0].shown[2])


def test_a_lone_rank_that_keeps_its_progress_trains_as_if_nothing_had_travelled() -> None:
    """Its anchor is where it was when the fragment left: only the rounding of a difference and a sum remains."""
    settings = {"interval": 4, "delay": 3, "outer_lr": 1.0, "outer_momentum": 0.0}
    plain = on_cluster(DiLoCo(interval=4, outer_lr=1.0, outer_momentum=0.0), ranks=1)[0].shown
    kept = on_cluster(DiLoCo(**settings, keep_progress=True), ranks=1)[0].shown
    lost = on_cluster(DiLoCo(**settings), ranks=1)[0].shown
    assert [
        (a, b) for a, b in zip(plain, kept, strict=True) if not torch.allclose(a, b, rtol=0, atol=1e-06)
    ] == []
    assert not torch.allclose(plain[-1], lost[-1], rtol=0, atol=1e-3)
