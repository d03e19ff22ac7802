"""Damage between ranks on nodes: on every leg of every value's way it is noticed, named and undone."""

import functools
import itertools
import random
from typing import Any

import pytest
import torch

import stretto
from experiments.campaign.drawing import draw_fault
from stretto.errors import TransferCorrupt
from stretto.strategies import STRATEGIES, Strategy
from stretto_lab.faults import Fault
from tests.draws import part
from tests.guards.watched import Seen, apart, struck
from tests.wires import OF_GRADIENTS

RANKS, PER_NODE, STRUCK = 4, 2, 1
SENDERS = {" inside a node": (0, 1), " between nodes": (1, 3)}
"""Who sends to the struck rank on which level."""
LEGS = (
    ("contribution", " inside a node"),
    ("contribution", " between nodes"),
    ("gathered values", " between nodes"),
    ("gathered values", " inside a node"),
)
"""The way of a bucket: what is damaged, and where. Each leg is one all-to-all, a *contribution* to who damages it."""
OFTEN: dict[str, dict[str, Any]] = {
    "average": {"every": 2},
    "local": {"rate": 0.5},
    "diloco": {"interval": 2},
    "paft-sync": {"interval": 2},
    "paft-dyn": {"first": 1, "maximum": 2},
}
CASES = list(zip(itertools.product(STRATEGIES, LEGS), itertools.cycle((*OF_GRADIENTS, "int8")), strict=False))
"""Every strategy and leg, the wires in turn."""


def strategy(name: str) -> Strategy:
    return STRATEGIES[name](**OFTEN.get(name, {}))


def train(
    name: str, *faults: Fault, ranks: int = RANKS, per_node: int = PER_NODE, **options: Any
) -> tuple[Seen, ...]:
    """Train a small job on nodes, struck on its way and in memory, on every rank."""
    choices = stretto.Options(**{"bucket_bytes": 2**20, "ranks_per_node": per_node, **options})
    return struck(strategy(name), *faults, ranks=ranks, options=choices)


@functools.cache
def clean(name: str, **choices: Any) -> tuple[Seen, ...]:
    """Train without a fault, once for all tests that compare with it."""
    return train(name, **choices)


def at(leg: int, **settings: Any) -> Fault:
    """All that arrives on one leg, in the second exchange of the job."""
    return Fault(
        site="contribution", rank=STRUCK, instant=4 + leg, **{"extent": "all", "pattern": "sign", **settings}
    )


@pytest.mark.parametrize(
    ("name", "leg", "wire"), part((name, leg, wire) for (name, leg), wire in CASES), ids=str
)
def test_damage_on_any_leg_is_named_and_the_run_ends_as_without_it(
    name: str, leg: tuple[str, str], wire: str
) -> None:
    fault = at(LEGS.index(leg))
    found = train(name, fault, wire=wire, verified=True)
    assert found[STRUCK].changed == [True]
    assert apart(found, clean(name, wire=wire)) == []  # which is not verified
    site, where = leg
    for seen in found:
        assert seen.error is None
        assert {(one.guard, one.site, one.part) for one in seen.incidents} == {
            ("verified", site, f"bucket 0{where}")
        }
        assert {one.link for one in seen.incidents} == {(sender, STRUCK) for sender in SENDERS[where]}
    assert apart(train(name, fault, wire=wire), clean(name, wire=wire)) != []  # nobody has noticed


@pytest.mark.long(keep=3)
@pytest.mark.parametrize(("ranks", "per_node"), [(4, 2), (6, 3), (6, 2), (3, 1), (4, 4), (1, 2)])
@pytest.mark.parametrize("wire", OF_GRADIENTS)
def test_where_nothing_is_damaged_every_bit_is_that_of_a_job_that_checks_nothing(
    ranks: int, per_node: int, wire: str
) -> None:
    name = random.Random(f"{wire}{ranks}{per_node}").choice(list(STRATEGIES))
    choices = {"ranks": ranks, "per_node": per_node, "wire": wire, "bucket_bytes": 512}
    verified = train(name, verified=True, **choices)
    assert apart(verified, train(name, **choices)) == [], name
    assert [seen for seen in verified if seen.incidents != []] == []


@pytest.mark.long(keep=2)
@pytest.mark.parametrize("hide", [True, False])
@pytest.mark.parametrize("name", STRATEGIES)
def test_any_damage_to_any_bucket_is_undone(name: str, hide: bool) -> None:
    draws = random.Random(f"{name}{hide}")
    choices = {"wire": draws.choice(OF_GRADIENTS), "bucket_bytes": 512, "hide_reductions": hide}
    for _ in range(2):
        fault = draw_fault(draws.randrange(10**6), ["contribution"], RANKS, opportunities=20)
        found = train(name, fault, verified=True, **choices)
        assert apart(found, clean(name, **choices)) == [], fault
        links = {one.link for one in found[0].incidents}
        assert bool(links) == any(found[fault.rank].changed), fault
        assert [link for link in links if not (link is not None and link[1] == fault.rank)] == [], fault


@pytest.mark.parametrize(("sum_number", "where"), [(0, " inside a node"), (3, " between nodes")])
@pytest.mark.parametrize("name", ["ddp", "acco"])
def test_a_sum_of_either_level_that_comes_out_wrong_is_added_up_again(
    name: str, sum_number: int, where: str
) -> None:
    fault = Fault(site="sum", rank=STRUCK, instant=sum_number, extent="all", pattern="sign")
    found = train(name, fault, wire="int8", verified=True)
    assert apart(found, clean(name, wire="int8")) == []
    for seen in found:
        assert {(one.site, one.part, one.ranks) for one in seen.incidents} == {
            ("sum", f"bucket 0{where}", (STRUCK,))
        }


def test_a_link_that_damages_everything_ends_the_job_on_all_ranks_and_is_named() -> None:
    found = train("zero1", at(1, lasts="sticky"), verified=True)
    errors = [seen.error for seen in found]
    assert all(errors)
    for error in errors:
        if isinstance(error, TransferCorrupt):
            assert {receiver for _, receiver in error.links} == {STRUCK}
    assert any(isinstance(error, TransferCorrupt) for error in errors)


def test_standard_guards_check_what_arrives_on_nodes_too() -> None:
    model = torch.nn.Linear(2, 2)
    parallel = stretto.DataParallel(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        guards="standard",
        options=stretto.Options(ranks_per_node=1),
    )
    assert parallel.options.verified
    assert any(isinstance(guard, stretto.AtRest) for guard in parallel.guards)
