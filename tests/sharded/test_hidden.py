"""Gradients of shards leave for other nodes during the backward pass, and no result is another for it."""

import dataclasses
import itertools
import random
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import Work

from stretto import DDP, DataParallel, Options, ZeRO1
from stretto.engine.sharded_model import EarlyShards
from tests.processes import run_ranks
from tests.sharded.jobs import WORLD_SIZE, Case, Outcome, adamw, sharded, train
from tests.wires import OF_GRADIENTS


def counted(parallel: DataParallel) -> list[bool]:
    """Whether each sum that begins on this rank from now on does so while the gradients of the root are yet to come."""
    exchange, begun = parallel.job.exchange, []
    send, last = exchange._all_to_all, parallel.job.model.names.index("words.weight")

    def sending(*args: Any) -> Any:
        accumulation = parallel.job.compute.accumulation
        begun.append(accumulation._leaves and not accumulation._has_come[last])
        return send(*args)

    exchange._all_to_all = sending
    return begun


def write_late(parallel: DataParallel) -> None:
    """Let the gradient that comes last write another one, which has left by then."""
    registered = parallel.job.model.registered
    names = parallel.job.model.names
    early, late = names.index("mix.1.weight"), names.index("words.weight")

    def write(_: Tensor) -> None:
        with torch.no_grad():
            registered[early].grad.to_local().mul_(2)

    registered[late].register_post_accumulate_grad_hook(write)


def cases() -> list[Case]:
    draws = random.Random(36)
    return [
        Case(
            strategy=strategy,
            optimizer=adamw,
            micro_batches=draws.randint(1, 3),
            options=Options(wire=wire, bucket_bytes=draws.choice([256, 512, 1024])),
            weights=[draws.choice([0.0, 1.0, 2.5]) for _ in range(WORLD_SIZE - 1)] + [1.0],
        )
        for strategy in (DDP(), ZeRO1())
        for wire in OF_GRADIENTS
    ]


def hidden_and_not(rank: int, stale: bool) -> list[tuple[bool, list[bool], bool]]:
    """Of every case: whether hiding changes nothing, when sums began, and whether the job hides at its end."""
    found = []
    for case in cases()[:: 4 if stale else 1]:
        outcomes: list[Outcome] = []
        begun: list[bool] = []
        jobs: list[DataParallel] = []
        for overlaps_backward in (True, False):
            options = dataclasses.replace(case.options, hide_reductions=overlaps_backward)
            model, parallel = sharded(dataclasses.replace(case, options=options), 2, 2)
            assert isinstance(parallel.job.compute.accumulation, EarlyShards) is overlaps_backward
            if overlaps_backward:
                begun = counted(parallel)
            jobs.append(parallel)
            if stale and rank == 3:
                write_late(parallel)
            outcomes.append(train(case, model, parallel, [rank]))
        found.append((outcomes[0].equals(outcomes[1]), begun, jobs[0].job.replica.overlaps_backward))
    return found


@pytest.mark.long
def test_gradients_of_shards_leave_during_the_backward_pass_and_nothing_else_changes() -> None:
    for found in run_ranks(WORLD_SIZE, hidden_and_not, False):
        for case, (is_same, begun, overlaps_backward) in zip(cases(), found, strict=True):
            assert is_same, case
            assert overlaps_backward
            assert sum(begun) >= case.updates, case


@pytest.mark.long
def test_a_gradient_of_one_shard_that_changes_after_it_has_left_is_summed_again_by_all() -> None:
    for found in run_ranks(WORLD_SIZE, hidden_and_not, True):
        for is_same, begun, overlaps_backward in found:
            assert is_same
            assert not overlaps_backward
            assert any(begun)


class Swift(Work):
    """A collective that is complete whenever somebody asks, so that departures go on for as long as they may."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def is_completed(self) -> bool:
        return bool(self._work.wait())

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return bool(self._work.wait())


def hastened(parallel: DataParallel) -> tuple[list[bool], list[bool]]:
    """Make sums complete when asked; of every sum and of every gather, whether a pass is under way as it begins."""
    exchange, accumulation = parallel.job.exchange, parallel.job.compute.accumulation
    send, gather, sums, gathers = exchange._all_to_all, exchange._all_gather, [], []

    def sending(*args: Any) -> Work:
        sums.append(accumulation._leaves)
        return Swift(send(*args))

    def gathering(*args: Any) -> Work:
        gathers.append(accumulation._leaves)
        return gather(*args)

    exchange._all_to_all, exchange._all_gather = sending, gathering
    return sums, gathers


def verified(rank: int) -> list[tuple[list[bool], list[bool]]]:
    found = []
    for strategy, wire in itertools.product((DDP(), ZeRO1()), ("fp32", "bf16")):
        case = Case(strategy=strategy, options=Options(wire=wire, bucket_bytes=256, verified=True))
        model, parallel = sharded(case, 2, 2)
        found.append(hastened(parallel))
        train(case, model, parallel, [rank])
    return found


@pytest.mark.long
def test_no_backward_pass_waits_for_another_node_however_fast_collectives_are() -> None:
    """Ranks of a node wait for each other there: two that wait for other nodes in turn would never end."""
    for found in run_ranks(WORLD_SIZE, verified):
        for sums, gathers in found:
            assert any(sums)
            assert gathers
            assert not any(gathers)
