"""Fragments travel beside the next updates, cost what the ledger says, and land before everybody ends alike."""

import dataclasses
import itertools

import pytest
import torch
from torch import distributed as dist

import stretto as st
from stretto.errors import ConfigError
from stretto.exchange import WIRES
from stretto.strategies.contract import (
    Average,
    Effect,
    Gather,
    Land,
    Launch,
    Local,
    Look,
    OuterStep,
    Reduce,
    Script,
    Step,
)
from stretto.strategies.ledger import ledger_of
from stretto_lab.testing import differing
from stretto_lab.virtual import VirtualCluster
from tests.diloco.jobs import BUCKET, UPDATES, on_cluster
from tests.exactness.jobs import Case
from tests.exactness.jobs import train as train_case

UPDATE_NS = 1_000_000


def update_ns(strategy: st.Strategy) -> list[int]:
    times = [0, *on_cluster(strategy, link="slow")[0].times]
    return [later - earlier for earlier, later in itertools.pairwise(times[2:])]


def test_a_transfer_shorter_than_its_delay_costs_no_time() -> None:
    waits = update_ns(st.DiLoCo(interval=5))
    assert max(waits) > 2 * UPDATE_NS
    assert update_ns(st.DiLoCo(interval=5, delay=4)) == [UPDATE_NS] * (UPDATES - 2)


def test_a_transfer_longer_than_its_delay_is_waited_for_at_the_landing() -> None:
    """A landing one update later hides one update's time of the same transfer."""
    waited, hidden = (update_ns(st.DiLoCo(interval=5, delay=delay)) for delay in (0, 1))
    assert [max(waited), max(hidden)] == [max(waited), max(waited) - UPDATE_NS]
    assert sum(waited) - sum(hidden) == 2 * UPDATE_NS


def test_a_packed_wire_sends_later_what_it_has_lost() -> None:
    """The sums of what ranks have sent and still owe is what they have changed: int4 ends near fp32."""
    strategy = st.DiLoCo(interval=1, outer_lr=1.0, outer_momentum=0.0)
    exact, packed = (on_cluster(strategy, options={"wire": wire})[0] for wire in ("fp32", "int4"))
    start_at = exact.shown[0] - exact.shown[-1]
    error = (packed.shown[-1] - exact.shown[-1]).abs().max()
    assert 0 < error < 0.05 * start_at.abs().max()
    residuals = [fragment.exchange.residuals for fragment in packed.parallel.job.replica.fragments]
    assert any(tensor.any() for tensors in residuals for tensor in tensors)


@pytest.mark.parametrize("wire", ["int4", "int2"])
def test_there_and_back_replicas_send_how_far_they_have_moved_in_the_format_for_averages(wire: str) -> None:
    """After one step by g of both ranks: θ = -q(q(g_0 / 2) + q(g_1 / 2))."""
    gradients = [torch.randn(64, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]

    def train(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(64))
        model = torch.nn.ParameterList([weight])
        strategy = st.DiLoCo(interval=1, outer_lr=1.0, outer_momentum=0.0)
        optimizer = torch.optim.SGD([weight], lr=1.0)
        parallel = st.DataParallel(model, optimizer, strategy, wire=wire, group=group)
        parallel.backward((weight * gradients[rank]).sum())
        return weight.detach()

    def sent(values: torch.Tensor) -> torch.Tensor:
        content = torch.empty(WIRES[wire].num_bytes(64), dtype=torch.uint8)
        WIRES[wire].for_averages.write(values, content)
        return WIRES[wire].read(content)

    expected = sent(sent(-gradients[0] / 2) + sent(-gradients[1] / 2))
    assert [shown for shown in VirtualCluster(2).run(train).values if not torch.equal(shown, expected)] == []


MIXED = st.DiLoCo(interval=4, fragments=2, delay=1, mix=0.5)
DELAYED = st.DiLoCo(interval=5, delay=4)
KEPT = st.DiLoCo(interval=5, delay=4, keep_progress=True)
LOCAL, STATE = st.LocalSGD(rate=0.4), st.LocalSGD(rate=0.4, state=True)
LENGTH = {"lengths": (31,), "batch_norm": True}
UNEVEN = {"lengths": (13, 40), "batch_norm": True, "settle": False}
SKIPPING = {"poisoned": (6,), "options": st.Options(nonfinite="skip"), **LENGTH}
NARROW = {"dtype": torch.bfloat16, "lengths": (31,)}
ENDS = {
    "together": Case(strategy=DELAYED, tokens=True, **LENGTH),
    "together, progress kept": Case(strategy=KEPT, tokens=True, **LENGTH),
    "one ends first": Case(strategy=DELAYED, **UNEVEN),
    "one ends first, progress kept": Case(strategy=KEPT, **UNEVEN),
    "one ends first, local": Case(strategy=LOCAL, **UNEVEN),
    "all batches of all": Case(strategy=MIXED, until="all", **UNEVEN),
    "all batches of all, delayed": Case(strategy=DELAYED, until="all", **UNEVEN),
    "all batches of all, local": Case(strategy=LOCAL, until="all", **UNEVEN),
    "some contribute nothing finite": Case(strategy=DELAYED, **SKIPPING),
    "some contribute nothing finite, local": Case(strategy=LOCAL, **SKIPPING),
    "a branch on one rank, state averaged": Case(strategy=STATE, branch="one rank", lengths=(31,)),
    "a branch now and then, state averaged": Case(
        strategy=STATE, optimizer="sgd", branch="some", lengths=(31,)
    ),
    "bf16 model": Case(strategy=MIXED, options=st.Options(wire="int8", clip_norm=0.5), **NARROW),
    "bf16 model, state averaged": Case(strategy=STATE, **NARROW),
    "bf16 everywhere, state averaged": Case(
        strategy=STATE, options=st.Options(wire="bf16", accumulate="parameter"), **NARROW
    ),
}


@pytest.mark.long(keep=2)
@pytest.mark.parametrize("name", ENDS)
def test_everything_lands_and_all_ranks_end_alike(name: str) -> None:
    case = ENDS[name]
    found = VirtualCluster(3).run(lambda rank, group: train_case(rank, case, group)).values
    first, *others = found
    fields = ("final", "final_statistics", "committed", "statistics")
    for other in others:
        expected, ours = ({field: getattr(one, field) for field in fields} for one in (first, other))
        assert differing(expected, ours) == []
        assert first.updates[-1].step == other.updates[-1].step
    assert [value for value in first.final if not value.isfinite().all()] == []
    fed = case.lengths[0] + 2 * case.lengths[-1]
    if case.until == "all" or "together" in name:
        own = [[update.micro_batches[rank] for update in one.updates] for rank, one in enumerate(found)]
        assert sum(map(sum, own)) == fed


@pytest.mark.parametrize("batches", [4, 5])
def test_buffers_of_a_rank_that_lands_and_ends_in_one_round_are_averaged_too(batches: int) -> None:
    """The fragment leaves after update 4. Rank 1 learns only after its last batch that there are no more.

    A running statistic is linear in the batches, so what ranks end with is the mean of what each has by itself.
    """

    def rows(rank: int) -> list[torch.Tensor]:
        torch.manual_seed(rank)
        return [torch.randn(8, 3) + rank for _ in range(batches)]

    def program(rank: int, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parallel = st.DataParallel(model, optimizer, st.DiLoCo(interval=4, delay=2), group=group)
        for row in parallel.feed(iter(rows(rank)) if rank else rows(rank)):
            parallel.backward(model(row).square().mean())
        parallel.finish()
        return {name: value.clone() for name, value in model[0].named_buffers()}

    alone = [torch.nn.BatchNorm1d(3) for _ in range(2)]
    for rank, norm in enumerate(alone):
        for row in rows(rank):
            norm(row)
    first, second = VirtualCluster(2).run(program).values
    for name in ("running_mean", "running_var"):
        assert torch.equal(first[name], second[name])
        expected = sum(getattr(norm, name) for norm in alone) / 2
        torch.testing.assert_close(first[name], expected)  # tolerances of fp32 cover a few roundings


def test_a_model_has_enough_buckets_for_its_fragments() -> None:
    course = on_cluster(st.DiLoCo(interval=4, fragments=4))[0]
    layout = course.parallel.job.layout
    assert len(layout.buckets) == 6  # as many as two ranks can share; the next multiple of 4 cannot be had
    assert [list(fragment.members) for fragment in course.parallel.job.replica.fragments] == [
        [0, 4],
        [1, 5],
        [2],
        [3],
    ]
    assert {bucket.numel for bucket in layout.buckets} == {BUCKET}


@dataclasses.dataclass(frozen=True)
class Ends(st.Strategy):
    """A rank's own step, and what comes after it."""

    effects: tuple[Effect, ...]
    gradient: Effect | None = None
    name, overlaps, staleness = "ends", False, 0

    def update(self) -> Script:
        gradient = yield self.gradient or Local()
        yield Step(gradient)
        yield from (effect for effect in self.effects)  # a generator may be sent answers


@pytest.mark.parametrize(
    ("effects", "found"),
    [
        ((Look(), Launch(OuterStep(1.0, 0.0))), "expected `Launch` and `Land` alternately"),
        ((), "must contain a Launch"),
        ((Launch(),), "must arrive in the update that sends it"),
        ((Launch(), Land(), Launch(OuterStep(1.0, 0.0)), Land()), "in all of its launches, or in none"),
        ((Launch(), Land(), Average()), "need `Launch"),
        ((Launch(fragments=2), Land()), "need an outer step"),
        ((Launch(keeps_progress=True), Land()), "need an outer step"),
        ((Launch(OuterStep(1.0, 0.0), state=True), Land()), "needs a mean of everything"),
    ],
)
def test_scripts_that_cannot_be_performed_are_refused(effects: tuple[Effect, ...], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        ledger_of(Ends(effects))


def test_shards_are_not_launched() -> None:
    with pytest.raises(ConfigError, match="`Launch` and `Land` need replicas that step alone"):
        ledger_of(Ends((Gather(), Launch(OuterStep(1.0, 0.0)), Land()), Reduce()))


def test_everything_may_leave_for_its_mean_in_every_update() -> None:
    ledger = ledger_of(Ends((Launch(state=True), Land())))
    assert (ledger.averages, ledger.state_averages, ledger.outer_steps, ledger.fragments) == (1, 1, 0, 0)
