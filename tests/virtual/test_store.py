"""Loading has closed forms too, in virtual time.

With L the seconds of a read, C those of a step and e the uses of a batch, a step takes in the steady state

    bare loop            L + C
    read ahead, Even(1)  max(L, C)
    Even(e)              max(L, e C) / e
    Ready                C, while max_uses C >= L
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stretto import (
    ACCO,
    DDP,
    Auto,
    DataParallel,
    EchoLoader,
    EchoOptions,
    Even,
    LocalSGD,
    Ready,
    ZeRO1,
    errors,
)
from stretto.echo import Plan
from stretto.strategies import Strategy
from stretto_lab.virtual import Compute, VirtualCluster, VirtualGroup, VirtualStore, parse_network
from tests.draws import seeds
from tests.echo.sources import Numbers

STEP_NS = 10_000_000
SAMPLES = 36
"""Of an irregular store."""


def alone(program: Callable[[VirtualGroup], Any]) -> Any:
    """Run a program on one rank."""
    return VirtualCluster(1).run(lambda rank, group: program(group)).values[0]


def handed_out_ns(
    wrap: Callable[[VirtualStore[int]], Iterable[int]], ratio: float, steps: int = 200
) -> list[int]:
    """Return when every batch is handed out to a loop whose steps take C, over a store with L = `ratio` C."""

    def program(group: VirtualGroup) -> list[int]:
        store = VirtualStore(itertools.count(), group, itertools.repeat(ratio * STEP_NS / 1e9))
        times = []
        for _ in itertools.islice(wrap(store), steps):
            times.append(group.now_ns)
            group.charge_ns(STEP_NS)
        return times

    return alone(program)


RATIOS = [0.0, 0.5, 1.0, 1.5, 2.5, 3.75, 5.0]


def evenly(ahead: int) -> Callable[[VirtualStore[int]], Iterable[int]]:
    return lambda store: EchoLoader(store, Even(1), options=EchoOptions(ahead=ahead))


LOOPS: dict[str, tuple[Callable[[VirtualStore[int]], Iterable[int]], Callable[[float], float]]] = {
    "bare": (lambda store: store, lambda ratio: ratio + 1),
    "reads nothing ahead": (evenly(0), lambda ratio: ratio + 1),
    "reads ahead": (evenly(4), lambda ratio: max(ratio, 1)),
    "reactive": (lambda store: EchoLoader(store, Ready(max_uses=5)), lambda ratio: 1),
}
"""What wraps a store, and the steps that a batch takes after the first has been read."""


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_batch_takes_what_its_closed_form_says_from_the_first_one_on(loop: str, ratio: float) -> None:
    wrap, steps = LOOPS[loop]
    times = handed_out_ns(wrap, ratio)
    assert times == [round((ratio + index * steps(ratio)) * STEP_NS) for index in range(200)]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("uses", [1.5, 2, 2.5, 3.75])
def test_an_even_echo_takes_the_longer_of_a_read_and_the_uses_of_its_batch(ratio: float, uses: float) -> None:
    times = handed_out_ns(lambda store: EchoLoader(store, Even(uses)), ratio)
    first, last = round(8 * uses), round(24 * uses)  # whole turns of the fraction
    assert (times[last] - times[first]) == 16 * max(ratio, uses) * STEP_NS


def test_with_one_batch_ahead_a_fraction_is_waited_for() -> None:
    options = EchoOptions(ahead=1)
    times = handed_out_ns(lambda store: EchoLoader(store, Even(2.5), options=options), ratio=2.5)
    # Two uses are over before the next batch has come; the other one lies ready for half a step after three.
    assert times[25] - times[20] == (2.5 + 3) * STEP_NS


def test_where_the_bound_on_uses_binds_the_store_sets_the_pace() -> None:
    times = handed_out_ns(lambda store: EchoLoader(store, Ready(max_uses=4)), ratio=5)
    assert times[160] - times[80] == 20 * 5 * STEP_NS


def test_a_measurement_finds_the_free_uses() -> None:
    times = handed_out_ns(lambda store: EchoLoader(store, Auto(window=8, skip=2)), ratio=2.5)
    assert times[7] - times[6] == 2.5 * STEP_NS
    # The reads of the measurement have left nothing in stock; some batches later all is even.
    assert times[110] - times[60] == 50 * STEP_NS


# Decisions by the virtual clock


def irregular(seed: int, mean: float, variation: float) -> Iterator[float]:
    """Seconds of reads, gamma-distributed."""
    draw = np.random.default_rng(seed)
    return (float(draw.gamma(variation**-2, mean * variation**2)) for _ in itertools.count())


def decided(
    seed: int, plan: Plan, ratio: float, cut: int | None = None
) -> tuple[list[int], EchoLoader[Tensor]]:
    """Return the batches of an epoch over an irregular store, and the loader; only `cut` of them if given."""

    def program(group: VirtualGroup) -> tuple[list[int], EchoLoader[Tensor]]:
        store = VirtualStore(Numbers(SAMPLES), group, irregular(seed, ratio * STEP_NS / 1e9, 1.0))
        loader = EchoLoader(store, plan)
        seen = []
        for batch in itertools.islice(loader, cut):
            seen.append(int(batch))
            group.charge_ns(STEP_NS)
        return seen, loader

    return alone(program)


@pytest.mark.parametrize("seed", seeds(8))
@pytest.mark.parametrize("pool", [1, 3, 8])
@pytest.mark.parametrize("max_uses", [1, 2, 5])
def test_reactive_uses_stay_within_their_bounds_on_any_store(seed: int, pool: int, max_uses: int) -> None:
    seen, _ = decided(seed, Ready(pool, max_uses), ratio=2.5)
    counts = Counter(seen)
    assert sorted(counts) == list(range(SAMPLES))
    assert 1 <= min(counts.values()) <= max(counts.values()) <= max_uses
    newest = list(itertools.accumulate(seen, max))
    assert max(latest - number for number, latest in zip(seen, newest, strict=True)) < pool
    assert decided(seed, Ready(pool, max_uses), ratio=2.5)[0] == seen


def test_a_frozen_measurement_decides_alike_on_a_store_of_another_speed_from_every_cut_on() -> None:
    plan = Auto(window=8, skip=2)
    whole, _ = decided(3, plan, ratio=2.5)
    assert len(whole) > SAMPLES + 8
    assert alone(lambda group: len(VirtualStore(Numbers(SAMPLES), group, itertools.repeat(0.5)))) == SAMPLES

    def resumed(state: dict[str, Any]) -> list[int]:
        def program(group: VirtualGroup) -> list[int]:
            loader = EchoLoader(VirtualStore(Numbers(SAMPLES), group, itertools.repeat(0.5)), plan)
            loader.load_state_dict(state)
            return [int(batch) for batch in loader]

        return alone(program)

    for cut in range(9, len(whole)):
        seen, loader = decided(3, plan, ratio=2.5, cut=cut)
        assert seen + resumed(loader.state_dict()) == whole, cut


# Many ranks


def trained(strategy: Strategy, plan: Plan | None, ranks: int, micro_batches: int = 60) -> Any:
    """Train on a network over irregular stores, each rank on its own; None trains on a cached batch."""

    def program(rank: int, group: VirtualGroup) -> tuple[int, tuple[int, ...], int, float]:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
        batches: Any = itertools.repeat(torch.ones(2, 8))
        if plan is not None:
            # The first update finds its two batches: it has none to use again.
            durations = itertools.chain((0.0, 0.0), irregular(rank, 0.025, 1.0))
            batches = EchoLoader(VirtualStore(batches, group, durations), plan)
        decisions: list[int] = []
        waited = 0.0
        begun_ns = 0
        with DataParallel(model, optimizer, strategy, micro_batches=2, group=group) as parallel:
            for step, batch in enumerate(itertools.islice(parallel.feed(batches), micro_batches)):
                begun_ns = begun_ns if step else group.now_ns
                decisions.append(getattr(batches, "batch_index", 0))
                update = parallel.backward(model(batch).square().mean())
                waited += update.wait_seconds if update else 0.0
            parallel.finish()
        return begun_ns, tuple(decisions), parallel.steps, waited

    cluster = VirtualCluster(ranks, parse_network("1gbit,50us"), Compute(micro_batch_ns=STEP_NS), seed=1)
    return cluster.run(program)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("ahead", [None, 0, 4])
def test_an_update_says_how_long_its_batches_were_waited_for(ratio: float, ahead: int | None) -> None:
    """A plain loader and an echo that does not read ahead are waited for whole; one that does, for what is left."""

    def program(rank: int, group: VirtualGroup) -> list[float]:
        model = torch.nn.Linear(8, 8)
        store = VirtualStore(
            itertools.repeat(torch.ones(2, 8)), group, itertools.repeat(ratio * STEP_NS / 1e9)
        )
        loader: Any = store if ahead is None else EchoLoader(store, Even(1), options=EchoOptions(ahead=ahead))
        waits = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with DataParallel(model, optimizer, micro_batches=2, group=group) as parallel:
            for batch in itertools.islice(parallel.feed(loader), 16):
                if update := parallel.backward(model(batch).square().mean()):
                    waits.append(update.wait_seconds)
            parallel.finish()
        return waits

    (waits,) = VirtualCluster(1, compute=Compute(micro_batch_ns=STEP_NS), seed=1).run(program).values
    expected = 2 * (max(ratio - 1, 0.0) if ahead else ratio) * STEP_NS / 1e9
    assert waits[1:] == pytest.approx([expected] * 7, abs=1e-9)


@pytest.mark.parametrize("strategy", [DDP(), ZeRO1(), ACCO(), LocalSGD(0.5)], ids=lambda one: one.name)
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_over_irregular_stores_train_as_on_a_cached_batch(strategy: Strategy, ranks: int) -> None:
    echoed = trained(strategy, Ready(max_uses=64), ranks)
    cached = trained(strategy, None, ranks)
    opened_ns = cached.values[0][0]
    first_ns = max(begun for begun, *_ in echoed.values) - opened_ns
    assert echoed.elapsed_ns - first_ns == cached.elapsed_ns
    for begun_ns, decisions, steps, waited in echoed.values:
        assert steps == cached.values[0][2]
        assert waited == pytest.approx((begun_ns - opened_ns) / 1e9, abs=1e-12)
        counts = Counter(decisions)
        assert set(counts) == set(range(len(counts)))
    assert ranks == 1 or len({decisions for _, decisions, *_ in echoed.values}) == ranks


def test_eight_ranks_keep_their_speed_over_irregular_stores_with_the_default_bounds() -> None:
    echoed, cached = (trained(ZeRO1(), plan, 8, 240) for plan in (Ready(), None))
    first_ns = max(begun for begun, *_ in echoed.values) - cached.values[0][0]
    assert cached.elapsed_ns / (echoed.elapsed_ns - first_ns) > 0.98


# What cannot be


def test_a_thread_that_takes_no_turns_is_told_so() -> None:
    def program(group: VirtualGroup) -> None:
        store = VirtualStore([1, 2], group, itertools.repeat(0.01))
        list(EchoLoader((batch + 1 for batch in store), Even(2)))

    with pytest.raises(
        errors.OutOfTurn, match=r"rank 0: .* expected an EchoLoader directly around a VirtualStore"
    ):
        alone(program)


@pytest.mark.parametrize("durations", [[0.01], [0.01, -1.0], [0.01, float("nan")]])
def test_a_duration_that_is_missing_or_cannot_be_is_named(durations: list[float]) -> None:
    with pytest.raises(errors.ConfigError, match="finite duration of every read"):
        alone(lambda group: list(VirtualStore([1, 2], group, durations)))


def test_an_error_of_the_loader_surfaces_when_its_batch_is_asked_for() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("the store is gone")

    seen: list[tuple[int, int]] = []

    def program(group: VirtualGroup) -> None:
        for batch in EchoLoader(VirtualStore(broken(), group, itertools.repeat(0.02)), Even(3)):
            seen.append((batch, group.now_ns))
            group.charge_ns(STEP_NS)

    with pytest.raises(OSError, match="the store is gone"):
        alone(program)
    assert seen == [(1, 20_000_000), (1, 30_000_000), (1, 40_000_000)]


def test_a_pass_that_was_closed_says_so() -> None:
    def program(group: VirtualGroup) -> None:
        loader = EchoLoader(VirtualStore([1, 2], group, itertools.repeat(0.0)), Even(1))
        first = iter(loader)
        next(first)
        next(iter(loader))
        next(first)

    with pytest.raises(errors.OutOfTurn, match="over the loader is closed"):
        alone(program)
