"""The mean of replicas that DiLoCo shows, saves, hands over and ends with, against the replicas themselves."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto as st
from stretto_lab.virtual import VirtualCluster
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


def drawn(seed: int) -> st.DiLoCo:
    """Any options, often such that a fragment is under way, or lands mixed, when somebody looks."""
    draw = random.Random(seed)
    fragments = draw.choice((1, 2))
    interval = draw.randint(fragments, 6)
    delay = draw.randrange(interval // fragments)
    mix = draw.choice((0.0, 0.5))
    keeps = bool(delay) and draw.random() < 0.5
    return st.DiLoCo(interval, fragments=fragments, delay=delay, mix=mix, keep_progress=keeps)


@pytest.mark.parametrize("seed", seeds(12))
def test_behind_every_update_the_settled_model_is_the_mean_of_all_replicas(seed: int) -> None:
    def program(rank: int, group: Any) -> list[tuple[Tensor, Tensor]]:
        parallel, found = new_job(drawn(seed), group), []
        for step in range(9):
            parallel.backward(loss_of(parallel, rank, step))
            own = shown(parallel)
            with parallel.settled():
                found.append((own, shown(parallel)))
        parallel.finish()
        return found

    for of_step in zip(*run(program), strict=True):
        mean = sum(own for own, _ in of_step) / RANKS
        for _, settled in of_step:
            torch.testing.assert_close(settled, mean, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("seed", seeds(12))
def test_what_is_saved_of_the_optimizer_is_the_mean_of_all_states(seed: int) -> None:
    def program(rank: int, group: Any) -> tuple[Tensor, Tensor]:
        parallel = new_job(drawn(seed), group)
        for step in range(3 + seed % 5):
            parallel.backward(loss_of(parallel, rank, step))
        own = moments(parallel)
        saved = parallel.state_dict()["optimizer"]["state.weight.momentum_buffer"].content().flatten().clone()
        parallel.finish()
        return own, saved

    found = run(program)
    mean = sum(own for own, _ in found) / RANKS
    for _, saved in found:
        torch.testing.assert_close(saved, mean, rtol=0, atol=4 * ROUNDING)  # moments are below 16


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


@pytest.mark.parametrize("steps", [3, 4, 5, 6])
@pytest.mark.parametrize("mix", [0.0, 0.5])
def test_a_job_ends_with_the_mean_of_what_replicas_are_when_all_has_landed(mix: float, steps: int) -> None:
    def program(rank: int, group: Any) -> tuple[Tensor, Tensor]:
        strategy = st.DiLoCo(4, delay=2, mix=mix, outer_lr=1.0, outer_momentum=0.0)
        parallel = new_job(strategy, group)
        left = shown(parallel)
        for step in range(steps):
            parallel.backward(loss_of(parallel, rank, step))
            if step == 3:
                left = shown(parallel)
        own = shown(parallel)
        parallel.finish()
        return (left, own), shown(parallel)

    found = run(program)
    lefts, owns = zip(*(state for state, _ in found), strict=True)
    expected = sum(owns) / RANKS
    if steps in (4, 5):  # what left after four updates lands at the end: a share of `mix` stays
        expected = mix * expected + (1 - mix) * sum(lefts) / RANKS
    for _, ended in found:
        torch.testing.assert_close(ended, expected, rtol=0, atol=ROUNDING)
