"""Ranks of a virtual cluster die and come at an update, and the job goes on as on real processes."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import stretto as st
from experiments.numbered import Numbered
from stretto.errors import TornCheckpoint
from stretto_lab.faults import Fault, FaultPlan, FaultyGroup, Injector, strike_memory
from stretto_lab.virtual import Compute, VirtualCluster
from tests.bits import unequal
from tests.draws import draws
from tests.survive.lived import Built, Told, batch_of, check_samples, check_terms, digest
from tests.survive.virtually import Died, survive

TOTAL = st.Total(11)
"""Micro-batches of all ranks together in an update: two or more for each of five, and no equal shares."""
UPDATES = 20
SECOND = 10**9
AGREE_NS = SECOND
STEPPING_ALONE = st.LocalSGD | st.DiLoCo
SELDOM = 4
"""Updates between two averages where ranks step alone, at most."""
STRATEGIES: tuple[st.Strategy, ...] = (
    st.DDP(),
    st.ZeRO1(),
    st.DPU(),
    st.WeightPrediction(),
    st.ACCO(),
    st.LocalSGD(rate=0.25),
    st.DiLoCo(interval=3),
    st.PAFTSync(4),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job that loses ranks."""

    strategy: st.Strategy = field(default_factory=st.ZeRO1)
    wire: str = "fp32"
    ranks: int = 3
    losses: Mapping[int, int] = field(default_factory=dict)
    """By seat, the update after which it dies; newcomers have seats, too."""
    leaves: Mapping[int, int] = field(default_factory=dict)
    """By seat, the update after which it asks to leave."""
    ranks_per_node: int = 1
    every: int = 4
    updates: int = UPDATES
    again_ns: int | None = None
    micro_batch_ns: int = Compute().micro_batch_ns


@dataclass
class Seen:
    """What a process has seen in one term."""

    told: Told
    began: str
    """Digest of the model with which it went on."""
    committed: dict[int, str] = field(default_factory=dict)
    """Digest after each update."""
    largest: float = 0.0
    """Of the parameters after any update."""


@dataclass
class Life:
    """One process."""

    seen: list[Seen] = field(default_factory=list)
    model: Tensor | None = None
    """The parameters at the end, if it lived so long."""


def training(
    case: Case,
    lives: dict[int, Life],
    group_of: Callable[[st.Term], dist.ProcessGroup] = lambda term: term.group,
    numbered: type[Numbered] = Numbered,
) -> Callable[[st.Term], None]:
    """What every process calls in every term; it notes what it sees in its life."""
    built: dict[int, Built] = {}

    def train(term: st.Term) -> None:
        seat = term.seats[term.rank]
        parts, life = built.setdefault(seat, Built()), lives.setdefault(seat, Life())
        samples = numbered(term.rank, term.world_size, TOTAL)
        parallel = st.DataParallel(
            parts.model,
            parts.optimizer,
            case.strategy,
            micro_batches=TOTAL,
            scheduler=parts.scheduler,
            wire=case.wire,
            group=group_of(term),
            options=st.Options(ranks_per_node=case.ranks_per_node if case.ranks_per_node > 1 else None),
        )
        restored = term.go_on(parallel, loader=samples)
        if restored is not None and len(restored.loader_states) != term.world_size:
            samples.deal(restored.loader_states)
        told = Told(term.number, term.seats, parallel.steps, samples.begin, samples.given)
        seen = Seen(told, committed(parallel, parts.model))
        life.seen.append(seen)

        def on_update(update: st.Update) -> None:
            told.counted[update.step] = update.samples
            seen.committed[update.step] = committed(parallel, parts.model)
            seen.largest = max(seen.largest, largest(parts.model))
            if case.losses.get(seat) == update.step:
                raise Died
            if case.leaves.get(seat) == update.step:
                term.leave()
            term.keep(parallel, loader=samples)

        with parallel:
            for number in parallel.feed(samples, updates=case.updates, on_update=on_update):
                inputs, targets = batch_of(number)
                parallel.backward((parts.model(inputs) - targets).square().mean(), samples=len(inputs))
            parallel.finish()
        life.model = nn.utils.parameters_to_vector(parts.model.parameters()).detach()

    return train


def lived(case: Case, numbered: type[Numbered] = Numbered) -> dict[int, Life]:
    """Return every process's life, by seat."""
    lives: dict[int, Life] = {}
    cluster = VirtualCluster(case.ranks, compute=Compute(micro_batch_ns=case.micro_batch_ns), seed=1)
    train = training(case, lives, numbered=numbered)
    survive(
        cluster,
        train,
        every=case.every,
        agree_ns=AGREE_NS,
        again_ns=case.again_ns,
        ranks_per_node=case.ranks_per_node,
    )
    return lives


def committed(parallel: st.DataParallel, model: nn.Module) -> str:
    with parallel.settled():
        return digest(model)


def largest(model: nn.Module) -> float:
    """Return the largest parameter; infinity where one is no number."""
    return max(
        float(parameter.detach().abs().max().nan_to_num(nan=torch.inf)) for parameter in model.parameters()
    )


def terms_of(lives: Mapping[int, Life]) -> list[list[Told]]:
    """All members of a term know the same of it; return what they have told, by term."""
    return check_terms({seat: ("", [seen.told for seen in life.seen]) for seat, life in lives.items()})


def ends_of(lives: Mapping[int, Life]) -> list[Tensor]:
    return [life.model for life in lives.values() if life.model is not None]


def test_those_that_live_go_on_from_the_last_state_and_end_as_if_nothing_had_been() -> None:
    (alone,) = ends_of(lived(Case(ranks=1)))
    lives = lived(Case(losses={1: 10}))
    assert [(told[0].seats, told[0].step) for told in terms_of(lives)] == [((0, 1, 2), 0), ((0, 2), 8)]
    models = ends_of(lives)
    assert len(models) == 2
    assert torch.equal(*models)
    torch.testing.assert_close(models[0], alone, rtol=0, atol=1e-4)  # sums of floats in another order


def test_one_that_comes_ends_a_term_where_a_state_is_kept() -> None:
    lives = lived(Case(strategy=st.ACCO(), losses={0: 6}, every=3, again_ns=AGREE_NS + 5_000_000))
    first, left, whole = ((told[0].seats, told[0].step) for told in terms_of(lives))
    assert (first[0], left[0], whole[0]) == ((0, 1, 2), (1, 2), (1, 2, 3))
    assert whole[1] > left[1]
    assert len(ends_of(lives)) == 3


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: type(one).__name__)
def test_one_that_leaves_as_it_is_asked_to_costs_no_update(strategy: st.Strategy) -> None:
    """No state is due. The next round report says that somebody asks, and all keep one when its update lands."""
    for seed in draws(4, 1):
        rng = random.Random(seed)
        seconds, asks = rng.choice([0.05, 0.3, 2.0]), rng.randint(1, 6)
        leaver, ranks = rng.randrange(3), 3
        case = Case(
            strategy=strategy,
            ranks=ranks,
            leaves={leaver: asks},
            every=1000,
            updates=80,
            micro_batch_ns=round(seconds * SECOND) // 4,
        )
        lives = lived(case)
        first, left = terms_of(lives)
        assert left[0].seats == tuple(seat for seat in range(ranks) if seat != leaver)
        assert left[0].step == max(first[0].counted)
        # Those that step alone hear of it at their next average.
        assert left[0].step <= asks + (3 if strategy in STRATEGIES[:5] else 8)
        assert len(ends_of(lives)) == ranks - 1
        check_samples([first, left], strategy, case.updates)


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(
    ("again_ns", "expected"),
    [(AGREE_NS, [(0, 1, 2, 3), (0, 4, 2, 3)]), (5 * AGREE_NS, [(0, 1, 2, 3), (2, 3), (2, 3, 5, 4)])],
    ids=["is replaced at once", "is replaced later"],
)
def test_a_node_that_has_lost_a_rank_goes_on_once_it_is_whole(
    again_ns: int, expected: list[tuple[int, ...]]
) -> None:
    """The seats of a node are in the order of their places, whichever of them has come first."""
    case = Case(ranks=4, ranks_per_node=2, losses={1: 6}, again_ns=again_ns, micro_batch_ns=SECOND // 10)
    lives = lived(case)
    terms = terms_of(lives)
    assert [told[0].seats for told in terms] == expected
    assert len(ends_of(lives)) == 4
    check_samples(terms, case.strategy, UPDATES)


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("strategy", [st.ZeRO1(), st.ACCO(), st.DPU()], ids=lambda one: type(one).__name__)
def test_whom_guards_name_is_left_out_and_the_others_go_on(strategy: st.Strategy) -> None:
    """Its memory damages its masters every second update; they are mended, and the third time it is named."""
    fault = Fault(site="masters", rank=1, instant=2, lasts="sticky", seed=5)
    told: dict[int, list[tuple[tuple[int, ...], int]]] = {}

    def train(term: st.Term) -> Tensor:
        seat, parts = term.seats[term.rank], Built()
        injector = Injector(FaultPlan((fault,)), 1 if seat == 1 else 0)
        parallel = st.DataParallel(
            parts.model,
            parts.optimizer,
            strategy,
            guards=(st.AtRest(),),
            micro_batches=2,
            group=FaultyGroup(term.group, injector),
            options=st.Options(verified=True, strikes=3),
        )
        term.go_on(parallel)
        told.setdefault(seat, []).append((term.seats, parallel.steps))
        strike_memory(parallel, injector)
        with parallel:
            for number in parallel.feed(range(100), updates=20, on_update=lambda _: term.keep(parallel)):
                inputs, targets = batch_of(number)
                parallel.backward((parts.model(inputs) - targets).square().mean())
            parallel.finish()
        return nn.utils.parameters_to_vector(parts.model.parameters()).detach()

    models = survive(VirtualCluster(3, seed=1), train, every=2).values
    assert len(models) == 2
    assert torch.equal(*models)
    assert [seats for seats, _ in told[1]] == [(0, 1, 2)]
    assert [seats for seats, _ in told[0]] == [(0, 1, 2), (0, 2)]
    assert told[0][1][1] >= 2  # from a state that was kept


def test_those_that_have_come_after_the_start_never_begin_anew() -> None:
    lives: dict[int, Life] = {}

    def group_of(term: st.Term) -> dist.ProcessGroup:
        if (term.number, term.seats[term.rank]) == (1, 0):
            raise Died  # the last one that had a share of the state
        return term.group

    train = training(Case(losses={1: 10}), lives, group_of)
    with pytest.raises(TornCheckpoint, match="no generation in memory is whole"):
        survive(VirtualCluster(2, seed=1), train, every=4, agree_ns=AGREE_NS, again_ns=AGREE_NS // 2)
    assert [told[0].seats for told in terms_of(lives)] == [(0, 1)]


def test_one_that_dies_while_the_first_state_is_kept_costs_nothing() -> None:
    died: list[int] = []

    class Mortal(Numbered):
        def state_dict(self) -> dict[str, int]:
            if not died:
                died.append(1)
                raise Died
            return super().state_dict()

    lives = lived(Case(), numbered=Mortal)
    assert [(told[0].number, told[0].step) for told in terms_of(lives)] == [(1, 0)]
    assert len(ends_of(lives)) == 2


def test_one_that_sleeps_is_waited_for_or_left_out() -> None:
    for sleeps_ns, seats in ((AGREE_NS, (0, 1, 2)), (3 * AGREE_NS, (0, 2))):
        lives: dict[int, Life] = {}

        def group_of(term: st.Term, sleeps_ns: int = sleeps_ns) -> dist.ProcessGroup:
            if term.seats[term.rank] == 1:
                term.group.stop(sleeps_ns)
            return term.group

        cluster = VirtualCluster(3, seed=1)
        survive(cluster, training(Case(), lives, group_of), every=4, silent_ns=2 * AGREE_NS)
        assert terms_of(lives)[-1][0].seats == seats
        assert len(ends_of(lives)) == len(seats)


def check_states(lives: Mapping[int, Life], case: Case) -> None:
    """What a term goes on from is what members of the one before had committed, to the bit, and not long ago."""
    # Rounding blocks end where slices do, and committed parameters under a prediction are rounded when they are shown.
    is_rounded = isinstance(case.strategy, st.WeightPrediction) and case.wire == "rotated4"
    by_term: dict[int, list[Seen]] = {}
    for life in lives.values():
        for seen in life.seen:
            by_term.setdefault(seen.told.number, []).append(seen)
    before: dict[int, str] = {}
    for number in sorted(by_term):
        one = by_term[number][0]
        if before:
            waits = SELDOM if isinstance(case.strategy, STEPPING_ALONE) else 0  # for the next average
            assert one.told.step >= max(before) - case.every - 1 - waits, (case, number)
        if number and one.told.step and not is_rounded and not isinstance(case.strategy, STEPPING_ALONE):
            assert {seen.began for seen in by_term[number]} == {before[one.told.step]}, (case, number)
        before |= one.committed
        before = {
            step: model for step, model in before.items() if step <= max(one.committed, default=one.told.step)
        }


ALONE: tuple[st.Strategy, ...] = (
    st.LocalSGD(rate=0.1),
    st.LocalSGD(rate=0.4, plan="bernoulli", seed=3),
    st.DiLoCo(interval=7),
    st.DiLoCo(interval=6, delay=1),
    st.DiLoCo(interval=6, fragments=2),
    st.Average(every=4),
    st.Average(every=6, delay=0, fragments=2),
)


def uneven(
    strategy: st.Strategy,
    lengths: list[int],
    passes: int,
    until: Literal["any", "all"],
    every: int | None,
    ns: int,
) -> tuple[list[Tensor], list[set[int]]]:
    """Train ranks that have so many batches in each pass; return their models, and when each has kept a state."""
    kept: list[set[int]] = [set() for _ in lengths]

    def train(term: st.Term) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parallel = st.DataParallel(model, optimizer, strategy, group=term.group)
        draws = torch.Generator().manual_seed(term.rank)
        batches = torch.randn(lengths[term.rank], 2, 4, generator=draws)

        def on_update(update: st.Update) -> None:
            before = parallel.sent_bytes
            if every is not None:
                term.keep(parallel)
            if parallel.sent_bytes > before:
                kept[term.rank].add(update.step)

        term.go_on(parallel)
        with parallel:
            for _ in range(passes):
                for batch in parallel.feed(batches, until=until, on_update=on_update):
                    parallel.backward((model(batch) + term.rank).square().mean())
            parallel.finish()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    cluster = VirtualCluster(len(lengths), compute=Compute(micro_batch_ns=ns), seed=1)
    return list(survive(cluster, train, every=every or 1).values), kept


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("strategy", ALONE, ids=repr)
def test_where_ranks_step_alone_and_data_are_uneven_states_are_kept_where_all_come(
    strategy: st.Strategy,
) -> None:
    """A rank whose data have ended comes to averages alone: nobody waits for it elsewhere, and nothing changes."""
    for seed in draws(8):
        rng = random.Random(seed)
        is_even = getattr(strategy, "delay", 0) > 0  # where an average lands later, data have to be even
        lengths = [rng.randint(3, 40) for _ in range(rng.randint(2, 4))]
        lengths = [lengths[0]] * len(lengths) if is_even else lengths
        passes, until = rng.randint(1, 3), rng.choice(["any", "all"])
        ns = rng.choice([SECOND // 50, SECOND // 3, 2 * SECOND])
        calm, _ = uneven(strategy, lengths, passes, until, None, ns)
        every = rng.choice([1, 2, 5, 17])
        models, kept = uneven(strategy, lengths, passes, until, every, ns)
        about = seed, lengths, passes, until, ns, every
        assert unequal(models, calm) == [], about
        assert [one for one in kept if one != kept[0]] == [], (about, kept)
        if every <= 5 and max(lengths) * passes > 60:
            assert kept[0], about
