"""Every pattern damages what it says, by the seed, unseen by version counters, and leaves a record."""

import pytest
import torch

from experiments.campaign.drawing import draw_fault
from stretto.checksums import digest, hexadecimal
from stretto.errors import ConfigError
from stretto_lab.faults import EXTENTS, LASTS, PATTERNS, Fault, FaultPlan, Injector
from stretto_lab.faults.plan import SITES

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)


def values(dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.randn(256, generator=torch.Generator().manual_seed(1)) * 50 + 100
    return numbers.to(dtype)


def strike(fault: Fault, tensor: torch.Tensor, opportunities: int = 1) -> Injector:
    injector = Injector(FaultPlan((fault,)), rank=0)
    for _ in range(opportunities):
        injector.offer(fault.site, [tensor])
    return injector


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extent", EXTENTS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pattern_changes_bits_and_says_so(pattern: str, extent: str, dtype: torch.dtype) -> None:
    fault = Fault(site="masters", rank=0, pattern=pattern, extent=extent, chunk_bytes=64, seed=3)
    tensor = values(dtype)
    version, before = tensor._version, digest(tensor)
    done = strike(fault, tensor).applications
    assert [(a.before, a.after) for a in done] == [(hexadecimal(before), hexadecimal(digest(tensor)))]
    assert tensor._version == version
    moves = pattern in ("shifted", "duplicated", "swapped")
    assert done[0].changed or (moves and done[0].elements == 1)  # a lone element cannot change places


@pytest.mark.parametrize(
    ("extent", "elements"), [("element", 1), ("run", 4), ("fraction", 25), ("chunk", 16), ("all", 256)]
)
def test_the_extent_is_kept(extent: str, elements: int) -> None:
    tensor = values(torch.float32)
    fault = Fault(site="sum", rank=0, pattern="huge", extent=extent, fraction=0.1, chunk_bytes=64)
    assert strike(fault, tensor).applications[0].elements == elements
    assert int((tensor == 1e38).sum()) == elements


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_flip_flips_so_many_bits(bits: int) -> None:
    tensor = values(torch.float32)
    difference = tensor.view(torch.int32).clone()
    strike(Fault(site="sum", rank=0, bits=bits), tensor)
    difference ^= tensor.view(torch.int32)
    assert [bin(word & 0xFFFFFFFF).count("1") for word in difference.tolist() if word] == [bits]


def test_equal_seeds_do_equal_damage_and_others_do_not() -> None:
    found = []
    for seed in (5, 5, 6):
        tensor = values(torch.float32)
        strike(Fault(site="sum", rank=0, extent="run", pattern="word", seed=seed), tensor)
        found.append(digest(tensor))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("lasts", "struck"),
    [*zip(LASTS, ([2], [2, 3, 4, 5, 6, 7, 8, 9], [2, 3, 6, 7]), strict=True)],
)
def test_faults_strike_when_they_say(lasts: str, struck: list[int]) -> None:
    fault = Fault(site="sum", rank=0, instant=2, lasts=lasts, burst=2, pattern="word")
    assert [a.opportunity for a in strike(fault, values(torch.float32), 10).applications] == struck


def test_a_rate_is_the_share_of_opportunities_that_are_hit() -> None:
    fault = Fault(site="sum", rank=0, lasts="sticky", rate=0.3)
    hit = [fault.is_on(opportunity) for opportunity in range(2000)]
    # Five standard deviations of a binomial share: 5 * sqrt(0.3 * 0.7 / 2000) = 0.051.
    assert sum(hit) / 2000 == pytest.approx(0.3, abs=0.051)
    assert hit == [fault.is_on(opportunity) for opportunity in range(2000)]


def test_stale_values_are_those_of_the_last_opportunity() -> None:
    injector = Injector(FaultPlan((Fault(site="sum", rank=0, instant=1, extent="all", pattern="stale"),)), 0)
    first, second = torch.arange(8.0), torch.arange(8.0) * 10
    injector.offer("sum", [first])
    injector.offer("sum", [second])
    assert torch.equal(second, first)


def test_other_ranks_and_sites_are_left_alone() -> None:
    tensor = values(torch.float32)
    before = digest(tensor)
    injector = Injector(FaultPlan((Fault(site="sum", rank=1), Fault(site="masters", rank=0))), rank=0)
    injector.offer("sum", [tensor])
    assert digest(tensor) == before
    assert injector.applications == []


def test_draws_are_repeatable_and_reach_every_site_and_rank() -> None:
    drawn = [draw_fault(seed, SITES, world_size=3, opportunities=7) for seed in range(400)]
    assert drawn == [draw_fault(seed, SITES, world_size=3, opportunities=7) for seed in range(400)]
    assert {fault.site for fault in drawn} == set(SITES)
    assert {fault.rank for fault in drawn} == {0, 1, 2}
    assert {fault.instant for fault in drawn} == set(range(7))


@pytest.mark.parametrize(
    "wrong", [{"site": "moon"}, {"rank": -1}, {"rate": 0.0}, {"bits": 0}, {"lasts": "ever"}]
)
def test_faults_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Fault(**{"site": "sum", "rank": 0, **wrong})
