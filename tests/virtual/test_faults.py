"""Damage planted in a virtual cluster's groups: what it does, and that it is found and undone."""

import pytest
import torch
from torch import distributed as dist

from stretto import ACCO, Options
from stretto_lab.faults import Fault, FaultPlan, FaultyGroup
from stretto_lab.faults.injector import Injector
from stretto_lab.faults.plan import WireSite
from stretto_lab.virtual import VirtualCluster
from tests.virtual.programs import Seen, program

SITES: tuple[WireSite, ...] = ("contribution", "gathered values")
RANKS, STRUCK = 3, 1


def trained(site: WireSite | None, *, verified: bool) -> tuple[Seen, ...]:
    """Return what the ranks saw, the second damaged in all that arrives at the fifth opportunity of `site`."""
    faults = () if site is None else (Fault(site=site, rank=STRUCK, instant=4, extent="all", pattern="sign"),)

    def strike(group: dist.ProcessGroup) -> dist.ProcessGroup:
        return FaultyGroup(group, Injector(FaultPlan(faults), group.rank()))

    cluster = VirtualCluster(RANKS, faults=strike)
    options = Options(verified=verified)
    return cluster.run(program(6, strategy=ACCO(), options=options)).values


def are_equal(some: Seen, others: Seen) -> bool:
    pairs = zip(some.parameters, others.parameters, strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("site", SITES)
def test_damage_on_the_way_changes_what_is_trained(site: WireSite) -> None:
    clean, struck = trained(None, verified=False)[STRUCK], trained(site, verified=False)[STRUCK]
    assert not are_equal(clean, struck)


@pytest.mark.parametrize("site", SITES)
def test_a_verified_exchange_names_the_links_and_ends_with_the_bits_of_the_clean_run(site: WireSite) -> None:
    clean, struck = trained(None, verified=True), trained(site, verified=True)
    assert [(one, other) for one, other in zip(clean, struck, strict=True) if not are_equal(one, other)] == []
    for seen in struck:
        incidents = [incident for update in seen.updates for incident in update.incidents]
        assert {incident.site for incident in incidents} == {site}
        assert {incident.link for incident in incidents} == {(sender, STRUCK) for sender in range(RANKS)}
