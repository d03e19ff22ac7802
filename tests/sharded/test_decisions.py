"""What one rank of a node decides or suffers, all ranks of the job do: no shard takes another way."""

import functools
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from stretto import ACCO, ZeRO1
from stretto.errors import (
    GradientsTouched,
    NonFinite,
    PeerFailed,
    StrettoError,
    UnsupportedOptimizer,
    UsageError,
    WorkerDisagrees,
)
from stretto.strategies import Strategy
from tests.draws import part
from tests.processes import rank_outcomes, run_ranks
from tests.sharded.jobs import (
    WORLD_SIZE,
    Case,
    Outcome,
    batch,
    beside_adamw,
    loss_of,
    run_sharded,
    sharded,
    whole,
)


def told(rank: int) -> dict[str, str]:
    """What is said, on this rank, of what cannot be done."""
    found = {}
    for name, kind in {"shape": torch.optim.Adafactor, "of its 3 rows": torch.optim.Muon}.items():
        case = Case(
            optimizer=functools.partial(beside_adamw, kind, ("mix",) if name == "shape" else ("few",))
        )
        with pytest.raises(UnsupportedOptimizer, match="AdamW") as caught:
            sharded(case, 1, WORLD_SIZE)
        found[name] = str(caught.value)
    model, parallel = sharded(Case(micro_batches=4), 2, 2)
    loss_of(model, batch(rank, 0)).backward()
    with pytest.raises(GradientsTouched) as caught:
        parallel.count_micro_batch()
    found["parallel.backward(loss)"] = str(caught.value)
    model, parallel = sharded(Case(micro_batches=4), 2, 2)
    with pytest.raises(UsageError) as caught:
        parallel.backward(loss_of(model, batch(rank, 1)).bfloat16(), 0.3)
    found["loss.float()"] = str(caught.value)
    with pytest.raises(NonFinite, match=rf"rank {rank}, step 3") as caught:
        run_sharded(Case(poisoned=(3, 4)), rank, 2, 2)
    found["gradient is not finite on nodes [1]"] = str(caught.value)
    return found


def test_what_cannot_be_done_is_an_error_on_every_rank() -> None:
    """Optimizers that cannot step shards, passes of others, weights that a loss cannot hold, gradients not finite."""
    for found in run_ranks(WORLD_SIZE, told):
        assert [(words, text) for words, text in found.items() if words not in text] == []


def asking_in_another_order(rank: int) -> tuple[Outcome, Outcome]:
    """While a round is in flight, one rank of a node asks for a batch before it reports, and the other after that."""
    outcomes = []
    for in_another_order in (False, True):
        case = Case(strategy=ACCO(), micro_batches=8)  # a round has four: it takes off with the fifth
        model, parallel = sharded(case, 2, 2)
        node_group, reports, asks = parallel.job.node_group, threading.Event(), threading.Event()
        waits = rank % 2 == 1 and in_another_order
        node_group.merge = functools.partial(merging, node_group.merge, reports, asks if waits else None)
        node_group.have_all = functools.partial(asking, node_group.have_all, asks)
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


def failing(rank: int, strategy: Strategy) -> None:
    model, parallel = sharded(Case(strategy=strategy), 2, 2)
    with parallel:
        for index in range(8):
            if (rank, index) == (3, 5):
                raise ValueError("a broken batch")
            parallel.backward(loss_of(model, batch(rank, index)))


@pytest.mark.parametrize("strategy", part([ZeRO1(), ACCO()]))
def test_an_exception_on_one_shard_ends_all_ranks(strategy: Strategy) -> None:
    began = time.monotonic()
    for outcome in rank_outcomes(WORLD_SIZE, failing, strategy):
        assert outcome.error is not None
        assert "a broken batch" in outcome.error, outcome.error
        assert outcome.finished - began < 60
