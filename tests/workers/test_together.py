"""The ranks of a node hold the same parameters after every update, and decide alike, whatever each of them is given."""

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

import stretto as st
from stretto_lab.virtual import Compute, VirtualCluster
from tests.diloco.jobs import start
from tests.draws import seeds
from tests.exactness.jobs import (
    Case,
    build_model,
    build_optimizer,
    mean_loss,
    parameters_of,
    same,
    statistics_of,
    stream,
)
from tests.workers.jobs import STRATEGIES, with_nodes

FIELDS = ("step", "round_index", "gap", "weight", "samples", "loss", "gradient_norm", "micro_batches")
"""Of an update, that are the same on all ranks of a node."""


@dataclasses.dataclass
class Seen:
    """By update, on one rank, whatever data it has left."""

    parameters: list[list[Tensor]]
    records: list[tuple[Any, ...]]
    final: list[Tensor]
    contributed: int
    """Micro-batches of this rank."""


def train(rank: int, group: distributed.ProcessGroup, case: Case) -> Seen:
    model = build_model(case)
    optimizer = build_optimizer(case, model.parameters())
    parallel = st.DataParallel(
        model, optimizer, case.strategy, micro_batches=case.micro_batches, group=group, options=case.options
    )
    seen = Seen([], [], [], 0)

    def look(update: st.Update) -> None:
        seen.parameters.append(parameters_of(model))
        seen.records.append(tuple(repr(getattr(update, field)) for field in FIELDS))
        seen.contributed += update.micro_batches[rank]

    for batch in parallel.feed(stream(case, rank), until=case.until, on_update=look):
        parallel.backward(mean_loss(model, batch), weight=batch[2])
    for update in parallel.finish():
        look(update)
    seen.final = parameters_of(model) + statistics_of(model)
    return seen


def courses(seed: int) -> tuple[Case, int, int]:
    """A case of random lengths, weights, clips and damage, with nodes and ranks per node."""
    draw = random.Random(seed)
    nodes, per_node = draw.choice([(2, 2), (2, 3), (3, 2)])
    case = Case(
        strategy=STRATEGIES[seed % len(STRATEGIES)],
        optimizer=draw.choice(["sgd", "adamw"]),
        lengths=tuple(draw.randint(1, 40) for _ in range(nodes * per_node)),
        micro_batches=draw.choice([1, 3, 4]),
        until=draw.choice(["any", "all"]),
        branch=draw.choice(["always", "one rank"]),
        tokens=draw.random() < 0.5,
        batch_norm=draw.random() < 0.5,
        poisoned=(draw.randint(0, 9),),
        options=st.Options(
            bucket_bytes=4096,
            clip_norm=draw.choice([None, 0.5]),
            wire=draw.choice(["fp32", "int8"]),
            nonfinite="skip",
            allow_unused=True,
        ),
    )
    return case, nodes, per_node


@pytest.mark.parametrize("seed", seeds(12))
def test_ranks_of_a_node_are_the_same_after_every_update(seed: int) -> None:
    case, nodes, per_node = courses(seed)
    chosen = with_nodes(case, per_node)
    cluster = VirtualCluster(nodes * per_node, seed=seed, compute=Compute(jitter=0.5))
    found = cluster.run(lambda rank, group: train(rank, group, chosen)).values
    for node in range(nodes):
        first, *mates = found[node * per_node : (node + 1) * per_node]
        for mate in mates:
            assert mate.records == first.records
            assert [
                (a, b) for a, b in zip(mate.parameters, first.parameters, strict=True) if not same(a, b)
            ] == []
    assert [one for one in found if not same(one.final, found[0].final)] == []
    assert [value for value in found[0].final if not value.isfinite().all()] == []
    if (
        case.until == "all"
    ):  # all batches of all ranks count, whoever ends first, but for the round that is not finite
        expected = list(case.lengths)
        if case.poisoned[0] < expected[-1]:
            begin = case.poisoned[0] // case.micro_batches * case.micro_batches
            for rank in range(len(expected) - per_node, len(expected)):
                expected[rank] -= max(0, min(case.micro_batches, expected[rank] - begin))
        assert [one.contributed for one in found] == expected


def test_a_node_leaves_out_a_round_in_which_one_of_its_ranks_is_not_finite() -> None:
    """The last rank's seventh micro-batch is poisoned: its node does not move in the second update, the other does."""
    case = Case(strategy=STRATEGIES[0], lengths=(12, 12, 12, 12), poisoned=(6,))
    case = dataclasses.replace(case, options=st.Options(nonfinite="skip", ranks_per_node=2))
    found = VirtualCluster(4).run(lambda rank, group: train(rank, group, case)).values
    moved = [not same(one.parameters[0], one.parameters[1]) for one in found]
    assert moved == [True, True, False, False]


NODES = {"ranks_per_node": 2}


def poisoned(parallel: st.DataParallel, step: int) -> float:
    return float("nan") if (parallel.rank, step) == (3, 1) else 1.0


def failing(parallel: st.DataParallel, step: int) -> float:
    if (parallel.rank, step) == (1, 2):
        raise ValueError("a bad batch")
    return 1.0


def with_another_rate(parallel: st.DataParallel, step: int) -> float:
    if (parallel.rank, step) == (3, 2):
        parallel.optimizer.param_groups[0]["lr"] = 0.5
    return 1.0


NOT_FINITE = "ReplicaNonFinite: rank {}, step 2, round 1: the loss is not finite on ranks [3]"
DISAGREES = "WorkerDisagrees: rank {}, after step 2: ranks differ in optimizer"
TOLD = "PeerFailed: rank {}: rank "


@pytest.mark.parametrize(
    ("strategy", "hand", "ranks_per_node", "words"),
    [
        (STRATEGIES[0], poisoned, 2, (TOLD, TOLD, NOT_FINITE, NOT_FINITE)),
        (
            st.DiLoCo(interval=4, worker="node"),
            failing,
            2,
            (
                TOLD + "1 has ended the group.0.0 of ranks 0, 1 after an error",
                "ValueError: a bad batch",
                TOLD + "1 has ended the group",
            ),
        ),
        (
            st.DiLoCo(interval=4, delay=2),
            failing,
            None,
            (TOLD + "1 has ended the group", "ValueError: a bad batch"),
        ),
        (st.LocalSGD(rate=0.1, worker="node"), with_another_rate, 2, (TOLD, TOLD, DISAGREES, DISAGREES)),
    ],
)
def test_what_one_rank_meets_is_named_by_those_that_wait_for_it(
    strategy: st.Strategy, hand: Any, ranks_per_node: int | None, words: tuple[str, ...]
) -> None:
    """Inside a node at once, and on the others that are told."""

    def program(rank: int, group: distributed.ProcessGroup) -> str:
        parallel = start(rank, group, strategy, options={"ranks_per_node": ranks_per_node})
        try:
            with parallel:
                for step in range(11):
                    factor = hand(parallel, step)
                    parallel.backward((parallel.model.weight * (step + rank)).square().mean() * factor)
        except (ValueError, st.StrettoError) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    found = VirtualCluster(4).run(program).values
    for rank, (text, expected) in enumerate(zip(found, words, strict=False)):
        assert text.startswith(expected.format(rank)), text
        if expected is DISAGREES:
            assert "lr=0.05' as on rank 2" in text
            assert "lr=0.5' on rank 3 (differing ranks: [3])" in text


@pytest.mark.parametrize("stops", [True, False])
def test_where_one_rank_of_a_node_stops_or_has_no_more_data_all_end_alike(stops: bool) -> None:
    """A stop ends all at the next average. Without `feed`, `finish` hands over rounds without weight until then."""

    def program(rank: int, group: distributed.ProcessGroup) -> tuple[int, Tensor]:
        parallel = start(rank, group, st.DiLoCo(interval=4, worker="node"), options=NODES)
        for step in parallel.feed(range(100)) if stops else range((6, 3, 9, 9)[rank]):
            if stops and (rank, step) == (2, 5):
                parallel.stop()
            parallel.backward((parallel.model.weight * (step + rank)).square().mean())
        parallel.finish()
        return parallel.steps, parallel.model.weight.detach()

    found = VirtualCluster(4).run(program).values
    assert [steps for steps, _ in found] == [8 if stops else found[0][0]] * 4
    assert [weight for _, weight in found if not torch.equal(weight, found[0][1])] == []
