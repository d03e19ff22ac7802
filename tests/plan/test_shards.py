"""What an update costs where nodes hold a model in shards: the price of a rank's shard between as many nodes."""

import dataclasses
from typing import Any

import pytest

from stretto.errors import ConfigError
from stretto.groups import Link
from stretto.strategies import STRATEGIES
from stretto.strategies.ledger import ledger_of
from stretto_lab.cli.screens import recommendation
from stretto_lab.plan import Machine, PlanConfig, rank_by_time
from stretto_lab.plan.measure import measure
from stretto_lab.train.launch import Ranks
from tests.plan.machine import MACHINE, priced, seconds
from tests.train.tiny import Tiny

SHARDED = dataclasses.replace(MACHINE, shards=4)


@pytest.mark.parametrize("name", ["ddp", "zero1", "dpu", "wp", "acco", "diloco"])
@pytest.mark.parametrize("nodes", [2, 8])
def test_a_rank_holds_what_the_table_says_of_nodes_for_its_shard(name: str, nodes: int) -> None:
    strategy = STRATEGIES[name]()
    machine = dataclasses.replace(SHARDED, ranks=nodes)
    found = priced(name, machine)
    expected = ledger_of(strategy).memory_bytes(strategy, parameter=4, accumulation=4, world_size=nodes)
    assert found.memory_bytes == pytest.approx(expected * machine.parameters)


def test_an_update_takes_what_it_takes_on_ranks_that_hold_a_model_of_a_shards_size() -> None:
    for name in ("zero1", "dpu", "acco"):
        assert seconds(name, SHARDED) == seconds(name)


def planned(measured: Machine, **given: Any) -> list[Machine]:
    return PlanConfig(task=Tiny(), shard=4, **given).machines(measured)


def test_a_plan_for_other_ranks_counts_nodes_and_shares_their_link_among_shards() -> None:
    assert planned(SHARDED) == [SHARDED]
    (found,) = planned(SHARDED, ranks=(64,), network="1gbit")
    assert (found.ranks, found.shards) == (16, 4)
    assert found.link == Link(bits_per_second=2.5e8)
    (found,) = planned(SHARDED, ranks=(12,), slow={5: 2.0, 6: 3.0})
    assert (found.link, found.slowness) == (SHARDED.link, (1.0, 3.0, 1.0))
    with pytest.raises(ConfigError, match="plan for 10 ranks with shard=4: expected a multiple"):
        planned(SHARDED, ranks=(10,))


@pytest.mark.long
def test_the_first_line_says_how_to_train_so() -> None:
    text = recommendation(rank_by_time(SHARDED, micro_batches=4, prices_all=False, clock=None))
    assert text.startswith("8 ranks on nodes of 4 shards: use --shard 4 --strategy ")


def test_a_node_of_shards_is_measured_as_one_rank() -> None:
    config = PlanConfig(task=Tiny(normed=False, width=64), shard=2, link="100mbit")
    measured = Ranks.local(4).call(measure, config, 2)
    assert len({one.link for one in measured}) == 1
    machine = measured[0]
    assert (machine.ranks, machine.shards) == (2, 2)
    assert machine.parameters == (64 * 2 + 64 + 4 * 64 + 4) // 2
    assert machine.micro_batch_seconds > 0 < min(machine.exchange_seconds.values())
