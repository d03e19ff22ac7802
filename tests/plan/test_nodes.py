"""What an update costs where ranks lie on nodes: two levels, one, and which of them a plan takes."""

import dataclasses
import random
from typing import Any

import pytest

from stretto.errors import ConfigError
from stretto.groups import Link
from stretto_lab.plan import Machine, PlanConfig, rank_by_time
from stretto_lab.recipes import DigitsResNet
from tests.draws import part, seeds
from tests.plan.machine import BUCKET_BYTES, MACHINE, priced, seconds


def on_nodes(ranks: int, each: int, **changes: Any) -> Machine:
    return dataclasses.replace(MACHINE, ranks=ranks, ranks_per_node=each, **changes)


@pytest.mark.parametrize(("nodes", "each"), part([(2, 2), (2, 8), (3, 2), (8, 4)]))
def test_what_crosses_between_nodes_is_divided_by_their_ranks_on_two_levels(nodes: int, each: int) -> None:
    """A node's ranks share its link. On one level L·P·(1 - 1/M) values leave it to be summed, and P·(1 - 1/(L·M)) in
    the ring that gathers; on two levels P·(1 - 1/M), twice."""
    machine = on_nodes(nodes * each, each)
    compute, lane = 4 * machine.micro_batch_seconds, 0.01 + 0.02 / machine.ranks
    whole = 4 * machine.parameters * 8 / 2e8
    crossing = (each * (1 - 1 / nodes) + 1 - 1 / machine.ranks) * whole
    assert seconds("dpu", machine) == pytest.approx(max(compute, crossing + lane), rel=0.01)
    by_node, crossing = f"dpu:ranks_per_node={each}", 2 * (1 - 1 / nodes) * whole
    assert seconds(by_node, machine) == pytest.approx(max(compute, crossing + lane), rel=0.01)


@pytest.mark.parametrize("seed", seeds(12))
def test_an_exchange_on_two_levels_takes_the_longer_level_and_a_bucket_of_the_other(seed: int) -> None:
    """max(a, b) + min(a, b) / K for K buckets, with a = P·(1 - 1/M) between nodes and b = p·(1 - 1/L) inside. The
    report of a round and alignment are within a hundredth."""
    draw = random.Random(seed)
    nodes, each = draw.choice([(2, 2), (2, 4), (3, 2), (4, 4), (8, 8)])
    across, buckets = draw.uniform(0.05, 2.0), draw.choice([1, 2, 8])
    inside = across * 10 ** draw.uniform(-1.5, 1.0)
    whole = 4 * MACHINE.parameters
    machine = on_nodes(
        nodes * each,
        each,
        link=Link(bits_per_second=8 * whole / across),
        inside=Link(bits_per_second=8 * whole / inside),
        forward_seconds=1e-4,
        backward_seconds=1e-4,
        step_seconds=0.0,
        exchange_seconds=dict.fromkeys(MACHINE.exchange_seconds, 0.0),
    )
    found = priced(f"dpu:ranks_per_node={each}", machine, 1, whole // buckets).seconds
    crossing, moving = across * (1 - 1 / nodes), inside * (1 - 1 / each)
    once = max(crossing, moving) + min(crossing, moving) / buckets
    assert found == pytest.approx(2 * once, rel=0.01)  # a sum and a gather


@pytest.mark.parametrize(("nodes", "each"), part([(2, 2), (3, 8)]))
def test_bytes_of_two_levels_are_those_of_the_page_on_nodes(nodes: int, each: int) -> None:
    machine, parameters = on_nodes(nodes * each, each), MACHINE.parameters
    across, inside = (1 - 1 / nodes) / each * parameters, (1 - 1 / each) * parameters
    int4 = 34 / 64
    for arm, expected in (
        ("zero1", 8 * parameters * (1 - 1 / machine.ranks)),
        (f"zero1:ranks_per_node={each}", 8 * across + 8 * inside),
        (f"zero1:wire=int4:ranks_per_node={each}", 2 * int4 * across + (4 + int4) * inside),
    ):
        # A twin's records are as long as the job's.
        assert priced(arm, machine, 1).sent_bytes == pytest.approx(expected, rel=0.04)


@pytest.mark.long
def test_a_link_inside_nodes_that_is_slow_has_its_price() -> None:
    slow = on_nodes(4, 2, inside=Link(bits_per_second=1e8))
    for arm in ("zero1:ranks_per_node=2", "diloco:worker=node:ranks_per_node=2"):
        assert seconds(arm, slow) > 1.2 * seconds(arm, on_nodes(4, 2))


@pytest.mark.long
def test_a_job_on_nodes_is_ranked_on_both_levels_unless_it_has_chosen() -> None:
    machine = on_nodes(4, 2, link=Link(bits_per_second=1e7))
    open_, chosen = (
        rank_by_time(
            machine,
            micro_batches=4,
            bucket_bytes=BUCKET_BYTES,
            allow_loss=0.0,
            prices_all=False,
            ranks_per_node=given,
        )
        for given in (None, 2)
    )
    assert open_.choice == chosen.choice
    assert open_.choice.arm.endswith(":ranks_per_node=2")
    assert (open_.base.arm, chosen.base.arm) == ("zero1", "zero1:ranks_per_node=2")
    assert {one.arm for one in open_.prices} - {one.arm for one in chosen.prices} == {
        "zero1",
        open_.choice.arm[:-17],
    }


def test_a_plan_for_other_nodes_needs_to_know_the_link_between_them() -> None:
    def planned(measured: Machine, **given: Any) -> list[Machine]:
        return PlanConfig(task=DigitsResNet(), **given).machines(measured)

    flat, nodes = MACHINE, on_nodes(4, 2, inside=Link(bits_per_second=1e9))
    with pytest.raises(ConfigError, match="the link between nodes was not measured"):
        planned(flat, ranks=(8,), ranks_per_node=4)
    (found,) = planned(flat, ranks=(8,), ranks_per_node=4, network="1gbit")
    assert (found.ranks_per_node, found.link.bits_per_second, found.inside) == (4, 1e9, flat.link)
    (found,) = planned(flat, ranks=(4,), ranks_per_node=4)
    assert (found.ranks_per_node, found.link) == (1, flat.link)  # one node
    assert planned(nodes) == [nodes]
    assert planned(nodes, ranks=(2,)) == [
        dataclasses.replace(nodes, ranks=2, ranks_per_node=1, link=nodes.inside)
    ]
    with pytest.raises(ConfigError, match="expected a divisor of the 5 ranks"):
        planned(nodes, ranks=(5,))
