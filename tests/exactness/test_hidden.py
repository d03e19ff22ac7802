"""Reductions that begin during the last backward pass change nothing but the time: every bit is the unhidden run's."""

import dataclasses
import random
from typing import Any

import pytest

from stretto import DDP, Options, PAFTDyn, PAFTSync, ZeRO1
from stretto.groups import Link
from stretto.strategies import Strategy
from stretto_lab.virtual import Compute, Network, Span, Trace, Transfer, VirtualCluster
from tests.exactness.jobs import Case, Observed, same, train

STRATEGIES: tuple[Strategy, ...] = (DDP(), ZeRO1(), PAFTSync(interval=2), PAFTDyn(first=1, maximum=2))
WIRES = ("fp32", "bf16", "int8", "int4")
WORLD_SIZES = (1, 2, 3, 4)
TIMES = ("seconds", "lane_seconds", "exposed_seconds", "wait_seconds")


def draw(seed: int, strategy: Strategy, wire: str, *, verified: bool, nodes: bool = False) -> Case:
    """Return a random job, perhaps on nodes of two ranks."""
    draws = random.Random(seed)
    return Case(
        strategy=strategy,
        optimizer=draws.choice(["sgd", "adamw"]),
        micro_batches=draws.randint(1, 3),
        lengths=draws.choice([(5,), (5, 3), (2, 4, 4)]),
        until=draws.choice(["any", "all"]),
        tokens=draws.random() < 0.5,
        branch=draws.choice(["always", "some", "one rank", "first micro-batch"]),
        poisoned=draws.choice([(), (), (2,)]),
        tied=draws.random() < 0.3,
        frozen=draws.random() < 0.3,
        batch_norm=draws.random() < 0.5,
        settle=draws.random() < 0.3,
        options=Options(
            wire=wire,
            verified=verified,
            ranks_per_node=2 if nodes else None,
            nonfinite="skip",
            allow_unused=True,
            bucket_bytes=round(2 ** draws.uniform(9, 14)),
            clip_norm=draws.choice([None, 1.25]),
        ),
    )


def cluster(seed: int, world_size: int) -> VirtualCluster:
    """Return ranks that compute at random rates, on links with random delays."""
    draws = random.Random(seed)
    links = {
        rank: Link(bits_per_second=10 ** draws.uniform(7, 10), latency_seconds=draws.uniform(0, 1e-4))
        for rank in range(world_size)
    }
    compute = Compute(
        micro_batch_ns=10 ** draws.randint(3, 6),
        backward_share=draws.random(),
        step_ns=draws.randint(0, 10**5),
        slowness={rank: draws.uniform(0.5, 4) for rank in range(world_size)},
        jitter=0.9,
    )
    return VirtualCluster(world_size, network=Network(links=links), compute=compute, seed=seed)


def run(case: Case, on: VirtualCluster, *, hide: bool) -> tuple[tuple[Observed, ...], Trace]:
    """Run a job on every rank."""
    options = dataclasses.replace(case.options, hide_reductions=hide)
    chosen = dataclasses.replace(case, options=options)
    results = on.run(lambda rank, group: train(rank, chosen, group))
    return results.values, results.trace


def check_same(hidden: Observed, unhidden: Observed) -> None:
    """Compare all that a rank saw, but for times."""
    for field in dataclasses.fields(Observed):
        ours, theirs = getattr(hidden, field.name), getattr(unhidden, field.name)
        if field.name in ("shown", "committed", "statistics", "live_statistics"):
            assert len(ours) == len(theirs), field.name
            assert [pair for pair in zip(ours, theirs, strict=True) if not same(*pair)] == [], field.name
        elif field.name in ("final", "final_statistics"):
            assert same(ours, theirs), field.name
        else:
            assert repr(untimed(ours)) == repr(untimed(theirs)), field.name  # nan is equal to itself here


def untimed(value: Any) -> Any:
    """Return a record without its times."""
    if not isinstance(value, list):
        return value
    return [dataclasses.replace(update, **dict.fromkeys(TIMES, 0.0)) for update in value]


def begun_inside(trace: Trace) -> int:
    """Return the number of collectives that began while some rank was inside a micro-batch."""
    busy = [r for r in trace.records if isinstance(r, Span) and r.work == "micro-batch"]
    started = [r.start_ns for r in trace.records if isinstance(r, Transfer)]
    return sum(any(span.start_ns < start < span.stop_ns for span in busy) for start in started)


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_every_state_of_random_jobs_is_that_of_the_unhidden_job(strategy: Strategy, wire: str) -> None:
    for world_size in WORLD_SIZES:
        seed = 16 * world_size + 4 * STRATEGIES.index(strategy) + WIRES.index(wire)
        case = draw(seed, strategy, wire, verified=seed.bit_count() % 2 == 1, nodes=world_size == 4)
        on = cluster(seed, world_size)
        (hidden, _), (unhidden, _) = run(case, on, hide=True), run(case, on, hide=False)
        for ours, theirs in zip(hidden, unhidden, strict=True):
            check_same(ours, theirs)


@pytest.mark.parametrize(
    ("strategy", "wire"),
    [*zip(STRATEGIES, WIRES, strict=True), *zip(STRATEGIES, WIRES[2:] + WIRES[:2], strict=True)],
    ids=lambda value: getattr(value, "name", value),
)
def test_collectives_begin_inside_the_last_backward_pass(strategy: Strategy, wire: str) -> None:
    options = Options(wire=wire, bucket_bytes=1024)
    case = Case(strategy=strategy, micro_batches=2, lengths=(4,), settle=False, options=options)
    on = VirtualCluster(2, compute=Compute(micro_batch_ns=10**6))
    assert begun_inside(run(case, on, hide=True)[1]) > 0
    assert begun_inside(run(case, on, hide=False)[1]) == 0
