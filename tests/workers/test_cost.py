"""What workers that are nodes send, inside and across, and what it costs in time."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import stretto as st
from stretto.averaging.reports import empty_report
from stretto.errors import ConfigError
from stretto.groups import Link
from stretto.groups.collective_group import CollectiveGroup
from stretto.groups.collectives import Call
from stretto.guards.fitting import choose_guards
from stretto.strategies import Strategy
from stretto.strategies.ledger import ledger_of
from stretto_lab.train.arms import parse_arm
from stretto_lab.virtual import Compute, Network, VirtualCluster
from tests.diloco.jobs import HEIGHT, WIDTH, Course, go_on, start

NUMEL = WIDTH * HEIGHT
NODES, EACH = 2, 2
RANKS = NODES * EACH
RECORD = len(empty_report(num_slots=1, changed=b"", step=0).pack()[0])


def sent(strategy: Strategy, wire: str) -> list[tuple[int, int]]:
    """What every rank has sent in ten updates, and how much of it to other nodes."""

    def program(rank: int, group: Any) -> tuple[int, int]:
        parallel = start(rank, group, strategy, options={"wire": wire, "ranks_per_node": EACH})
        course, before = Course([], [], [], 0, parallel), parallel.sent_bytes
        go_on(parallel, range(10), course)
        total = parallel.sent_bytes - before
        assert total == sum(update.sent_bytes for update in course.updates)
        crossed = parallel.job.exchange.crossed_bytes
        parallel.finish()
        return total, crossed

    return list(VirtualCluster(RANKS).run(program).values)


@pytest.mark.parametrize(
    ("wire", "gradient", "value"), [("fp32", 4, 4), ("bf16", 2, 2), ("int4", 34 / 64, 2)]
)
@pytest.mark.parametrize("kind", ["diloco", "local"])
def test_bytes_inside_and_across_are_those_of_the_ledger(
    kind: str, wire: str, gradient: float, value: float
) -> None:
    """Ten updates hold two outer steps of two fragments, or two averages. Records come on top."""
    strategies: dict[str, Strategy] = {
        "diloco": st.DiLoCo(interval=5, fragments=2, worker="node"),
        "local": st.LocalSGD(rate=0.2, worker="node"),
    }
    ledger = ledger_of(strategies[kind])
    averages = 10 * ledger.wire_bytes(gradient, value) * NUMEL
    across = averages / EACH * (NODES - 1) / NODES
    inside = (EACH - 1) / EACH
    gradients = 10 * ledger.inside_bytes(4) * NUMEL * inside
    # Averages are summed inside as wide as they are, and gathered inside on the wire.
    gathered = averages / 2
    summed = 2 * NUMEL * 4
    meetings = 4 if kind == "diloco" else 2
    records = 10 * (EACH - 1) * RECORD + meetings * (RANKS - 1) * RECORD
    for total, crossed in sent(strategies[kind], wire):
        assert crossed == across
        assert total == across + gradients + (summed + gathered) * inside + records


def test_ranks_and_nodes_send_the_same_across() -> None:
    nodes, ranks = (sent(st.DiLoCo(interval=5, worker=worker), "int4") for worker in ("node", "rank"))
    assert [crossed for _, crossed in nodes] == [crossed for _, crossed in ranks]
    assert [
        (ours, theirs) for (ours, _), (theirs, _) in zip(nodes, ranks, strict=True) if not ours > theirs
    ] == []
    assert ledger_of(st.DiLoCo(interval=5)).inside_bytes(4) == 0


UPDATE_NS = 1_000_000


def times(strategy: Strategy, slow: dict[int, float]) -> list[list[int]]:
    """Virtual nanoseconds of every rank's updates, on nodes whose link needs several updates for a fragment."""
    network = Network(link=Link(bits_per_second=1e7, latency_seconds=1e-4)).between(NODES, RANKS)
    cluster = VirtualCluster(RANKS, network=network, compute=Compute(micro_batch_ns=UPDATE_NS, slowness=slow))

    def program(rank: int, group: Any) -> list[int]:
        parallel = start(rank, group, strategy, options={"ranks_per_node": EACH})
        course = Course([], [], [], 0, parallel)
        begun = group.now_ns
        go_on(parallel, range(10), course)
        parallel.finish()
        return [time - begun for time in course.times]

    return list(cluster.run(program).values)


def test_a_node_sums_inside_while_a_fragment_travels_and_neither_waits() -> None:
    """The fragment leaves after update 5 and needs several updates on the link between nodes."""
    hidden = times(st.DiLoCo(interval=5, delay=4, worker="node"), {})
    waiting = times(st.DiLoCo(interval=5, worker="node"), {})
    for rank in range(RANKS):
        assert hidden[rank][:9] == [UPDATE_NS * step for step in range(1, 10)]
        assert waiting[rank][5] - waiting[rank][3] > 4 * UPDATE_NS


def test_a_node_waits_for_its_own_ranks_and_for_no_other_node() -> None:
    found = times(st.DiLoCo(interval=8, worker="node"), {3: 2.0})
    for rank in range(RANKS):
        each = UPDATE_NS * (2 if rank >= EACH else 1)
        assert found[rank][:7] == [each * step for step in range(1, 8)]


# What cannot be


class Mute(CollectiveGroup):
    """A group of three ranks on which nothing may be sent."""

    def private(self) -> "Mute":
        return self

    def perform(self, call: Call) -> Any:
        raise AssertionError(f"a {call.operation.name} before the options were checked")

    def get_group_store(self) -> Any:
        raise RuntimeError("no store")


@pytest.mark.parametrize("strategy", [st.DiLoCo(worker="node"), st.LocalSGD(worker="node")], ids=repr)
@pytest.mark.parametrize(
    ("ranks_per_node", "words"),
    [
        (
            None,
            r"worker='node'\): a worker that is a node needs to know its ranks: expected Options\(ranks_per_node=L",
        ),
        (2, "ranks_per_node=2: expected a divisor of the 3 ranks"),
    ],
)
def test_nodes_that_are_not_known_are_refused_before_anything_is_sent(
    strategy: Strategy, ranks_per_node: int | None, words: str
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = st.Options(ranks_per_node=ranks_per_node)
    with pytest.raises(ConfigError, match=words):
        st.DataParallel(model, optimizer, strategy, group=Mute(0, 3), options=options)


def test_a_verified_job_has_no_nodes_for_workers_and_standard_guards_know_it() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy, options = st.DiLoCo(worker="node"), st.Options(ranks_per_node=3)
    verified = dataclasses.replace(options, verified=True)
    with pytest.raises(ConfigError, match="sums inside a worker that is a node are not checked"):
        st.DataParallel(model, optimizer, strategy, group=Mute(0, 3), options=verified)
    _, chosen = choose_guards("standard", strategy, options)
    assert not chosen.verified
    _, chosen = choose_guards("standard", st.DiLoCo(), options)
    assert chosen.verified


def test_other_kinds_of_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected one of rank, node"):
        st.DiLoCo(worker="rack")


def test_the_command_line_knows_the_option() -> None:
    assert parse_arm("diloco:interval=30:worker=node").strategy() == st.DiLoCo(interval=30, worker="node")
    assert parse_arm("local:rate=0.1:worker=node").strategy() == st.LocalSGD(rate=0.1, worker="node")
