"""What guards promise, and which faults are drawn to hold them to it.

What guards promise: the rows of the table in docs/guards.md, which the campaign holds them to.

Drawing faults: every row of the promises and every strategy in turn, everything else from the seed.
"""

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Literal

from stretto.faults import Fault, draw_fault
from stretto.faults.plan import Extent, Lasts, Pattern, Site
from stretto.guards import Audit

Strategies = Literal["all", "replicated", "sharded"]
Final = Literal["identical", "error", "differ"]

REPLICATED = ("ddp",)
SHARDED = ("zero1", "dpu", "wp", "acco")
STRATEGIES_OF: dict[Strategies, tuple[str, ...]] = {
    "all": (*REPLICATED, *SHARDED),
    "replicated": REPLICATED,
    "sharded": SHARDED,
}
"""Whose promise a row is."""
EXTENTS: dict[Literal["element", "chunk", "any"], tuple[Extent, ...]] = {
    "element": ("element", "run"),
    "chunk": ("chunk",),
    "any": ("element", "run", "chunk"),
}
"""How much a row speaks of: up to four elements, a chunk, or either."""
WORDS: dict[Site, str] = {
    "broadcast values": "starting values on their way",
    "contribution": "contribution on its way",
    "gathered values": "gathered values on their way",
    "roll call": "roll call on its way",
    "sum": "sum on its owner",
    "reduced gradient": "reduced gradient at rest",
    "masters": "masters at rest",
    "optimizer state": "optimizer state at rest",
    "step": "masters while they are stepped",
    "published values": "values to be sent, before they are sealed",
    "shown parameters": "parameters the model shows",
    "gradient": "gradient while it accumulates",
}
"""What the page calls a site."""
_FINALS: dict[tuple[Final, ...], str] = {
    (): "not seen",
    ("identical",): "identical",
    ("error", "identical"): "error; identical where little of it was hit",
    ("differ", "identical"): (
        "differ: the rank's gradients of the round are left out; identical where little of it was hit"
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """One row."""

    site: Site
    """What is damaged."""
    extent: Literal["element", "chunk", "any"] = "any"
    """How much."""
    strategies: Strategies = "all"
    """In whose jobs."""
    seen_by: Literal["verified", "rest", "replica", "audit"] | None
    """Who notices; None for nobody."""
    named: Literal["rank", "link"] | None = None
    """What is named where the job goes on; an error names rank or link in its message."""
    final: tuple[Final, ...] = ("identical",)
    """What may become of the run: the bits of the clean twin, an error before damaged values are used, or other values
    that are healthy. What comes first becomes of damage to a whole tensor. Nothing where nobody notices."""
    audit_rate: float | None = None
    """Share of the rounds that are audited, of which alone the row speaks; None where nobody audits."""

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of the page's table."""
        seen, named = self.seen_by or "-", self.named or "-"
        what = WORDS[self.site] + ", in an audited round" * (self.seen_by == "audit")
        return what, self.extent, self.strategies, seen, named, _FINALS[self.final]

    @property
    def summary(self) -> str:
        """The promise in one cell."""
        if self.seen_by is None:
            return "nothing"
        named = "" if self.named is None else f", {self.named} named"
        rate = 1.0 if self.audit_rate is None else self.audit_rate
        where = "" if rate == 1 else f" in the {rate:.0%} of rounds that are audited"
        return f"seen{where}{named}, {' or '.join(self.final)}"


def _at_rest(site: Site) -> tuple[Promise, ...]:
    return (
        Promise(site=site, extent="element", seen_by="rest", named="rank"),
        Promise(
            site=site, extent="chunk", strategies="sharded", seen_by="rest", final=("error", "identical")
        ),
        Promise(site=site, extent="chunk", strategies="replicated", seen_by="rest", named="rank"),
    )


def _between_seals(site: Site) -> tuple[Promise, ...]:
    return (
        Promise(site=site, strategies="replicated", seen_by="replica", named="rank"),
        Promise(site=site, strategies="sharded", seen_by=None, final=()),
    )


PROMISES: tuple[Promise, ...] = (
    Promise(site="broadcast values", seen_by="verified"),
    Promise(site="contribution", seen_by="verified", named="link"),
    Promise(site="gathered values", seen_by="verified", named="link"),
    Promise(site="roll call", extent="element", seen_by="verified", named="link"),
    Promise(site="roll call", extent="chunk", seen_by="verified", final=("error", "identical")),
    Promise(site="sum", seen_by="verified", named="rank"),
    *_at_rest("reduced gradient"),
    *_at_rest("masters"),
    *_at_rest("optimizer state"),
    *_between_seals("step"),
    *_between_seals("published values"),
    Promise(site="shown parameters", extent="element", seen_by="rest", named="rank"),
    Promise(
        site="shown parameters",
        extent="chunk",
        strategies="sharded",
        seen_by="rest",
        named="rank",
        final=("differ", "identical"),
    ),
    Promise(site="shown parameters", extent="chunk", strategies="replicated", seen_by="rest", named="rank"),
    Promise(site="gradient", seen_by=None, final=()),
)
"""For faults that strike once, with all guards that apply and a verified exchange, on three ranks whose micro-batches
guards can run again."""

AUDITED = Promise(site="gradient", seen_by="audit", named="rank", audit_rate=1.0)
"""What `Audit` adds, in a round that it draws; one that it does not draw is as without it."""
SAMPLED = dataclasses.replace(AUDITED, audit_rate=0.25)
"""The same where one round in four is drawn: high enough to count what is found."""
ROWS: tuple[Promise, ...] = (*PROMISES, AUDITED, SAMPLED)
"""What a campaign strikes."""


def lasting(promise: Promise) -> Promise:
    """Return what is left of a promise where a fault strikes again and again.

    Several hits may amount to a chunk, or outlast all repeats, which ends the job.
    """
    either = {promise.strategies, "all"} if promise.strategies != "all" else set(STRATEGIES_OF)
    alike = [other for other in PROMISES if other.site == promise.site and other.strategies in either]
    finals = {final for other in (promise, *alike) for final in other.final}
    return dataclasses.replace(promise, final=tuple(sorted(finals | {"error"})))


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
        for strategy in STRATEGIES_OF[promise.strategies]
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
