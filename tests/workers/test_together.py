"""The ranks of a node hold the same parameters after every update, and decide alike, whatever each of them is given."""

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

import stretto as st
from stretto.errors import PeerFailed, ReplicaNonFinite, WorkerDisagrees
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


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_nodes_differ_between_averages(strategy: st.strategies.Strategy) -> None:
    case = with_nodes(Case(strategy=strategy, lengths=(31,)), 2)
    found = VirtualCluster(4).run(lambda rank, group: train(rank, group, case)).values
    assert not same(found[0].parameters[0], found[2].parameters[0])


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@pytest.mark.parametrize("lengths", [(7, 20, 33, 9), (40, 3, 3, 3), (1, 40, 40, 40)])
def test_all_batches_of_all_ranks_count_where_some_end_first(
    lengths: tuple[int, ...], strategy: st.strategies.Strategy
) -> None:
    case = with_nodes(Case(strategy=strategy, lengths=lengths, until="all"), 2)
    found = VirtualCluster(4).run(lambda rank, group: train(rank, group, case)).values
    assert [one.contributed for one in found] == list(lengths)
    assert len({one.records[-1][0] for one in found}) == 1  # of as many updates
    assert [one for one in found if not same(one.final, found[0].final)] == []


def test_a_node_leaves_out_a_round_in_which_one_of_its_ranks_is_not_finite() -> None:
    """The last rank's seventh micro-batch is poisoned: its node does not move in the second update, the other does."""
    case = Case(strategy=STRATEGIES[0], lengths=(12, 12, 12, 12), poisoned=(6,))
    case = dataclasses.replace(case, options=st.Options(nonfinite="skip", ranks_per_node=2))
    found = VirtualCluster(4).run(lambda rank, group: train(rank, group, case)).values
    moved = [not same(one.parameters[0], one.parameters[1]) for one in found]
    assert moved == [True, True, False, False]


def test_all_ranks_of_a_node_name_the_one_that_is_not_finite_and_the_others_are_told() -> None:
    def program(rank: int, group: distributed.ProcessGroup) -> str:
        case = Case(strategy=STRATEGIES[0], lengths=(8, 8, 8, 8), poisoned=(6,))
        try:
            train(rank, group, with_nodes(case, 2))
        except (ReplicaNonFinite, PeerFailed) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    found = VirtualCluster(4).run(program).values
    for rank in (2, 3):
        expected = f"ReplicaNonFinite: rank {rank}, step 2, round 1: the loss is not finite on ranks [3]"
        assert found[rank].startswith(expected)
    for rank in (0, 1):
        assert found[rank].startswith(f"PeerFailed: rank {rank}: rank ")


def test_an_error_of_one_rank_reaches_those_that_wait_for_it_inside_the_node() -> None:
    def program(rank: int, group: distributed.ProcessGroup) -> str:
        parallel = start(rank, group, st.DiLoCo(interval=4, worker="node"), options={"ranks_per_node": 2})
        try:
            with parallel:
                for step in range(11):
                    if (rank, step) == (1, 2):
                        raise ValueError("a bad batch")
                    parallel.backward((parallel.model.weight * (step + rank)).square().mean())
        except (ValueError, PeerFailed) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    found = VirtualCluster(4).run(program).values
    assert found[1] == "ValueError: a bad batch"
    assert found[0] == "PeerFailed: rank 0: rank 1 has given up the group.0.0 of ranks 0, 1 after an error"
    assert found[2].startswith("PeerFailed: rank 2: rank 1 has given up the group.0 after")


def test_ranks_of_a_node_that_would_step_with_other_settings_are_named_at_once() -> None:
    def program(rank: int, group: distributed.ProcessGroup) -> str:
        parallel = start(rank, group, st.LocalSGD(rate=0.1, worker="node"), options={"ranks_per_node": 2})
        try:
            for step in range(11):
                if (rank, step) == (3, 2):
                    parallel.optimizer.param_groups[0]["lr"] = 0.5
                parallel.backward((parallel.model.weight * (step + rank)).square().mean())
        except (WorkerDisagrees, PeerFailed) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    found = VirtualCluster(4).run(program).values
    for rank in (2, 3):
        assert found[rank].startswith(
            f"WorkerDisagrees: rank {rank}, after step 2: ranks differ in optimizer"
        )
        assert "lr=0.05' as on rank 2" in found[rank]
        assert "lr=0.5' on rank 3 (differing ranks: [3])" in found[rank]
    assert found[0].startswith("PeerFailed: rank 0: rank ")


def test_a_stop_of_one_rank_ends_all_at_the_next_average() -> None:
    def program(rank: int, group: distributed.ProcessGroup) -> tuple[int, Tensor]:
        parallel = start(rank, group, st.DiLoCo(interval=4, worker="node"), options={"ranks_per_node": 2})
        for step in parallel.feed(range(100)):
            if (rank, step) == (2, 5):
                parallel.stop()
            parallel.backward((parallel.model.weight * (step + rank)).square().mean())
        parallel.finish()
        return parallel.steps, parallel.model.weight.detach()

    found = VirtualCluster(4).run(program).values
    assert [steps for steps, _ in found] == [8] * 4
    assert [weight for _, weight in found if not torch.equal(weight, found[0][1])] == []


def test_a_loop_without_feed_may_end_on_one_rank_of_a_node_before_the_other() -> None:
    """`finish` hands over rounds without weight until its node-mates come too."""

    def program(rank: int, group: distributed.ProcessGroup) -> tuple[int, Tensor]:
        parallel = start(rank, group, st.DiLoCo(interval=4, worker="node"), options={"ranks_per_node": 2})
        for step in range((6, 3, 9, 9)[rank]):
            parallel.backward((parallel.model.weight * (step + rank)).square().mean())
        parallel.finish()
        return parallel.steps, parallel.model.weight.detach()

    found = VirtualCluster(4).run(program).values
    assert len({steps for steps, _ in found}) == 1
    assert [weight for _, weight in found if not torch.equal(weight, found[0][1])] == []
