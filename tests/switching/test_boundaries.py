"""Strategies that take turns: no boundary loses, repeats or changes anything."""

import functools
import gc
import math
import random
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import stretto as st
from stretto_lab.virtual import VirtualCluster
from tests.switching.jobs import Batches, Case, Job, differing, trained

STRATEGIES = (
    st.ZeRO1(),
    st.DDP(),
    st.ACCO(),
    st.WeightPrediction(),
    st.DPU(),
    st.LocalSGD(0.4),
    st.DiLoCo(interval=3),
    st.DiLoCo(interval=4, fragments=2, delay=1),
    st.PAFTSync(interval=2),
    st.PAFTSync(interval=2, overlap=True),
)
WIRES = (None, None, "bf16", "int8", "int4")


@pytest.mark.parametrize("ranks", [1, 3])
def test_zero1_behind_zero1_is_zero1_to_the_bit_wherever_the_boundary_lies(ranks: int) -> None:
    plain = trained(Case(strategy=st.ZeRO1(), ranks=ranks))
    for start in (1, 4, 10):  # behind the first update, in the middle, at the very end
        case = Case(strategy=st.Switching({0: st.ZeRO1(), start: st.ZeRO1()}), ranks=ranks)
        for one, other in zip(plain, trained(case), strict=True):
            assert differing(one.holds(), other.holds()) == []
            assert one.told() == other.told()


def test_on_one_rank_exact_strategies_in_turns_are_the_plain_loop_to_the_bit() -> None:
    plan = st.Switching({0: st.DDP(), 2: st.ZeRO1(), 5: st.DDP(), 7: st.ZeRO1()})
    (job,) = trained(Case(strategy=plan, ranks=1))
    plain = Job(Case(strategy=st.ZeRO1()))
    plain.parallel.finish()
    torch.manual_seed(100)
    for number, batch in enumerate(plain.batches, start=1):
        loss = (plain.model(batch) - batch[:, :2]).square().mean()
        loss.backward()
        if number % 2 == 0:
            for parameter in plain.model.parameters():
                parameter.grad = parameter.grad / 2
            plain.optimizer.step()
            plain.optimizer.zero_grad()
            plain.scheduler.step()
    assert differing(job.model.state_dict(), plain.model.state_dict()) == []


OPTIMIZERS: dict[str, Any] = {
    "muon, which needs whole tensors": functools.partial(torch.optim.Muon, lr=0.01),
    "sgd, which keeps no state": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_and_state_go_from_shards_to_copies_and_back_without_a_change(name: str) -> None:
    def program(rank: int, group: Any, strategy: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 70, bias=False), nn.Linear(70, 20, bias=False))
        optimizer = OPTIMIZERS[name](model.parameters())
        options = st.Options(bucket_bytes=1024)
        parallel = st.DataParallel(model, optimizer, strategy, group=group, options=options)
        for batch in parallel.feed(Batches(rank, 8)):
            parallel.backward(model(batch).square().mean())
        parallel.finish()
        return {key: value.detach().clone() for key, value in model.state_dict().items()}

    plan = st.Switching({0: st.ZeRO1(), 2: st.DDP(), 4: st.ZeRO1(), 6: st.DDP()})
    plain, switched = (
        VirtualCluster(3).run(functools.partial(program, strategy=strategy)).values
        for strategy in (st.ZeRO1(), plan)
    )
    assert [differing(*pair) for pair in zip(plain, switched, strict=True)] == [[]] * 3


def parameters(job: Job) -> dict[str, torch.Tensor]:
    return {name: one.detach() for name, one in job.model.named_parameters()}


def drawn(seed: int) -> Case:
    """Return a random case; the ranks' data are of unequal length in every other one."""
    chance = random.Random(seed)
    starts = [0, *sorted(chance.sample(range(1, 9), chance.randint(1, 3)))]
    phases = {start: st.Phase(chance.choice(STRATEGIES), wire=chance.choice(WIRES)) for start in starts}
    ranks = chance.randint(1, 4)
    length = chance.randint(10, 24)
    return Case(
        strategy=st.Switching(phases),
        ranks=ranks,
        lengths=(length, length - chance.randint(1, 5) if seed % 2 else length),
        until=chance.choice(["any", "all"]),
        micro_batches=chance.randint(2, 3),
    )


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_whatever_takes_turns_each_batch_counts_once_and_all_ranks_end_alike(first: int) -> None:
    for seed in range(first, first + 10):
        case = drawn(seed)
        jobs = trained(case)
        for rank, job in enumerate(jobs):
            steps = [update.step for update in job.updates]
            assert sum(update.micro_batches[rank] for update in job.updates) == job.batches.position, case
            assert len(steps) == len(set(steps)), case
            assert steps == sorted(steps), case
            assert seed % 2 or steps == list(range(1, len(steps) + 1)), (
                case
            )  # else a rank may wait for others
            assert job.scheduler.last_epoch == job.parallel.steps == jobs[0].parallel.steps, case
            assert differing(parameters(job), parameters(jobs[0])) == [], case
            due = max(start for start in case.strategy.phases if start <= job.parallel.steps)
            assert job.parallel.strategy == case.strategy.phases[due].strategy, case


def test_the_next_strategy_is_at_work_when_anybody_hears_of_the_last_update() -> None:
    plan = st.Switching({0: st.LocalSGD(0.3), 3: st.WeightPrediction(), 6: st.ACCO(), 8: st.DDP()})
    for job in trained(Case(strategy=plan)):
        assert job.names == ["local"] * 2 + ["wp"] * 3 + ["acco"] * 2 + ["ddp"] * 3


def test_a_boundary_waits_for_the_end_of_its_update() -> None:
    job = Job(Case(strategy=st.Switching({0: st.ZeRO1(), 1: st.DDP()}), micro_batches=3))
    names = []
    for batch in job.batches:
        job.parallel.backward(job.model(batch).square().mean())
        names.append(job.parallel.strategy.name)
    job.parallel.finish()
    assert names[:4] == ["zero1", "zero1", "ddp", "ddp"]


def test_loops_of_their_own_settle_commit_and_discard_across_boundaries() -> None:
    plan = st.Switching({0: st.WeightPrediction(), 2: st.ACCO(), 4: st.DDP()})
    job = Job(Case(strategy=plan))
    told = []
    for number, batch in enumerate(job.batches):
        told.append(job.parallel.backward(job.model(batch).square().mean()))
        with job.parallel.settled():
            assert job.parallel.job.model.shown == "committed"
        if number % 7 == 6:
            told += job.parallel.commit()
        job.model(batch).sum().backward()  # of somebody else
        job.parallel.discard()
    told += job.parallel.finish()
    steps = sorted(update.step for update in told if update is not None)
    assert steps == list(range(1, job.parallel.steps + 1))
    assert sum(update.micro_batches[0] for update in told if update is not None) == 20


def test_a_phase_may_have_a_clock_or_a_count_of_its_own() -> None:
    clock = st.Clock(minimum=1, maximum=3)
    phases = {
        0: st.ZeRO1(),
        2: st.Phase(st.ACCO(), micro_batches=clock),
        4: st.Phase(st.DDP(), micro_batches=4),
    }
    for job in trained(Case(strategy=st.Switching(phases))):
        counts = [update.micro_batches[job.rank] for update in job.updates]
        assert counts[:2] == [2, 2]
        assert counts[4] == 4
        assert sum(counts) == 20


def test_guards_watch_over_every_phase_and_say_nothing_where_nothing_is_wrong() -> None:
    plan = st.Switching(
        {0: st.DDP(), 3: st.Phase(st.ACCO(), wire="int8"), 6: st.LocalSGD(0.5), 8: st.ZeRO1()}
    )
    watched = trained(Case(strategy=plan, guards="standard"))
    for one, other in zip(trained(Case(strategy=plan)), watched, strict=True):
        assert [update.incidents for update in other.updates] == [()] * 10
        assert other.parallel.late_incidents == ()
        assert differing(one.holds(), other.holds()) == []


def test_damage_behind_a_boundary_is_found_and_strikes_of_earlier_phases_count() -> None:
    plan = st.Switching({0: st.DDP(), 2: st.DDP(), 4: st.DDP()})
    options = st.Options(bucket_bytes=256, strikes=2)
    job = Job(Case(strategy=plan, guards=(st.AtRest(),), options=options))

    def strike(update: st.Update) -> None:
        if update.step in (1, 4):
            job.parallel.job.sharded.masters[0].data[0] += 1

    def train() -> None:
        for batch in job.parallel.feed(job.batches, on_update=strike):
            job.parallel.micro_batch(lambda one: job.model(one).square().mean(), batch)

    with pytest.raises(st.errors.CorruptionError, match="2 strikes"):
        train()


def moved(
    strategy: Any,
    *,
    left_out: int | None = None,
    damaged: int | None = None,
    guards: Sequence[st.Guard] = (),
) -> torch.Tensor:
    """How far six sums of batches move the weights; the batch `left_out` is not finite."""
    torch.manual_seed(0)
    model = nn.Linear(64, 1, bias=False)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    parallel = st.DataParallel(
        model, optimizer, strategy, guards=guards, options=st.Options(nonfinite="skip")
    )
    for seed in range(6):  # the gradient is the batch, whatever the weights are
        batch = torch.randn(1, 64, generator=torch.Generator().manual_seed(seed))
        if seed == damaged:
            model.weight.detach().numpy()[0, 5] = 1e4
        parallel.micro_batch(lambda one: model(one).sum(), batch * (math.nan if seed == left_out else 1.0))
    parallel.finish()
    return model.weight.detach() - before


def test_what_a_packed_wire_owes_goes_into_the_first_gradients_on_a_wire_that_owes_nothing() -> None:
    exact = moved(st.DDP())
    coarse = moved(st.Switching({0: st.Phase(st.DDP(), wire="int2")}))
    switched = moved(st.Switching({0: st.Phase(st.DDP(), wire="int2"), 4: st.DDP()}))
    # Six sums of values of size 4 at most, in float32: 6 * 4 * 2 ** -23 and twice that for what was owed in between.
    assert (switched - exact).abs().max() < 1e-5
    assert (coarse - exact).abs().max() > 0.1


@pytest.mark.parametrize(
    ("later", "rounding"),
    [
        (st.DDP(), 1e-5),
        (st.ZeRO1(), 1e-5),
        (st.DPU(), 1e-5),
        # Two means in bf16 of values below 8, each off by half of 8 * 2 ** -8 at most.
        (st.Phase(st.LocalSGD(0.5), wire="int2"), 2 * 2**-6),
    ],
)
@pytest.mark.parametrize("left_out", [None, 4, 5])
def test_what_is_owed_outlives_rounds_that_are_left_out(
    left_out: int | None, later: Any, rounding: float
) -> None:
    switched = moved(st.Switching({0: st.Phase(st.DDP(), wire="int2"), 4: later}), left_out=left_out)
    assert (switched - moved(st.DDP(), left_out=left_out)).abs().max() < rounding


def test_what_is_owed_outlives_a_round_that_is_computed_again() -> None:
    packed = st.Phase(st.DDP(), wire="int2")
    mended = moved(st.Switching({0: packed, 4: st.DDP()}), damaged=4, guards=[st.AtRest()])
    assert (mended - moved(st.DDP())).abs().max() < 1e-5


def test_nothing_of_a_strategy_stays_once_another_has_taken_over() -> None:
    job = Job(Case(strategy=st.Switching({0: st.DiLoCo(interval=2), 2: st.DDP()})))
    gone = [
        weakref.ref(one)
        for one in (job.parallel.job.replica, job.parallel.job.comm, job.parallel.job.exchange)
    ]
    job.train()
    gc.collect()
    assert [one() for one in gone] == [None] * 3


@pytest.mark.parametrize("until", ["any", "all"])
@pytest.mark.parametrize("first", [st.DDP(), st.ZeRO1(), st.ACCO()])
@pytest.mark.parametrize("later", [st.DDP(), st.ZeRO1(), st.LocalSGD(0.5)])
def test_counts_that_uneven_data_have_parted_raise_no_alarm_behind_a_boundary(
    first: st.Strategy, later: st.Strategy, until: Any
) -> None:
    lengths = (12, 11, 12)

    def program(rank: int, group: Any) -> list[st.Incident]:
        drawn = torch.Generator().manual_seed(rank)
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        strategy = st.Switching({0: first, 6: later})  # where the data of an epoch end
        parallel = st.DataParallel(
            model, optimizer, strategy, group=group, guards="standard", micro_batches=2
        )
        found: list[st.Incident] = []
        for _ in range(2):
            # Of a length that nobody knows.
            batches = iter([torch.randn(16, 3, generator=drawn) for _ in range(lengths[rank])])
            for batch in parallel.feed(
                batches, until=until, on_update=lambda update: found.extend(update.incidents)
            ):
                parallel.backward(model(batch).square().mean())
        return [*found, *(one for update in parallel.finish() for one in update.incidents)]

    assert VirtualCluster(3).run(program).values == ([], [], [])
