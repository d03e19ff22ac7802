"""The interval of `paft-dyn`: what is estimated, what is chosen, and where it is kept."""

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import stretto as st
from stretto.averaging.probe import Conclusion
from stretto.errors import ConfigError
from stretto.records import Update
from stretto.strategies.contract import Divergence
from stretto_lab.faults import Fault, FaultyGroup, Injector
from stretto_lab.virtual import VirtualCluster
from tests.draws import seeds
from tests.paft.noisy import NUMEL, flat, noise, train
from tests.processes import run_program

RATE = 0.01


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_noise_parts_replicas_by_the_lemma_with_its_constant_corrected(ranks: int) -> None:
    """E‖θ̄ - θ_r‖² = (M - 1)/M · d · σ² · Σ η², summed over ranks: σ²·Ση² times a chi-square of (M - 1)·d degrees.

    Its relative standard deviation is sqrt(2 / ((M - 1)·d)); five of them are allowed, one draw in two million. The
    paper's constant (M + 1)/M is off by a factor (M + 1)/(M - 1) >= 9/7, more than twice as far. What the noise
    changes in later gradients is summed over ranks, and parts nobody.
    """
    variance, steps = 1e-2, 8
    found = train(st.DDP(), ranks=ranks, faults=noise(ranks, variance), make=sgd)
    replicas = torch.stack([flat(seen.shown[steps]) for seen in found]).double()
    spread = float((replicas - replicas.mean(0)).square().sum()) / ranks
    constant = spread / (NUMEL * variance * steps * RATE**2)
    tolerance = 5 * math.sqrt(2 / ((ranks - 1) * NUMEL))
    assert constant == pytest.approx((ranks - 1) / ranks, rel=tolerance)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": sgd,
    "momentum": lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9, nesterov=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=RATE),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=RATE),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A job whose mean gradient is the same at every update."""

    numel: int
    ranks: int
    wanted: float
    """‖g‖ / σ."""
    norm: float
    """‖g‖."""
    own: float
    """Norm of what each rank's gradient has beside the mean, times ‖g‖."""
    optimizer: str
    state: bool
    overlap: bool
    wire: str
    clip: float | None
    weight: float
    seed: int


def drawn(seed: int) -> Case:
    draw = random.Random(seed)
    wanted = 10 ** draw.choice([draw.uniform(-0.3, 0.1), draw.uniform(0.3, 1.3), draw.uniform(1.3, 2.2)])
    return Case(
        numel=round(10 ** draw.uniform(3, 5)),
        ranks=draw.choice([2, 3, 4, 8]),
        wanted=wanted,
        norm=10 ** draw.uniform(-1, 1),
        own=draw.choice([0.0, 1.0, 6.0 if wanted > 5 else 2.0]),
        optimizer=draw.choice(list(OPTIMIZERS)),
        state=draw.random() < 0.3,
        overlap=draw.random() < 0.3,
        wire=draw.choice(["fp32", "bf16", "int8", "int4", "int4"]),
        clip=draw.choice([None, None, 0.05]),
        weight=draw.choice([1.0, 7.0, 512.0]),
        seed=seed,
    )


def gradients(case: Case) -> Tensor:
    """Return the gradient of each rank, `(ranks, numel)`, whose mean has the case's norm."""
    mean, *own = torch.randn(1 + case.ranks, case.numel, generator=torch.Generator().manual_seed(case.seed))
    own = torch.stack(own) - torch.stack(own).mean(0)
    return case.norm * (mean / mean.norm() + case.own * own / own.norm(dim=1, keepdim=True))


def intervals(case: Case, strategy: st.Strategy, updates: int) -> list[int]:
    """Return the intervals that are chosen one after the other; all ranks choose the same."""
    of_ranks = VirtualCluster(case.ranks).run(functools.partial(records, case, strategy, updates)).values
    found = [[update.interval for update in updates if is_averaged(case, update)] for updates in of_ranks]
    assert [one for one in found if one != found[0]] == []
    return [chosen for chosen in found[0] if chosen is not None]


def is_averaged(case: Case, update: Update) -> bool:
    return update.gap == 1 and update.step > 1 if case.overlap else update.gap == 0


def records(
    case: Case, strategy: st.Strategy, updates: int, rank: int, group: dist.ProcessGroup
) -> list[Update]:
    """Train on one rank."""
    slope = gradients(case)[rank]
    cut = case.numel // 3
    model = nn.ParameterList([nn.Parameter(torch.zeros(cut)), nn.Parameter(torch.zeros(case.numel - cut))])
    groups = [{"params": [model[0]]}, {"params": [model[1]], "lr": 3 * RATE}]
    noise = st.Noise((case.norm / case.wanted) ** 2, seed=case.seed)
    options = st.Options(clip_norm=case.clip, wire=case.wire, noise=noise)
    parallel = st.DataParallel(
        model, OPTIMIZERS[case.optimizer](groups), strategy, micro_batches=1, group=group, options=options
    )
    found = []
    for _ in range(updates):
        loss = (model[0] * slope[:cut]).sum() + (model[1] * slope[cut:]).sum()
        update = parallel.backward(loss, weight=case.weight)
        assert update is not None
        found.append(update)
    return found


@pytest.mark.long(keep=2)
@pytest.mark.parametrize("seed", seeds(16))
def test_the_interval_is_signal_over_noise_whatever_the_model_and_the_optimizer(seed: int) -> None:
    """Within a factor of 1.5, from 16 updates on, where ‖g‖ / σ is 2 or more, or below 1.3.

    σ² is a mean of at least 1,000 · (M - 1) squares: σ is good to 0.023. The signal of 16 updates is good to
    √(1 + own²) / (4·H·√M) of it, H = ‖g‖ / σ. So at H = 2 four deviations of ranks that are alike make 2.5 or 1.5,
    where rounding begins to give 3 or 1.
    """
    case = drawn(seed)
    found = intervals(case, st.PAFTDyn(first=16, state=case.state, overlap=case.overlap), updates=40)
    wanted = min(max(case.wanted, 1.0), 100.0)
    assert [chosen for chosen in found if not 1 / 1.5 <= chosen / wanted <= 1.5] == [], (case, found)
    assert found


def told(update: Update) -> tuple[Any, ...]:
    return update.gap, update.interval, update.noise, update.divergence


def test_real_ranks_choose_the_same_to_the_bit() -> None:
    case = dataclasses.replace(drawn(0), numel=5000, ranks=3, wanted=4.0, overlap=True)
    program = functools.partial(records, case, st.PAFTDyn(first=3), 20)
    virtual, real = VirtualCluster(3).run(program).values, run_program(3, program)
    assert [list(map(told, one)) for one in real] == [list(map(told, one)) for one in virtual]
    assert [list(map(told, one)) for one in real] == [list(map(told, virtual[0]))] * 3
    assert len({update.noise for update in virtual[0]}) > 3


def recorded(**changes: Any) -> list[Update]:
    """Return the updates of rank 0 with an average, of a job with noise of variance 1e-2."""
    settings = {"ranks": 4, "faults": noise(4, 1e-2), "make": sgd, "updates": 16, **changes}
    return [update for update in train(**settings)[0].updates if update.noise is not None]


@pytest.mark.parametrize("interval", [1, 4, 8])
@pytest.mark.parametrize(("probe", "optimizer"), [(4096, "momentum"), (4096, "AdamW"), (200, "SGD")])
def test_the_deviation_of_the_noise_is_in_the_records(interval: int, probe: int, optimizer: str) -> None:
    """Relative error of σ: 1/√(2·(M - 1)·p); of p coordinates drawn with replacement (p - 1) / 403 repeat others."""
    strategy = st.PAFTDyn(first=interval, minimum=interval, maximum=interval, probe=probe)
    found = recorded(strategy=strategy, make=OPTIMIZERS[optimizer])
    drawn = NUMEL if probe >= NUMEL else probe / (1 + (probe - 1) / NUMEL)
    assert len(found) == 16 // interval
    for update in found:
        assert update.noise == pytest.approx(0.1, rel=5 / math.sqrt(2 * 3 * drawn))


def test_the_divergence_in_the_records_is_the_distance_from_the_mean() -> None:
    """With a probe of all coordinates it is what the replicas show; one of 50 of 403 draws it to 1/√(2·drawn)."""
    apart = train(st.DDP(), ranks=4, faults=noise(4, 1e-2), make=sgd)
    replicas = torch.stack([flat(seen.shown[4]) for seen in apart]).double()
    expected = float((replicas - replicas.mean(0)).norm(dim=1).mean())
    whole, part = (recorded(strategy=st.PAFTDyn(first=4, probe=probe))[0] for probe in (4096, 50))
    assert whole.divergence == pytest.approx(expected, rel=1e-5)
    drawn = 50 / (1 + 49 / NUMEL)
    assert part.divergence == pytest.approx(expected, rel=5 / math.sqrt(2 * drawn))


def test_there_is_nothing_to_record_without_an_average_or_a_probe() -> None:
    found = train(st.PAFTDyn(first=4), faults=noise(3, 1e-2), make=sgd)[0].updates
    assert [update.step for update in found if update.noise is not None or update.divergence is not None] == [
        update.step for update in found if update.gap == 0
    ]
    for other in (st.PAFTSync(interval=2), st.DDP()):
        assert [
            update for update in train(other)[0].updates if not update.noise is update.divergence is None
        ] == []


@dataclasses.dataclass(frozen=True)
class Noting(st.PAFTDyn):
    """Notes the signal behind every average, and keeps its first interval."""

    signals: list[float] = dataclasses.field(default_factory=list, compare=False)

    def interval_after(self, divergence: Divergence) -> int:
        if not divergence.are_equal:
            self.signals.append(divergence.signal)
        return self.first


class NoisyLink:
    """Hits what a rank gathers as it arrives, before anybody has measured it; stands where an `Injector` does."""

    def __init__(self, rank: int, variance: float) -> None:
        self._generator = torch.Generator().manual_seed(rank)
        self._deviation = math.sqrt(variance)

    def is_interested(self, site: str) -> bool:
        return site == "gathered values"

    def offer(self, site: str, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.add_(torch.randn(tensor.shape, generator=self._generator), alpha=self._deviation)


def test_noise_that_comes_with_the_gradients_is_not_taken_for_signal() -> None:
    """It is there before a norm is taken, so that the norm holds d·σ², thirty times ‖g‖²; and in the clip's."""
    case = dataclasses.replace(drawn(0), numel=3000, ranks=4, wanted=math.sqrt(3000 / 30), norm=1.0)
    case = dataclasses.replace(case, own=1.0, overlap=False, wire="fp32", clip=None, weight=1.0)
    noting = Noting(first=16)

    def linked(group: dist.ProcessGroup) -> dist.ProcessGroup:
        variance = (case.norm / case.wanted * case.ranks) ** 2  # of the sum
        return FaultyGroup(group, cast(Injector, NoisyLink(group.rank(), variance)))

    cluster = VirtualCluster(case.ranks, faults=linked)
    quiet = dataclasses.replace(case, wanted=math.inf)
    found = cluster.run(functools.partial(records, quiet, noting, 16)).values[0]
    assert found[0].gradient_norm ** 2 > 20 * case.norm**2
    # Five deviations of the signal: σ·√Σ‖g_r‖² / M in an update, and the g_r have at most √M times the norm of g.
    assert noting.signals[0] == pytest.approx(case.norm**2, abs=5 * case.norm**2 / case.wanted / 4)
    assert found[-1].noise == pytest.approx(case.norm / case.wanted, rel=5 / math.sqrt(2 * 3 * 3000))


@pytest.mark.parametrize("estimate", ["corrected", "paper"])
def test_replicas_that_part_elsewhere_are_not_taken_for_silence(estimate: Any) -> None:
    """Masters are damaged, one element of one rank: gradients agree, and a probe of 4 coordinates misses it.

    On four ranks, whose mean of equal values is that value: the paper's distance would be rounding otherwise.
    """
    fault = Fault(site="masters", rank=1, instant=3, pattern="scale", seed=2)
    dyn = st.PAFTDyn(first=5, maximum=50, probe=4, estimate=estimate)
    found = train(dyn, ranks=4, faults=[fault], make=sgd, updates=12)[0].updates
    assert [(update.step, update.interval) for update in found if update.gap == 0] == [(5, 5), (10, 50)]


def test_a_rank_that_is_left_out_is_left_out_of_the_estimate() -> None:
    lost = Fault(site="reduced gradient", rank=1, instant=10, pattern="infinity")
    dyn = st.PAFTDyn(first=8, minimum=8, maximum=8)
    found = recorded(strategy=dyn, faults=[*noise(4, 1e-2), lost])
    assert [update.step for update in found] == [8, 16]
    assert found[1].noise == pytest.approx(0.1, rel=5 / math.sqrt(2 * 2 * NUMEL))
    assert math.isfinite(found[1].divergence)


def test_gradients_that_leave_early_tell_the_same_to_the_bit() -> None:
    """On a wire that packs, where what was sent is kept elsewhere then."""
    early, late = Noting(first=3), Noting(first=3)
    for strategy, hides in ((early, True), (late, False)):
        options = st.Options(bucket_bytes=2**20, wire="int8", hide_reductions=hides)
        train(strategy, faults=noise(3, 1e-2), make=sgd, options=options)
    assert early.signals == late.signals
    assert len(set(early.signals)) > 1


@pytest.mark.parametrize(("probe", "variance"), [(100, 1e-2), (4096, 1e-2), (4096, 0.0)])
def test_an_average_of_replicas_that_differ_sends_what_the_page_says(probe: int, variance: float) -> None:
    """Equal ones send nothing for the probe."""
    sync, dyn = (
        train(strategy, faults=noise(3, variance), make=sgd, updates=4)[0].updates
        for strategy in (st.PAFTSync(interval=4), st.PAFTDyn(first=4, probe=probe))
    )
    extra = [ours.sent_bytes - theirs.sent_bytes for ours, theirs in zip(dyn[:4], sync[:4], strict=True)]
    assert extra == [0, 0, 0, 2 * (16 + 4 * min(probe, NUMEL)) if variance else 0]
    if not variance:
        assert (dyn[3].noise, dyn[3].divergence, dyn[3].interval) == (0.0, 0.0, 100)


def test_a_conclusion_is_drawn_from_the_last_sixteen_updates_or_the_last_interval() -> None:
    conclusion = Conclusion()
    assert (conclusion.signal, conclusion.variance) == (0.0, 0.0)
    conclusion.add(4, 1e30, 1e30)
    conclusion.add(4, math.nan, 1.0)
    conclusion.add(10, 20.0, 30.0)
    assert conclusion.signal == pytest.approx(1e30 / 14)
    conclusion.add(6, 12.0, 2.0)
    assert (conclusion.signal, conclusion.variance) == (2.0, 2.0)
    conclusion.add(40, 120.0, 0.0)
    assert (conclusion.signal, conclusion.variance) == (3.0, 0.0)


def divergence(**changes: Any) -> Divergence:
    return dataclasses.replace(
        Divergence(
            are_equal=False, distances=(0.1, 0.2), gradient_norms=(1.0, 2.0), signal=9.0, variance=0.04
        ),
        **changes,
    )


def test_both_rules_are_the_equations() -> None:
    assert st.PAFTDyn(estimate="paper").interval_after(divergence()) == round((1 / 0.1 + 2 / 0.2) / 2)
    assert st.PAFTDyn().interval_after(divergence()) == round(3 / 0.2)


@pytest.mark.parametrize("estimate", ["paper", "corrected"])
def test_the_interval_is_clamped(estimate: Any) -> None:
    dyn = st.PAFTDyn(minimum=3, maximum=7, estimate=estimate)
    assert dyn.interval_after(divergence(distances=(1e-9, 1e-9), variance=1e-18)) == 7
    assert dyn.interval_after(divergence(distances=(1e3, 1e3), variance=1e6)) == 3
    assert dyn.interval_after(divergence(are_equal=True)) == 7
    assert dyn.interval_after(divergence(distances=(0.0, 0.1), variance=0.0)) == 7
    assert dyn.interval_after(divergence(distances=(1e3, 1e3), signal=-1.0)) == 3
    assert dyn.interval_after(Divergence.none()) == 7


def test_what_the_paper_divides_is_a_workers_own_gradient_by_the_distance_over_all_coordinates() -> None:
    case = dataclasses.replace(drawn(0), numel=3000, ranks=4, wanted=20.0, optimizer="SGD", own=1.0)
    case = dataclasses.replace(case, overlap=False, clip=None, wire="fp32", state=False)
    norm = float(gradients(case).norm(dim=1).mean())
    rates = torch.cat([torch.full((1000,), RATE), torch.full((2000,), 3 * RATE)])
    distance = case.norm / case.wanted * math.sqrt(float(rates.square().sum()) * 5 * 3 / 4)
    for probe in (4096, 2000):
        chosen = intervals(case, st.PAFTDyn(first=5, estimate="paper", probe=probe, maximum=10**6), updates=5)
        # Five deviations of a distance over 1,000 coordinates, the least that 2,000 draws out of 3,000 can hit.
        assert chosen == [pytest.approx(norm / distance, rel=5 / math.sqrt(2 * 1000), abs=0.5)]


def test_the_interval_is_reported_followed_and_the_same_on_all_ranks() -> None:
    found = train(st.PAFTDyn(first=2, maximum=9), faults=noise(3, 0.1), make=sgd, updates=40)
    records = [[(update.gap, update.interval) for update in seen.updates] for seen in found]
    assert [record for record in records if record != records[0]] == []
    assert records[0][:2] == [(1, None), (0, records[0][1][1])]
    since, interval = 0, 2
    for gap, now in records[0]:
        since += 1
        assert (gap == 0) == (since >= interval)
        since, interval = (0, now) if gap == 0 else (since, interval)
    assert len({interval for _, interval in records[0]}) > 2


@pytest.mark.parametrize(
    ("kind", "choices", "words"),
    [
        (st.PAFTSync, {"interval": 0}, "interval=0"),
        (st.PAFTDyn, {"minimum": 5, "maximum": 4}, "minimum=5, maximum=4"),
        (st.PAFTDyn, {"probe": 0}, "probe=0"),
        (st.PAFTDyn, {"first": 0}, "first=0"),
        (st.PAFTDyn, {"estimate": "guess"}, "'guess'"),
    ],
)
def test_settings_that_cannot_be_are_refused(kind: Any, choices: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        kind(**choices)
