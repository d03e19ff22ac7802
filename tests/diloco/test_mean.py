"""The mean of replicas that DiLoCo shows, saves and hands over, against the replicas themselves."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto as st
from stretto import LocalSGD
from stretto_lab.testing import differing
from stretto_lab.virtual import VirtualCluster
from tests.diloco.jobs import drawn
from tests.draws import seeds

RANKS = 3
WIDTH = 64
ROUNDING = 1e-6
"""Three products and two sums of float32 values below 4, in another order: 5 * 4 * 2**-24, and room."""


def run(program: Any) -> list[Any]:
    return list(VirtualCluster(RANKS, seed=0).run(program).values)


def new_job(strategy: Any, group: Any) -> st.DataParallel:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return st.DataParallel(
        model, optimizer, strategy, group=group, options=st.Options(bucket_bytes=4 * WIDTH)
    )


def loss_of(parallel: st.DataParallel, rank: int, step: int) -> Tensor:
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return (parallel.model(inputs) - rank).square().mean()


def shown(parallel: st.DataParallel) -> Tensor:
    return parallel.model.weight.detach().clone()


def moments(parallel: st.DataParallel) -> Tensor:
    states = parallel.job.sharded.optimizer.state.values()
    return torch.cat([state["momentum_buffer"].flatten() for state in states])[: 2 * WIDTH]


@pytest.mark.long(keep=2)
@pytest.mark.parametrize("seed", seeds(16))
def test_what_is_shown_to_who_looks_and_saved_of_optimizers_is_the_mean_of_all_replicas(seed: int) -> None:
    """Behind every update, whatever is under way; and to look changes nothing."""

    def program(rank: int, group: Any, *, looks: bool) -> tuple[list[tuple[Tensor, ...]], Tensor]:
        parallel, found = new_job(LocalSGD(0.4) if seed % 4 == 3 else drawn(seed), group), []
        for step in range(9):
            parallel.backward(loss_of(parallel, rank, step))
            if looks:
                own = shown(parallel)
                saved = parallel.state_dict()["optimizer"]["state.weight.momentum_buffer"].content()
                with parallel.settled():
                    found.append((own, shown(parallel), moments(parallel), saved.flatten().clone()))
        parallel.finish()
        return found, shown(parallel)

    watched, unwatched = (run(functools.partial(program, looks=looks)) for looks in (True, False))
    assert differing([ended for _, ended in unwatched], [ended for _, ended in watched]) == []
    for of_step in zip(*(found for found, _ in watched), strict=True):
        mean, of_moments = (sum(one[index] for one in of_step) / RANKS for index in (0, 2))
        for _, settled, _, saved in of_step:
            torch.testing.assert_close(settled, mean, rtol=0, atol=ROUNDING)
            torch.testing.assert_close(saved, of_moments, rtol=0, atol=4 * ROUNDING)  # moments are below 16


@pytest.mark.parametrize(
    "strategy",
    [st.DiLoCo(4), st.DiLoCo(4, delay=2), st.DiLoCo(4, delay=2, mix=0.5), st.DiLoCo(4, fragments=2)],
)
def test_the_next_strategy_begins_with_the_mean_of_all_states(strategy: st.DiLoCo) -> None:
    def program(rank: int, group: Any) -> tuple[Tensor, Tensor]:
        parallel = new_job(strategy, group)
        for step in range(3):
            parallel.backward(loss_of(parallel, rank, step))
        loss = loss_of(parallel, rank, 3)
        (gradient,) = torch.autograd.grad(loss, parallel.model.weight, retain_graph=True)
        parallel.discard()
        expected = 0.9 * moments(parallel) + gradient.flatten()
        parallel.backward(loss)
        model, optimizer = parallel.model, parallel.optimizer
        following = st.checkpoint.continued(
            parallel, lambda: st.DataParallel(model, optimizer, st.DDP(), group=group)
        )
        handed_over = moments(following)
        following.finish()
        return expected, handed_over

    found = run(program)
    mean = sum(expected for expected, _ in found) / RANKS
    for _, handed_over in found:
        torch.testing.assert_close(handed_over, mean, rtol=0, atol=4 * ROUNDING)
