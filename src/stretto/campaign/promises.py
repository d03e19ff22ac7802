"""What guards promise: the rows of the table in docs/guards.md, which the campaign holds them to."""

import dataclasses
from typing import Literal

from stretto.faults.plan import Extent, Site

Strategies = Literal["all", "replicated", "sharded"]
Final = Literal["identical", "error", "differ"]

REPLICATED = ("ddp",)
SHARDED = ("zero1", "dpu", "wp", "acco")
STRATEGIES: dict[Strategies, tuple[str, ...]] = {
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
    either = {promise.strategies, "all"} if promise.strategies != "all" else set(STRATEGIES)
    alike = [other for other in PROMISES if other.site == promise.site and other.strategies in either]
    finals = {final for other in (promise, *alike) for final in other.final}
    return dataclasses.replace(promise, final=tuple(sorted(finals | {"error"})))
