"""The kit for strategies: it checks that a coroutine keeps the rules, and does what the strategy declares.

It first reads the coroutine with marked gradients, to see which effects it yields and where each gradient goes. Then it
runs the strategy in small jobs.
"""

import dataclasses
import functools
import pickle
import tempfile
from collections.abc import Sequence
from typing import Any, ClassVar, get_args

from stretto.errors import ConfigError, ConformanceFailed
from stretto.strategies import Strategy
from stretto.strategies.contract import (
    AllReduce,
    Average,
    Begin,
    Boundary,
    Divergence,
    Effect,
    Look,
    Moment,
    Preview,
    Reduce,
    Step,
)
from stretto.strategies.ledger import ledger_of
from stretto_lab.testing.conformance import (
    Conformance,
    Program,
    expect,
    expect_nothing,
    expect_nothing_on_ranks,
)
from stretto_lab.testing.jobs import Job, different_courses, saved_and_resumed, train
from stretto_lab.testing.tracer import Plan, Traced, trace
from stretto_lab.virtual import VirtualCluster

KNOWN = tuple(kind for kind in get_args(Effect) if kind not in (Begin, Boundary))
"""The effects a strategy may ask for."""


class Marked:
    """A gradient that knows where it comes from; it can be added and passed on, as the real one, and no more."""

    def __init__(self, update: int, rounds: frozenset[int]) -> None:
        self.update = update
        self.rounds = rounds
        """Of its update, from 0: those whose gradients it holds."""
        self.is_spent = False

    def __add__(self, other: "Marked") -> "Marked":
        total = Marked(self.update, self.rounds | other.rounds)
        total.is_spent = self.is_spent or other.is_spent
        self.is_spent = other.is_spent = True
        return total

    def __repr__(self) -> str:
        return f"the gradient of update {self.update}, rounds {sorted(self.rounds)}"


class Reading:
    """Runs the scripts of `updates` updates of one strategy, and notes what they ask for."""

    def __init__(self, strategy: Strategy, updates: int) -> None:
        self.asked: list[list[str]] = []
        """Names of effects, by update."""
        self.unknown: list[str] = []
        """What was yielded that is no effect."""
        self.misused: list[str] = []
        """Gradients that were used in a way that the rules forbid."""
        for update in range(updates):
            self._read(strategy, update)

    @property
    def rounds(self) -> list[int]:
        """Rounds of each update."""
        return [sum(name in (Reduce.__name__, AllReduce.__name__) for name in names) for names in self.asked]

    def _read(self, strategy: Strategy, update: int) -> None:
        script = strategy.update()
        names: list[str] = []
        self.asked.append(names)
        given, stepped = 0, frozenset[int]()
        answer: Marked | Moment | Divergence | None = None
        while True:
            try:
                effect = script.send(answer)
            except StopIteration:
                break
            names.append(type(effect).__name__)
            answer = None
            if not isinstance(effect, KNOWN):
                self.unknown.append(f"update {update}, effect {len(names)}: {effect!r}")
            elif isinstance(effect, Reduce | AllReduce):
                answer = Marked(update, frozenset([given]))
                given += 1
            elif isinstance(effect, Look):
                answer = Moment(update, 1, drains=False)
            elif isinstance(effect, Average) and effect.probe:
                answer = Divergence.none()
            elif isinstance(effect, Step | Preview):
                stepped |= self._use(effect, update)
        if left := set(range(given)) - stepped:
            self.misused.append(f"update {update}: the gradients of rounds {sorted(left)} reached no Step")

    def _use(self, effect: Step | Preview, update: int) -> frozenset[int]:
        """Check the gradient of a step or preview; return the rounds that a step commits."""
        gradient, kind = effect.gradient, type(effect).__name__
        where = f"update {update}: {kind} was given {gradient!r}"
        if not isinstance(gradient, Marked):
            self.misused.append(f"{where}, expected a gradient that a reduction has answered")
        elif gradient.update != update:
            self.misused.append(f"{where}, expected one of update {update}")
        elif gradient.is_spent:
            self.misused.append(f"{where}, which had been added to another: expected the sum")
        elif isinstance(effect, Step):
            return gradient.rounds
        return frozenset()


_READ_UPDATES = 8
"""Scripts read in a row: a strategy that changes its mind does so early."""
_TRACED_UPDATES = 6


class StrategyConformance(Conformance):
    """Checks an update strategy, alone and in small jobs.

        class TestMyStrategy(StrategyConformance):
            def make_strategy(self):
                return MyStrategy(option=3)

    Jobs run a linear model that shows in its parameters which micro-batches they have been trained on
    (`stretto_lab.testing.tracer`), and a small perceptron with dropout, AdamW, clipping and a schedule. Not for
    strategies whose ranks step alone between averages (`Local`): their replicas differ by design.
    """

    world_sizes: ClassVar[Sequence[int]] = (1, 2, 3)
    """On how many ranks the jobs run; with 1 among them."""
    micro_batches: ClassVar[int] = 4
    """Per rank and update; at least the strategy's rounds."""

    def make_strategy(self) -> Strategy:
        """Return the strategy, with the same options every time."""
        raise NotImplementedError("a kit for strategies needs make_strategy()")

    def run_ranks(self, world_size: int, program: Program) -> Sequence[Any]:
        """Run `program(rank, group)` on `world_size` ranks, by default virtual ones; return the results in order."""
        return VirtualCluster(world_size).run(program).values

    # Its coroutine

    def test_effects_are_known_and_in_a_legal_order(self) -> None:
        """Rules 1, 2 and 4 of docs/adding-a-strategy.md."""
        strategy = self.make_strategy()
        expect_nothing([f"{text}: expected one of the effects" for text in self._read(strategy).unknown])
        try:
            ledger_of(strategy)
        except ConfigError as error:
            raise ConformanceFailed(str(error)) from error

    def test_gradients_are_passed_on_as_they_were_given(self) -> None:
        """Each is added or passed on, in the update that reduced it, and reaches its step (rule 5)."""
        expect_nothing(self._read(self.make_strategy()).misused)

    def test_rounds_per_update_are_constant(self) -> None:
        """The quota of a round must be known before the communication lane asks for it."""
        rounds = self._read(self.make_strategy()).rounds
        expect("rounds of one update after the other", [rounds[0]] * len(rounds), rounds)

    def test_equal_options_ask_for_the_same(self) -> None:
        """On another rank, in another process, and later: nothing but the options may decide (rule 3)."""
        first, second = self.make_strategy(), pickle.loads(pickle.dumps(self.make_strategy()))
        expect("a strategy of the same options, pickled and read again", repr(first), repr(second))
        expect("effects of the same strategy, read again", self._read(first).asked, self._read(first).asked)
        expect("effects of a strategy of equal options", self._read(first).asked, self._read(second).asked)

    def test_micro_batches_are_split_over_all_rounds(self) -> None:
        """`quotas` gives every round at least one and all rounds together what there is."""
        strategy = self.make_strategy()
        rounds = self._read(strategy).rounds[0]
        for micro_batches in range(self.micro_batches, self.micro_batches + 8):
            quotas = strategy.quotas(micro_batches, rounds)
            what = f"quotas of {micro_batches} micro-batches in {rounds} rounds, found {quotas}"
            expect(f"{what}: (rounds, sum, least is at least one)", (rounds, micro_batches, True),
                   (len(quotas), sum(quotas), min(quotas) >= 1))  # fmt: skip

    # What it does to a model

    def test_every_micro_batch_is_applied_once(self) -> None:
        """No gradient is lost, used twice, or weighed wrongly, on any number of ranks."""
        for world_size in self.world_sizes:
            self._expect_applied_once(self._trace(world_size), world_size)

    def test_weight_zero_is_legal(self) -> None:
        """Ranks without weight take part; an update without any weight commits nothing."""
        for world_size in self.world_sizes:
            traced = self._trace(world_size, idle=True)
            self._expect_applied_once(traced, world_size)
            expect(
                f"updates committed on {world_size} ranks, of {_TRACED_UPDATES}, some without any weight",
                traced.plan.committing(world_size),
                len(traced.traces[0].updates),
            )

    def test_staleness_is_what_it_declares(self) -> None:
        """How far the freshest gradients of an update lag behind the parameters they are applied to."""
        declared = self.make_strategy().staleness
        for world_size in self.world_sizes:
            lags = self._trace(world_size).freshest()
            expect(
                f"largest staleness of updates 1 to {len(lags)} on {world_size} ranks", declared, max(lags)
            )

    def test_a_lone_rank_takes_the_path_of_many(self) -> None:
        """The same rounds and the same staleness, update by update, whatever the number of ranks."""
        paths = {}
        for world_size in self.world_sizes:
            traced = self._trace(world_size)
            rounds = [len(update.rounds) for update in traced.traces[0].updates]
            paths[world_size] = (rounds, traced.freshest())
        first = self.world_sizes[0]
        for world_size, path in paths.items():
            what = f"(rounds, staleness) by update on {world_size} ranks, against {first}"
            expect(what, paths[first], path)

    def test_traffic_is_what_the_ledger_says(self) -> None:
        """Bytes per parameter and update, measured between two sizes of one model: what else is sent drops out."""
        ledger = ledger_of(self.make_strategy())
        if not ledger.local:  # an average that finds all replicas the same sends none of them
            ledger = dataclasses.replace(ledger, averages=0.0, state_averages=0.0)
        for world_size in self.world_sizes:
            small, large = (64 * world_size * count for count in (8, 24))
            sent = [
                [update.sent_bytes for update in self._trace(world_size, numel=numel).traces[0].updates]
                for numel in (small, large)
            ]
            growth = [after - before for before, after in zip(*sent, strict=True)]
            expected = ledger.wire_bytes(4) * (large - small) * (world_size - 1) / world_size
            what = f"bytes sent per update for {large - small} more fp32 parameters, rank 0 of {world_size}"
            expect(what, [expected] * len(growth), growth)

    # What it does to a run

    def test_committed_parameters_are_equal_on_all_ranks(self) -> None:
        """After every update, to the bit, and so are the records."""
        for world_size in self.world_sizes:
            first, *others = self.run_ranks(world_size, functools.partial(train, self._job()))
            first.shown.clear()
            for rank, other in enumerate(others, start=1):
                other.shown.clear()
                expect_nothing(
                    different_courses(f"rank {rank} of {world_size}, against rank 0", first, other)
                )

    def test_looking_changes_nothing(self) -> None:
        """A run that settles and evaluates at every update equals one that does not, and itself, to the bit."""
        for world_size in self.world_sizes:
            watched, again = (
                self.run_ranks(world_size, functools.partial(train, self._job())) for _ in range(2)
            )
            unwatched = self.run_ranks(world_size, functools.partial(train, self._job(looks=False)))
            for rank in range(world_size):
                where = f"rank {rank} of {world_size}"
                findings = different_courses(f"{where}, run again", watched[rank], again[rank])
                unwatched[rank].committed = watched[rank].committed
                findings += different_courses(f"{where}, not looked at", watched[rank], unwatched[rank])
                expect_nothing(findings)

    def test_resumed_runs_go_on_to_the_bit(self) -> None:
        """Saved after every update, which changes nothing, and resumed there by new jobs."""
        for world_size in self.world_sizes:
            with tempfile.TemporaryDirectory() as directory:
                program = functools.partial(saved_and_resumed, self._job(), directory)
                expect_nothing_on_ranks(self.run_ranks(world_size, program))

    def _read(self, strategy: Strategy) -> Reading:
        return Reading(strategy, _READ_UPDATES)

    def _job(self, *, looks: bool = True) -> Job:
        return Job(strategy=self.make_strategy(), micro_batches=self.micro_batches, looks=looks)

    def _trace(self, world_size: int, *, idle: bool = False, numel: int | None = None) -> Traced:
        plan = Plan(
            strategy=self.make_strategy(),
            micro_batches=self.micro_batches,
            updates=_TRACED_UPDATES,
            idle=idle,
            looks=numel is None,
            numel=numel,
        )
        return Traced(plan, self.run_ranks(world_size, functools.partial(trace, plan)))

    def _expect_applied_once(self, traced: Traced, world_size: int) -> None:
        expect_nothing([
            f"micro-batch {index} of rank {rank} of {world_size}: expected to be applied {expected:g} times, found "
            f"{found:g} times"
            for rank, index, expected, found in traced.times_applied()
        ])  # fmt: skip
