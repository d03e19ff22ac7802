"""A strategy that the library does not know runs from its coroutine alone, and equals its equations."""

import dataclasses
from collections.abc import Iterator, Sequence

import pytest

from stretto.strategies import Strategy
from stretto.strategies.contract import Gather, Preview, Reduce, Script, Step
from stretto.strategies.ledger import ledger_of
from tests.exactness.checks import check, expected_counts
from tests.exactness.jobs import Case, State, train
from tests.exactness.reference import Counts, Reference, trace


@dataclasses.dataclass(frozen=True, slots=True)
class Thirds(Strategy):
    """Two ever better estimates, then all three parts commit."""

    overlaps: bool
    name = "thirds"
    staleness = 0

    def update(self) -> Script:
        first = yield Reduce()
        yield Preview(first)
        yield Gather()
        both = first + (yield Reduce())
        yield Preview(both)
        yield Gather()
        yield Step(both + (yield Reduce()))
        yield Gather()


def thirds(reference: Reference, updates: Sequence[Counts]) -> Iterator[tuple[list[State], State]]:
    """θ₁ = peek(θ, a), θ₂ = peek(θ, a + b), θ ← Opt(θ, a + b + c); each part at the newest values on show."""
    committed = reference.start
    for counts in reference.turned(updates):
        first = reference.gradient(committed, counts[0])
        estimate = reference.peek(first)
        both = first + reference.gradient(estimate, counts[1])
        better = reference.peek(both)
        committed = reference.step(both + reference.gradient(better, counts[2]))
        yield [estimate, better, committed], committed


def thirds_overlapped(reference: Reference, updates: Sequence[Counts]) -> Iterator[tuple[list[State], State]]:
    """The same, where every part is taken at what was on show one part earlier."""
    earlier = committed = reference.start
    for counts in reference.turned(updates):
        first = reference.gradient(earlier, counts[0])
        second = reference.gradient(committed, counts[1])
        estimate = reference.peek(first)
        both = first + second
        third = reference.gradient(estimate, counts[2])
        earlier = reference.peek(both)
        committed = reference.step(both + third)
        yield [estimate, earlier, committed], committed


@pytest.mark.parametrize("overlaps", [False, True])
def test_strategy_of_three_rounds_equals_its_equations(overlaps: bool) -> None:
    case = Case(strategy=Thirds(overlaps), micro_batches=5, lengths=(20,), tokens=True)
    counts = expected_counts(case, 1)
    equations = thirds_overlapped if overlaps else thirds
    check([train(0, case)], trace(case, 1, counts, equations), counts)


def test_ledger_reads_it_off() -> None:
    ledger = ledger_of(Thirds(True))
    assert (ledger.rounds, ledger.previews, ledger.wire_bytes(2)) == (3, 2, 12)
