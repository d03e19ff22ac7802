"""What a strategy costs is read off its coroutine."""

import dataclasses

import pytest

from stretto import ACCO, DDP, DPU, WeightPrediction, ZeRO1
from stretto.errors import ConfigError
from stretto.strategies import STRATEGIES, Strategy
from stretto.strategies.contract import AllReduce, Gather, Look, Reduce, Script, Step
from stretto.strategies.ledger import ledger_of

# Strategy, rounds, bytes sent per parameter on a 16-bit wire, and bytes held per parameter by one of 1 and of 4
# ranks with a 16-bit model and accumulation, and by one of 2 with an fp32 model.
TABLE = [
    (DDP(), 1, 4, 4 + 16, 4 + 16, 8 + 16),
    (ZeRO1(), 1, 4, 4 + 16, 4 + 4, 8 + 8),
    (DPU(), 1, 4, 6 + 16, 6 + 4, 12 + 8),
    (WeightPrediction(), 1, 4, 6 + 16, 6 + 4, 12 + 8),
    (ACCO(), 2, 8, 6 + 20, 6 + 5, 12 + 10),
]


@pytest.mark.parametrize(
    ("strategy", "rounds", "sent", "alone", "of_four", "of_two"), TABLE, ids=[row[0].name for row in TABLE]
)
def test_ledger_equals_the_table(
    strategy: Strategy, rounds: int, sent: int, alone: int, of_four: int, of_two: int
) -> None:
    ledger = ledger_of(strategy)
    assert ledger.rounds == rounds
    assert ledger.wire_bytes(2) == sent
    assert ledger.memory_bytes(strategy, parameter=2, accumulation=2, world_size=1) == alone
    assert ledger.memory_bytes(strategy, parameter=2, accumulation=2, world_size=4) == of_four
    assert ledger.memory_bytes(strategy, parameter=4, accumulation=4, world_size=2) == of_two


def test_only_a_replicated_optimizer_needs_no_gather() -> None:
    assert [ledger_of(row[0]).replicated for row in TABLE] == [True, False, False, False, False]
    assert [ledger_of(row[0]).previews for row in TABLE] == [0, 0, 0, 1, 1]


@dataclasses.dataclass(frozen=True)
class Odd(Strategy):
    """A strategy that must not run."""

    effects: tuple[str, ...]
    name = "odd"
    overlaps = False
    staleness = 0

    def update(self) -> Script:
        gradient = None
        for effect in self.effects:
            match effect:
                case "reduce":
                    gradient = yield Reduce()
                case "all-reduce":
                    gradient = yield AllReduce()
                case "step":
                    yield Step(gradient)
                case "look":
                    yield Look()
                case "gather":
                    yield Gather()


@pytest.mark.parametrize(
    ("effects", "reason"),
    [
        ((), "begin with"),
        (("gather", "reduce", "step"), "begin with"),
        (("reduce", "gather"), "exactly once, found 0"),
        (("reduce", "step", "step", "gather"), "exactly once, found 2"),
        (("reduce", "all-reduce", "step"), "cannot be mixed"),
        (("reduce", "step"), "found Step as effect 2 of 2"),
        (("reduce", "reduce", "step", "gather"), "found Reduce as effect 1 of 4"),
        (("all-reduce", "step", "gather"), "found Gather as effect 3 of 3"),
        (("look", "reduce", "step", "gather"), "only an update with AllReduce"),
    ],
)
def test_strategy_that_could_not_be_planned_is_refused(effects: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ledger_of(Odd(effects))


class Moody(Odd):
    """Does something else every time."""

    asked: list[int] = []  # noqa: RUF012 (state that a strategy must not have)

    def update(self) -> Script:
        self.asked.append(0)
        for _ in self.asked:
            gradient = yield Reduce()
            yield Step(gradient)
            yield Gather()


def test_strategy_whose_updates_differ_is_refused() -> None:
    with pytest.raises(ConfigError, match="every update must ask for the same effects"):
        ledger_of(Moody(()))


@pytest.mark.parametrize("name", STRATEGIES)
def test_equal_strategies_are_read_off_once(name: str) -> None:
    first, second = (ledger_of(STRATEGIES[name]()) for _ in range(2))
    assert first is second


def test_a_strategy_without_a_hash_has_a_ledger_too() -> None:
    assert ledger_of(Odd(["reduce", "step", "gather"])) == ledger_of(Odd(("reduce", "step", "gather")))
