"""What one rank of a node decides or suffers, all ranks of the job do: no shard takes another way."""

import functools
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto import ACCO, DDP, LocalSGD, Options, ZeRO1
from stretto.errors import GradientsTouched, NonFinite, PeerFailed, StrettoError, UsageError, WorkerDisagrees
from stretto.strategies import Strategy
from tests.processes import rank_outcomes, run_ranks
from tests.sharded.jobs import (
    WORLD_SIZE,
    Case,
    Outcome,
    batch,
    loss_of,
    mesh_of,
    run_sharded,
    run_whole,
    sharded,
    unsharded,
    whole,
)
from tests.sharded.test_laws import tolerance

POISONED = (3, 4)
"""Rank and micro-batch: the first words, whose gradients are not finite, lie on rank 2."""


def skipping(rank: int) -> dict[str, tuple[Outcome, Outcome]]:
    options = Options(bucket_bytes=512, nonfinite="skip")
    found = {}
    for strategy in (ZeRO1(), DDP(), ACCO(), LocalSGD(0.34)):
        case = Case(strategy=strategy, options=options, poisoned=POISONED)
        found[strategy.name] = run_sharded(case, rank, 2, 2), run_whole(case, rank, nodes=2)
    return found


def test_a_gradient_of_one_shard_that_is_not_finite_has_the_round_left_out_on_all() -> None:
    for found in run_ranks(WORLD_SIZE, skipping):
        for name, (outcome, expected) in found.items():
            assert outcome.distance(expected) <= tolerance(Case(), expected), name
            skipped = [one.skipped_rounds for one in outcome.updates]
            assert skipped == [one.skipped_rounds for one in expected.updates], name
    assert sum(skipped) <= 1


def raising(rank: int) -> str:
    with pytest.raises(NonFinite) as caught:
        run_sharded(Case(poisoned=POISONED), rank, 2, 2)
    return str(caught.value)


def test_it_is_an_error_that_names_the_node_on_every_rank() -> None:
    for rank, message in enumerate(run_ranks(WORLD_SIZE, raising)):
        assert f"rank {rank}, step 3" in message
        assert "gradient is not finite on nodes [1]" in message


def handed_out(batches: Sequence[Tensor], *, has_length: bool) -> Sequence[Tensor] | Iterator[Tensor]:
    return batches if has_length else iter(batches)


def fed(rank: int, until: str, has_length: bool) -> dict[str, tuple[Outcome, Outcome]]:
    """Rank 1 has three batches fewer than the others."""
    found = {}
    for strategy in (ZeRO1(), ACCO(), LocalSGD(0.34)):
        outcomes = []
        case = Case(strategy=strategy)
        for ranks in ([rank], [rank // 2 * 2, rank // 2 * 2 + 1]):
            alone = len(ranks) == 1
            group = mesh_of(2, 2)["node"].get_group()
            model, parallel = sharded(case, 2, 2) if alone else unsharded(case, group)
            count = 5 if rank == 1 or (rank == 0 and not alone) else 8
            numbers = [torch.tensor(index) for index in range(count)]
            updates = []
            for number in parallel.feed(handed_out(numbers, has_length=has_length), until=until):
                losses = [loss_of(model, batch(one, int(number))) for one in ranks]
                loss = sum(losses[1:], losses[0]) / len(ranks)
                updates.append(parallel.backward(loss, float(len(ranks)), samples=len(ranks)))
            updates += parallel.finish()
            outcomes.append(Outcome(values=whole(model), updates=[one for one in updates if one]))
        found[strategy.name] = outcomes[0], outcomes[1]
    return found


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("until", ["any", "all"])
def test_the_data_of_a_node_end_where_those_of_one_of_its_ranks_do(until: str, has_length: bool) -> None:
    for found in run_ranks(WORLD_SIZE, fed, until, has_length):
        for name, (outcome, expected) in found.items():
            assert outcome.distance(expected) <= tolerance(Case(), expected), name
            assert [one.weight for one in outcome.updates] == [one.weight for one in expected.updates], name


def asking_in_another_order(rank: int) -> tuple[Outcome, Outcome]:
    """While a round is in flight, one rank of a node asks for a batch before it reports, and the other after that."""
    outcomes = []
    for in_another_order in (False, True):
        case = Case(strategy=ACCO(), micro_batches=8)  # a round has four: it takes off with the fifth
        model, parallel = sharded(case, 2, 2)
        within, reports, asks = parallel.job.within, threading.Event(), threading.Event()
        waits = rank % 2 == 1 and in_another_order
        within.merge = functools.partial(merging, within.merge, reports, asks if waits else None)
        within.have_all = functools.partial(asking, within.have_all, asks)
        updates = []
        for index in parallel.feed(in_flight_before(6, range(16), None if rank % 2 else reports)):
            updates.append(parallel.backward(loss_of(model, batch(rank, index))))
        updates += parallel.finish()
        outcomes.append(Outcome(values=whole(model), updates=[one for one in updates if one]))
    return outcomes[0], outcomes[1]


def merging(merge: Any, reports: threading.Event, asks: threading.Event | None, *args: Any) -> Any:
    if asks is not None and not reports.is_set():
        asks.clear()
        asks.wait(60)
    reports.set()
    return merge(*args)


def asking(have_all: Any, asks: threading.Event, found: bool) -> bool:
    asks.set()
    return have_all(found)


def in_flight_before(count: int, batches: Iterable[int], reports: threading.Event | None) -> Iterator[int]:
    """Hand out the batch of this number once a round has been reported."""
    for number, one in enumerate(batches, start=1):
        if number == count and reports is not None:
            reports.wait(60)
        yield one


def test_what_the_two_lanes_of_a_rank_ask_inside_a_node_is_never_mixed_up() -> None:
    for expected, outcome in run_ranks(WORLD_SIZE, asking_in_another_order):
        assert outcome.equals(expected)


def disagreeing(rank: int) -> str:
    model, parallel = sharded(Case(micro_batches=1), 2, 2)
    if rank == 1:
        parallel.optimizer.param_groups[0]["lr"] = 0.3
    try:
        for index in range(3):
            parallel.backward(loss_of(model, batch(rank, index)))
    except StrettoError as error:
        return f"{type(error).__name__}: {error}"
    return "nobody has noticed"


def test_settings_that_differ_inside_a_node_are_an_error_on_all_ranks() -> None:
    found = run_ranks(WORLD_SIZE, disagreeing)
    for message in found[:2]:
        assert message.startswith(WorkerDisagrees.__name__)
        assert "ranks [0, 1]" in message
    for message in found[2:]:
        assert message.startswith(PeerFailed.__name__)
        assert "lr=0.3" in message


def misused(rank: int) -> list[str]:
    messages = []
    for index in range(2):
        model, parallel = sharded(Case(micro_batches=4), 2, 2)
        loss = loss_of(model, batch(rank, 0))
        if index == 0:
            loss.backward()
        with pytest.raises((GradientsTouched, UsageError)) as caught:
            parallel.backward(
                loss_of(model, batch(rank, 1)).bfloat16(), 0.3
            ) if index else parallel.count_micro_batch()
        messages.append(str(caught.value))
    return messages


def test_passes_of_others_and_weights_that_a_loss_cannot_hold_are_errors() -> None:
    for first, second in run_ranks(WORLD_SIZE, misused):
        assert "parallel.backward(loss)" in first
        assert "loss.float()" in second


def failing(rank: int, strategy: Strategy) -> None:
    model, parallel = sharded(Case(strategy=strategy), 2, 2)
    with parallel:
        for index in range(8):
            if (rank, index) == (3, 5):
                raise ValueError("a broken batch")
            parallel.backward(loss_of(model, batch(rank, index)))


@pytest.mark.parametrize("strategy", [ZeRO1(), ACCO()])
def test_an_exception_on_one_shard_ends_all_ranks(strategy: Strategy) -> None:
    began = time.monotonic()
    for outcome in rank_outcomes(WORLD_SIZE, failing, strategy):
        assert outcome.error is not None
        assert "a broken batch" in outcome.error, outcome.error
        assert outcome.finished - began < 60
