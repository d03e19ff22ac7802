"""The faults of a campaign: every row of the promises and every strategy in turn, all else drawn from the seed."""

import dataclasses
import itertools
import random
from collections.abc import Iterator

from stretto.campaign.promises import EXTENTS, ROWS, SAMPLED, STRATEGIES_OF, Promise, weakened
from stretto.faults import Fault, draw_fault
from stretto.faults.plan import Lasts, Pattern
from stretto.guards import Audit

RANKS = 3
"""The fewest among which a majority can name one rank."""
CAMPAIGNED = ("ddp", "zero1", "wp", "acco")
"""Strategies that are struck: all that differ in what an update sends, steps and shows."""
_VALUE_PATTERNS: tuple[Pattern, ...] = ("nan", "infinity", "sign", "scale", "power", "huge", "noise")
_VALUE_SHARE = 0.15
"""Share of the faults that set, scale or shift values, instead of damaging words or chunks as `draw_fault` does."""
_LASTING: tuple[Lasts, ...] = ("sticky", "bursts")
_LASTING_SHARE = 0.1
"""Share of the faults that strike again and again, in rows where each of their strikes has to be noticed."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DrawnFault:
    """One fault of a campaign."""

    number: int
    """From 0; number and seed of the campaign decide all the rest."""
    row: Promise
    """The row of the promises that it was drawn for."""
    strategy: str
    """Of the job that it strikes."""
    fault: Fault
    """Its instant follows from `moment`, once it is known how often the job can be struck."""
    moment: float
    """When it strikes: the share of the site's opportunities that pass before, below 1."""

    @property
    def promise(self) -> Promise:
        """What is promised about it."""
        return weakened(self.row) if self.lasts else self.row

    @property
    def lasts(self) -> bool:
        """Whether it strikes more than once."""
        return self.fault.lasts != "once"

    @property
    def audit(self) -> Audit | None:
        """The audit of the guarded job, if it has one. Each fault draws its own rounds to audit."""
        rate = self.row.audit_rate
        return None if rate is None else Audit(rate=rate, seed=self.number)

    def fault_within(self, start: int, stop: int) -> Fault:
        """Return the fault, at its moment among the opportunities from `start` to below `stop`."""
        instant = start + int(self.moment * max(0, stop - start))
        return dataclasses.replace(self.fault, instant=instant)


def draw_faults(seed: int) -> Iterator[DrawnFault]:
    """Yield the faults of a campaign, in the order of their numbers, without end."""
    cells = [
        (row, strategy)
        for row in ROWS
        for strategy in STRATEGIES_OF[row.strategies]
        if strategy in CAMPAIGNED
    ]
    random.Random(seed).shuffle(cells)
    for number, (row, strategy) in enumerate(itertools.cycle(cells)):
        chance = random.Random(f"{seed}/{number}")
        fault = _draw_fault(row, chance)
        yield DrawnFault(number=number, row=row, strategy=strategy, fault=fault, moment=chance.random())


def _draw_fault(row: Promise, chance: random.Random) -> Fault:
    while True:
        fault = draw_fault(chance.randrange(2**31), [row.site], RANKS, opportunities=1)
        if fault.extent in EXTENTS[row.extent]:
            break
    if chance.random() < _VALUE_SHARE:
        fault = dataclasses.replace(fault, pattern=chance.choice(_VALUE_PATTERNS))
    is_always_noticed = row.seen_by is not None and row != SAMPLED
    if is_always_noticed and chance.random() < _LASTING_SHARE:
        fault = dataclasses.replace(fault, lasts=chance.choice(_LASTING), burst=chance.choice((2, 5)))
    return fault


def draw_real_numbers(seed: int, faults: int, real: int) -> frozenset[int]:
    """Return the numbers of the `real` faults, of `faults` in all, that strike real workers."""
    return frozenset(random.Random(f"{seed}/real").sample(range(faults), real))
