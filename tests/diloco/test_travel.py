"""Fragments travel beside the next updates, cost what the ledger says, and land before everybody ends alike."""

import dataclasses
import itertools

import pytest
import torch
from torch import distributed as dist

import stretto as st
from stretto.averaging.reports import empty_report
from stretto.engine.report import RoundReport
from stretto.errors import ConfigError, PeerFailed
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
from stretto_lab.virtual import VirtualCluster
from tests.bits import unequal
from tests.diloco.jobs import BUCKET, HEIGHT, RANKS, UPDATES, WIDTH, go_on, on_cluster, start
from tests.diloco.jobs import Course as Run
from tests.exactness.jobs import Case, same
from tests.exactness.jobs import train as train_case

UPDATE_NS = 1_000_000
NUMEL = WIDTH * HEIGHT


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


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize(
    ("wire", "gradient", "value"), [("fp32", 4, 4), ("bf16", 2, 2), ("int4", 34 / 64, 2)]
)
def test_bytes_are_those_of_the_ledger(fragments: int, wire: str, gradient: float, value: float) -> None:
    """Ten updates hold two outer steps; records come on top, the same for every wire."""
    strategy = st.DiLoCo(interval=5, fragments=fragments)
    per_update = ledger_of(strategy).wire_bytes(gradient, value)
    records = []
    for course in on_cluster(strategy, options={"wire": wire}):
        before = sum(update.sent_bytes for update in course.updates[:10])
        records.append(before - 10 * per_update * NUMEL * (RANKS - 1) / RANKS)
    record = RoundReport.pack(empty_report(num_slots=1, changed=b"", step=0))
    assert records == pytest.approx([2 * fragments * len(record)] * RANKS)


def test_a_packed_wire_sends_later_what_it_has_lost() -> None:
    """The sums of what ranks have sent and still owe is what they have changed: int4 ends near fp32."""
    strategy = st.DiLoCo(interval=1, outer_lr=1.0, outer_momentum=0.0)
    exact, packed = (on_cluster(strategy, options={"wire": wire})[0] for wire in ("fp32", "int4"))
    start_at = exact.shown[0] - exact.shown[-1]
    error = (packed.shown[-1] - exact.shown[-1]).abs().max()
    assert 0 < error < 0.05 * start_at.abs().max()
    owed = [fragment.exchange.owed for fragment in packed.parallel.job.replica.fragments]
    assert any(tensor.any() for tensors in owed for tensor in tensors)


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


STRATEGIES = [
    st.DiLoCo(interval=4, fragments=2, delay=1, mix=0.5),
    st.DiLoCo(interval=5, delay=4),
    st.DiLoCo(interval=5, delay=4, keep_progress=True),
    st.DiLoCo(interval=3, fragments=3),
]
ENDS = {
    "together": Case(lengths=(31,), tokens=True, batch_norm=True),
    "one ends first": Case(lengths=(13, 40), batch_norm=True, settle=False),
    "all batches of all": Case(lengths=(13, 40), until="all", batch_norm=True, settle=False),
    "some contribute nothing finite": Case(
        lengths=(31,), poisoned=(6,), batch_norm=True, options=st.Options(nonfinite="skip")
    ),
    "bf16 model": Case(lengths=(31,), dtype=torch.bfloat16, options=st.Options(wire="int8", clip_norm=0.5)),
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("together", STRATEGIES[1]),
        ("together", STRATEGIES[2]),
        ("one ends first", STRATEGIES[1]),
        ("one ends first", STRATEGIES[2]),
        ("all batches of all", STRATEGIES[0]),
        ("all batches of all", STRATEGIES[1]),
        ("some contribute nothing finite", STRATEGIES[1]),
        ("bf16 model", STRATEGIES[0]),
    ],
)
def test_everything_lands_and_all_ranks_end_alike(strategy: st.DiLoCo, name: str) -> None:
    case = dataclasses.replace(ENDS[name], strategy=strategy)
    found = VirtualCluster(3).run(lambda rank, group: train_case(rank, case, group)).values
    first, *others = found
    for other in others:
        assert same(first.final, other.final)
        assert same(first.final_statistics, other.final_statistics)
        assert [pair for pair in zip(first.committed, other.committed, strict=True) if not same(*pair)] == []
        assert [
            pair for pair in zip(first.statistics, other.statistics, strict=True) if not same(*pair)
        ] == []
        assert first.updates[-1].step == other.updates[-1].step
    assert [value for value in first.final if not value.isfinite().all()] == []
    fed = case.lengths[0] + 2 * case.lengths[-1]
    if case.until == "all" or name == "together":
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


def test_settling_while_a_fragment_is_under_way_changes_nothing() -> None:
    def program(
        rank: int, group: dist.ProcessGroup, *, looks: bool
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        parallel = start(rank, group, st.DiLoCo(interval=4, delay=2))
        course = Run([], [], [], 0, parallel)
        settled = torch.zeros(())
        for step in range(UPDATES):
            go_on(parallel, range(step, step + 1), course)
            if looks:
                with parallel.settled():
                    settled = parallel.model.weight.detach().clone()
        parallel.finish()
        return course.shown, settled

    unwatched = VirtualCluster(2).run(lambda rank, group: program(rank, group, looks=False)).values
    watched = VirtualCluster(2).run(lambda rank, group: program(rank, group, looks=True)).values
    for (shown, _), (expected, _) in zip(watched, unwatched, strict=True):
        assert unequal(shown, expected) == []
    assert torch.equal(watched[0][1], watched[1][1])


def test_an_error_of_one_rank_reaches_the_ranks_that_wait_for_a_fragment() -> None:
    def program(rank: int, group: dist.ProcessGroup) -> str:
        parallel = start(rank, group, st.DiLoCo(interval=4, delay=2))
        try:
            with parallel:
                for step in range(UPDATES):
                    if (rank, step) == (1, 3):
                        raise ValueError("a bad batch")
                    parallel.backward((parallel.model.weight * (step + rank)).square().mean())
        except (ValueError, PeerFailed) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    first, second = VirtualCluster(2).run(program).values
    assert second == "ValueError: a bad batch"
    assert "PeerFailed: rank 0: rank 1 has given up" in first


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
        ((Look(), Launch(OuterStep(1.0, 0.0))), "expected Launch and Land in turn"),
        ((), "must contain a Launch"),
        ((Launch(),), "lands in the update in which it leaves"),
        ((Launch(), Land(), Launch(OuterStep(1.0, 0.0)), Land()), "in all of its launches, or in none"),
        ((Launch(), Land(), Average()), "averaged by Launch"),
        ((Launch(fragments=2), Land()), "go with an outer step"),
        ((Launch(keeps_progress=True), Land()), "go with an outer step"),
        ((Launch(OuterStep(1.0, 0.0), state=True), Land()), "with a mean of everything"),
    ],
)
def test_scripts_that_cannot_be_performed_are_refused(effects: tuple[Effect, ...], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        ledger_of(Ends(effects))


def test_shards_are_not_launched() -> None:
    with pytest.raises(ConfigError, match="Launch and Land need replicas that step alone"):
        ledger_of(Ends((Gather(), Launch(OuterStep(1.0, 0.0)), Land()), Reduce()))


def test_everything_may_leave_for_its_mean_in_every_update() -> None:
    ledger = ledger_of(Ends((Launch(state=True), Land())))
    assert (ledger.averages, ledger.state_averages, ledger.outer_steps, ledger.fragments) == (1, 1, 0, 0)
