"""Drawing faults: every row of the promises and every strategy in turn, everything else from the seed."""

import dataclasses
import itertools
import random
from collections.abc import Iterator

from stretto.campaign.promises import EXTENTS, ROWS, SAMPLED, STRATEGIES, Promise, lasting
from stretto.faults import Fault, draw_fault
from stretto.faults.plan import Lasts, Pattern
from stretto.guards import Audit

RANKS = 3
"""The fewest among which a majority can name one rank."""
CAMPAIGNED = ("ddp", "zero1", "wp", "acco")
"""Strategies that are struck: all that differ in what an update sends, steps and shows."""
_VALUE_PATTERNS: tuple[Pattern, ...] = ("nan", "infinity", "sign", "scale", "power", "huge", "noise")
_VALUE_SHARE = 0.15
"""Of faults that set, scale or shift values, beside the words and chunks of `draw_fault`."""
_LASTING: tuple[Lasts, ...] = ("sticky", "bursts")
_LASTING_SHARE = 0.1
"""Of faults that strike again, where somebody is to notice whenever they strike."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """One fault of a campaign."""

    number: int
    """From 0; with the campaign's seed it decides everything."""
    promise: Promise
    """The row it is drawn for."""
    strategy: str
    """Of the job that is struck."""
    fault: Fault
    """Its instant is `moment`'s, once the opportunities of the job are known."""
    moment: float
    """When it strikes, as a share of the site's opportunities in the run, below 1."""

    @property
    def held_to(self) -> Promise:
        """What is promised of this one."""
        return lasting(self.promise) if self.lasts else self.promise

    @property
    def audit(self) -> Audit | None:
        """The audit of the guarded job, if it has one: every fault meets draws of its own."""
        rate = self.promise.audit_rate
        return None if rate is None else Audit(rate=rate, seed=self.number)

    @property
    def lasts(self) -> bool:
        """Whether it strikes more than once."""
        return self.fault.lasts != "once"

    def within(self, first: int, end: int) -> Fault:
        """Return the fault at its moment of the opportunities from `first` to below `end`."""
        instant = first + int(self.moment * max(0, end - first))
        return dataclasses.replace(self.fault, instant=instant)


def draw(seed: int) -> Iterator[Drawn]:
    """Yield the faults of a campaign, in the order of their numbers, without end."""
    cells = [
        (promise, strategy)
        for promise in ROWS
        for strategy in STRATEGIES[promise.strategies]
        if strategy in CAMPAIGNED
    ]
    random.Random(seed).shuffle(cells)
    for number, (promise, strategy) in enumerate(itertools.cycle(cells)):
        chance = random.Random(f"{seed}/{number}")
        fault = _fault(promise, chance)
        yield Drawn(number=number, promise=promise, strategy=strategy, fault=fault, moment=chance.random())


def draw_real(seed: int, faults: int, real: int) -> frozenset[int]:
    """Return the numbers of the faults that strike real workers."""
    return frozenset(random.Random(f"{seed}/real").sample(range(faults), real))


def _fault(promise: Promise, chance: random.Random) -> Fault:
    """Draw a fault of the row's extent."""
    while True:
        fault = draw_fault(chance.randrange(2**31), [promise.site], RANKS, opportunities=1)
        if fault.extent in EXTENTS[promise.extent]:
            break
    if chance.random() < _VALUE_SHARE:
        fault = dataclasses.replace(fault, pattern=chance.choice(_VALUE_PATTERNS))
    is_noticed = promise.seen_by is not None and promise != SAMPLED
    if is_noticed and chance.random() < _LASTING_SHARE:
        fault = dataclasses.replace(fault, lasts=chance.choice(_LASTING), burst=chance.choice((2, 5)))
    return fault
