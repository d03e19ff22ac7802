"""Places where values lie between two uses: each is watched, or damage there changes nothing."""

import dataclasses
import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto as st
from stretto import checksums
from stretto.errors import CorruptionError, ReplicasDiverged, StateCorrupt
from stretto.exchange.exchange import sum_in_rank_order
from stretto.exchange.sums import is_plausible_sum, sampled
from stretto.records import Incident
from stretto_lab.faults import Fault
from stretto_lab.faults.injector import alias_of
from stretto_lab.faults.plan import Extent, Lasts, Site
from stretto_lab.testing import differing
from stretto_lab.virtual import VirtualCluster, VirtualGroup
from tests.guards.watched import STRATEGIES, Job, Network, Seen, apart, same, struck

STRUCK = 1
EACH = pytest.mark.parametrize("name", STRATEGIES)
BY_SHARDS = ("zero1", "dpu", "wp", "acco")


def train(
    name: str, *faults: Fault, guards: Any = "standard", freeze: bool = False, **options: Any
) -> tuple[Seen, ...]:
    """Train small jobs; what is no option of a job is one of `struck`."""
    others = {key: options.pop(key) for key in ("ranks", "damage") if key in options}
    choices = {"guards": guards, "options": st.Options(bucket_bytes=8192, **options), **others}
    return struck(STRATEGIES[name], *faults, width=700, frozen=("enter.weight",) * freeze, **choices)


@functools.cache
def clean(name: str, **choices: Any) -> tuple[Seen, ...]:
    """Train without a fault, once for all tests that compare with it."""
    return train(name, **choices)


def fault(site: Site, extent: Extent = "page", instant: int = 2) -> Fault:
    return Fault(site=site, rank=STRUCK, instant=instant, extent=extent, pattern="zero", seed=1)


PAGES: list[tuple[str, Site, int, dict[str, Any]]] = [
    *((name, "values to be shown", 2, {}) for name in STRATEGIES),
    *((name, "values to be shown", 2, {"ranks": 2}) for name in ("ddp", "acco")),
    *((name, "frozen parameters", 2, {"freeze": True}) for name in STRATEGIES),
    *((name, "buffers", 5, {}) for name in STRATEGIES),
    *((name, "error memory", 2, {"wire": "int8"}) for name in STRATEGIES),
    *((name, "anchor", 2, {"wire": "int4"}) for name in BY_SHARDS),
]


@pytest.mark.long(keep=3)
@pytest.mark.parametrize(("name", "site", "instant", "choices"), PAGES)
def test_a_page_that_is_zeroed_is_mended_and_a_round_that_has_seen_it_run_again(
    name: str, site: Site, instant: int, choices: dict[str, Any]
) -> None:
    found = train(name, fault(site, instant=instant), **choices)
    assert found[STRUCK].changed == [True]
    assert apart(found, clean(name, **choices)) == []
    for seen in found:
        assert seen.error is None
        assert {(one.guard, one.site, one.ranks) for one in seen.incidents} == {("rest", site, (STRUCK,))}


@pytest.mark.parametrize("name", ["zero1", "acco"])
def test_what_changes_are_added_to_is_compared_between_ranks(name: str) -> None:
    hit = fault("anchor")
    drifted = train(name, hit, wire="int8", guards=(), ranks=3)
    assert not same(drifted[STRUCK].final, drifted[0].final)
    # What its owner has sent meanwhile is wrong on all ranks alike, and the owner's next change puts it right.
    compared = train(name, hit, wire="int8", guards=(st.ReplicaGuard(),), ranks=3)
    for seen in compared:
        assert same(seen.final, compared[0].final)
        assert {one.ranks for one in seen.incidents} == {(STRUCK,)}


SITES: tuple[Site, ...] = (
    "contribution",
    "gathered values",
    "sum",
    "masters",
    "optimizer state",
    "reduced gradient",
    "values to be shown",
    "shown parameters",
    "frozen parameters",
    "buffers",
)


@pytest.mark.parametrize("seed", range(6))
def test_digests_of_devices_have_the_same_damage_found_and_repaired(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = random.Random(seed)
    name, site = draws.choice(list(STRATEGIES)), draws.choice(SITES)
    extent: Extent = draws.choice(["element", "run", "page", "all"])
    hit = fault(site, extent, instant=draws.randrange(2, 6))

    def told() -> list[Any]:
        return [
            (
                seen.final,
                type(seen.error),
                [dataclasses.replace(one, expected=None, found=None) for one in seen.incidents],
            )
            for seen in train(name, hit, freeze=True)
        ]

    here = told()
    monkeypatch.setattr(checksums, "HOSTS", ())
    assert differing(here, told()) == []


def test_rounding_errors_beyond_repair_are_forgone_and_ranks_stay_equal() -> None:
    whole = Fault(site="error memory", rank=STRUCK, instant=2, extent="all", pattern="misread")
    found = train("zero1", whole, wire="int8", guards=(st.AtRest(),))
    assert {one.action for one in found[0].incidents} <= {"mended", "set to zero"}
    assert {one.ranks for one in found[0].incidents} == {(STRUCK,)}
    assert [seen for seen in found if not same(seen.final, found[0].final)] == []


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@EACH
def test_standard_guards_work_everywhere_and_say_nothing_where_nothing_is_wrong(name: str, wire: str) -> None:
    guarded, plain = clean(name, wire=wire), clean(name, guards=(), wire=wire)
    assert [seen.incidents for seen in guarded] == [[]] * 3
    assert apart(guarded, plain) == []


@pytest.mark.parametrize("name", BY_SHARDS)
def test_replicas_compare_what_their_models_will_show_under_sharded_strategies_too(name: str) -> None:
    one = fault("gathered values")
    found = train(name, one, guards=(st.ReplicaGuard(),))
    # An estimate is followed by committed values; only these are compared.
    assert {incident.ranks for incident in found[0].incidents} <= {(STRUCK,)}
    if name in ("zero1", "dpu"):
        assert {incident.site for incident in found[0].incidents} == {"values to be shown"}
        assert apart(found, clean(name, guards=(st.ReplicaGuard(),))) == []


def test_of_three_ranks_of_which_two_are_damaged_alike_the_healthy_one_is_named() -> None:
    def program(rank: int, group: VirtualGroup) -> list[Incident]:
        job = Job(st.DDP(), rank, group=group, guards=(st.ReplicaGuard(),))
        owner: Any = job.parallel.job.sharded
        step = owner.optimizer.step

        def wrong_step() -> None:
            step()
            if rank != 0:
                owner.masters[0][5] += 1

        owner.optimizer.step = wrong_step
        update = next(update for _ in range(8) if (update := job.micro_batch()))
        return list(update.incidents)

    for incidents in VirtualCluster(3).run(program).values:
        assert {incident.ranks for incident in incidents} == {(0,)}


@pytest.mark.parametrize("instant", [0, 1, 5, 6])  # a bucket's first sum or the second
@pytest.mark.parametrize("lasts", ["once", "sticky"])
def test_a_sum_is_not_used_wrong_however_often_it_comes_out_so(instant: int, lasts: Lasts) -> None:
    zeroed = dataclasses.replace(fault("sum", "chunk", instant), lasts=lasts, chunk_bytes=2**20)
    found = train("zero1", zeroed)
    if lasts == "once":
        assert apart(found, clean("zero1")) == []
        for seen in found:
            assert {(one.site, one.ranks) for one in seen.incidents} == {("sum", (STRUCK,))}
    else:
        for seen in found:
            assert isinstance(seen.error, CorruptionError)
            assert tuple(seen.error.ranks) == (STRUCK,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_true_sum_is_plausible_and_a_damaged_one_is_not(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    for case in range(200):
        ranks, numel = 1 + case % 5, 1 + case % 37
        size = 10.0 ** float(torch.randint(-45, 39, (), generator=generator))
        values = [
            (torch.randn(numel, generator=generator, dtype=torch.float64) * size)
            .clamp(-largest, largest)
            .to(dtype)
            for _ in range(ranks)
        ]
        total = torch.empty(numel, dtype=dtype)
        sum_in_rank_order(values, total)
        terms = torch.stack(values)
        assert is_plausible_sum(terms, total)
        if smallest < size < largest / 100:
            struck = total.clone()
            struck[-1] = -2 * struck[-1] + 8 * ranks * max(abs(float(value[-1])) for value in values)
            assert not is_plausible_sum(terms, struck)


def test_no_run_of_a_sum_is_wrong_unseen_though_only_a_sample_is_looked_at() -> None:
    draws, generator = random.Random(7), torch.Generator().manual_seed(7)
    for _ in range(300):
        numel = draws.choice((draws.randint(1, 600), draws.randint(1, 9000)))
        values = [torch.randn(numel, generator=generator) for _ in range(draws.randint(1, 5))]
        total = torch.empty(numel)
        sum_in_rank_order(values, total)
        looked_at = sampled(torch.stack(values))
        assert is_plausible_sum(looked_at, sampled(total))
        length = draws.randint(min(256, numel), numel)
        start = draws.randint(0, numel - length)
        run = total[start : start + length]
        run.copy_(
            draws.choice((torch.zeros_like(run), -run, run.flip(0) + 1, torch.full_like(run, torch.nan)))
        )
        assert not is_plausible_sum(looked_at, sampled(total))


def spare_memory(parallel: st.DataParallel) -> list[Tensor]:
    """Return buffers and sums that the job holds for later."""
    job: Any = parallel.job
    idle = [] if job.compute._idle is None else job.compute._idle.flats
    sums = [total for sums in job.replica._spare_sums for total in sums]
    return [*idle, *sums, *job.exchange.scratch.held]


@EACH
def test_damage_to_memory_that_is_overwritten_before_its_use_changes_nothing(name: str) -> None:
    def damage(parallel: st.DataParallel) -> None:
        spare = spare_memory(parallel)
        assert spare
        for tensor in spare:
            alias_of(tensor).fill_(7)

    found = train(name, guards=(), damage=damage)
    assert [seen.error for seen in found] == [None] * 3
    assert apart(found, clean(name, guards=())) == []


class Renewing(Network):
    """Writes its buffer in some forward passes, as a queue or a moving average does."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            with torch.no_grad():
                self.get_buffer("shift").add_(0.1)
                self.scale.mul_(0.99)
        return super().forward(x)


@EACH
def test_buffers_and_frozen_parameters_that_the_model_writes_raise_no_alarm(name: str) -> None:
    def program(_: int, group: VirtualGroup) -> list[Incident]:
        torch.manual_seed(0)
        model = Renewing(19)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        parallel = st.DataParallel(
            model, optimizer, STRATEGIES[name], micro_batches=2, group=group, guards=(st.AtRest(),)
        )
        updates = [
            parallel.micro_batch(lambda x: model(x).square().mean(), torch.ones(4, 6)) for _ in range(12)
        ]
        return [one for update in (*updates, *parallel.finish()) if update for one in update.incidents]

    assert VirtualCluster(2).run(program).values == ([], [])


def test_a_frozen_parameter_beyond_repair_ends_the_job_and_names_the_rank() -> None:
    whole = Fault(site="frozen parameters", rank=STRUCK, instant=2, extent="all", pattern="misread")
    errors = [
        seen.error
        for seen in struck(st.DDP(), whole, width=6000, frozen=("enter.weight",), guards=(st.AtRest(),))
    ]
    assert isinstance(errors[STRUCK], StateCorrupt)
    assert errors[STRUCK].ranks == (STRUCK,)
    assert all(errors)


# Between two replicas that differ, what can be computed again says which one is right.

TWO_REPLICAS = {"ranks": 2, "guards": (st.ReplicaGuard(),)}


def test_values_that_follow_from_masters_that_agree_are_told_apart_without_more() -> None:
    published = Fault(
        site="published values", rank=STRUCK, instant=2, extent="chunk", chunk_bytes=64, pattern="word"
    )
    found = struck(st.DDP(), published, **TWO_REPLICAS)
    assert apart(found, struck(st.DDP(), **TWO_REPLICAS)) == []
    for seen in found:
        assert [(one.site, one.ranks, one.action) for one in seen.incidents] == [
            ("values to be shown", (STRUCK,), "copied from rank 0")
        ]


def test_masters_that_differ_between_two_ranks_end_the_job_with_an_error_that_says_what_would_help() -> None:
    step = Fault(site="step", rank=STRUCK, instant=2, extent="chunk", chunk_bytes=64, pattern="word")
    error = struck(st.DDP(), step, **TWO_REPLICAS)[0].error
    assert isinstance(error, ReplicasDiverged)
    assert "A third rank would decide, and so would AtRest() if" in str(error)
