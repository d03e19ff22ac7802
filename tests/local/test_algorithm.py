"""`local` is Algorithm 2 to the bit: every replica after every step, every mean, every end."""

import functools
import itertools

import pytest
import torch

from stretto import DDP, LocalSGD, Options
from tests.exactness.jobs import Case, Observed, same, train_all
from tests.local.algorithm import algorithm_2
from tests.processes import run_ranks

SMALL = Options(bucket_bytes=4096)
CASES = [
    Case(
        strategy=LocalSGD(rate=rate, plan=plan, state=state, seed=3),
        optimizer=optimizer,
        tokens=tokens,
        lengths=(23,),
        options=SMALL,
    )
    for (rate, plan), state, (optimizer, tokens) in itertools.product(
        ((0.4, "even"), (0.5, "bernoulli")),
        (False, True),
        (("sgd", False), ("adamw", True)),
    )
]
CAPPED = Case(strategy=LocalSGD(rate=0, max_gap=3), tokens=True, lengths=(23,), options=SMALL)
ALWAYS = [Case(strategy=strategy, tokens=True, lengths=(23,)) for strategy in (LocalSGD(rate=1), DDP())]
ALL = [*CASES, CAPPED, *ALWAYS]
HALF = [*(CASES[i] for i in (0, 3, 5, 6)), CAPPED]
"""Every pair of a plan, a way with the state and an optimizer once."""
PAIRS = [(case, world_size) for world_size in (1, 2, 4) for case in (HALF if world_size == 4 else ALL[:-2])]


@functools.cache
def observed(world_size: int) -> list[list[Observed]]:
    if world_size == 1:
        return [train_all(0, ALL)]
    return run_ranks(world_size, train_all, ALL if world_size == 2 else HALF)


def describe(case: Case | int) -> str:
    if isinstance(case, int):
        return str(case)
    strategy = case.strategy
    return f"{strategy.plan}-{case.optimizer}-state_{strategy.state}-gap_{strategy.max_gap}"


@pytest.mark.long(keep=3)
@pytest.mark.parametrize(("case", "world_size"), PAIRS, ids=describe)
def test_every_replica_equals_the_naive_algorithm(case: Case, world_size: int) -> None:
    expected = algorithm_2(case, world_size)
    for rank, (found, view) in enumerate(zip(observed(world_size), expected, strict=True)):
        one = found[(HALF if world_size == 4 else ALL).index(case)]
        assert len(one.shown) == len(view.shown)
        for position, (state, reference) in enumerate(zip(one.shown, view.shown, strict=True)):
            assert same(state, reference), f"rank {rank}: state {position} differs"
        for position, (state, reference) in enumerate(zip(one.committed, view.committed, strict=True)):
            assert same(state, reference), f"rank {rank}: the mean at update {position} differs"
        assert [update.gap for update in one.updates] == view.gaps
        assert same(one.final, view.final)


def test_ranks_drift_apart_between_averages_and_settle_to_the_same() -> None:
    first, second = (found[0] for found in observed(2))
    assert not same(first.shown[1], second.shown[1])
    assert [(a, b) for a, b in zip(first.committed, second.committed, strict=True) if not same(a, b)] == []
    assert same(first.final, second.final)


def test_averaging_the_state_matters() -> None:
    finals = {case.strategy.state: observed(2)[0][i].final for i, case in enumerate(CASES[:4:2])}
    assert not same(finals[False], finals[True])


def test_what_all_ranks_have_done_is_reported_once_it_is_known() -> None:
    for found in observed(2):
        for case, one in zip(CASES, found, strict=False):
            told = max(update.step for update in one.updates if update.gap == 0)
            assert sum(update.samples for update in one.updates[:told]) == sum(
                update.samples for update in found[ALL.index(ALWAYS[1])].updates[:told]
            )
            assert one.updates[0].samples == 3 + 4 + 5 + 6  # of this rank alone
            assert case.strategy.rate < 1


def test_rate_one_reports_what_ddp_reports() -> None:
    local, ddp = (observed(2)[0][ALL.index(case)].updates for case in ALWAYS)
    for ours, theirs in zip(local, ddp, strict=True):
        assert (ours.step, ours.samples, ours.weight, ours.micro_batches, ours.gap) == (
            theirs.step, theirs.samples, theirs.weight, theirs.micro_batches, 0
        )  # fmt: skip
    assert local[0].loss == ddp[0].loss  # later ones are taken at other parameters: this is AdamW


def test_a_lone_rank_equals_plain_pytorch() -> None:
    lone, ddp = (observed(1)[0][ALL.index(case)] for case in (CASES[-1], ALWAYS[1]))
    assert same(lone.final, ddp.final)
    assert torch.isfinite(lone.final[0]).all()
