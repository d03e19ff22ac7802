"""What guards promise about each kind of damage: the table in docs/guards.md, which a campaign holds them to."""

import dataclasses
from typing import Literal

from stretto_lab.faults.plan import Extent, Site

Strategies = Literal["all", "replicated", "sharded", "ddp", "all but ddp"]
Ending = Literal["identical", "error", "different"]
"""Of a job with a fault: final parameters of the golden run, to the bit; an error; other final parameters."""

REPLICATED = ("ddp", "paft-sync", "paft-dyn")
SHARDED = ("zero1", "dpu", "wp", "acco")
STRATEGIES_OF: dict[Strategies, tuple[str, ...]] = {
    "all": (*REPLICATED, *SHARDED),
    "replicated": REPLICATED,
    "sharded": SHARDED,
    "ddp": ("ddp",),
    "all but ddp": (*REPLICATED[1:], *SHARDED),
}
AUDITABLE = ("ddp", *SHARDED)
"""An audit needs parameters that are equal on all ranks."""
EXTENTS: dict[Literal["element", "chunk", "any"], tuple[Extent, ...]] = {
    "element": ("element", "run"),
    "chunk": ("chunk", "page"),
    "any": ("element", "run", "chunk", "page"),
}
"""The extents of faults that a row's word stands for: up to four elements, a chunk or whole pages, or either."""
WORDS: dict[Site, str] = {
    "broadcast values": "starting values on their way",
    "contribution": "contribution on its way",
    "gathered values": "gathered values on their way",
    "round report": "round report on its way",
    "sum": "sum on its owner",
    "reduced gradient": "reduced gradient at rest",
    "masters": "masters at rest",
    "optimizer state": "optimizer state at rest",
    "step": "masters while they are stepped",
    "published values": "values to be sent, before they are sealed",
    "values to be shown": "gathered values that wait to be shown",
    "shown parameters": "parameters the model shows",
    "frozen parameters": "frozen parameters",
    "buffers": "buffers that no forward pass writes",
    "error memory": "rounding errors that the int8 wire keeps",
    "anchor": "what changes on the int8 wire are added to",
    "gradient": "gradient while it accumulates",
}
"""What the page calls a site."""
_ENDING_WORDS: dict[tuple[Ending, ...], str] = {
    (): "not seen",
    ("identical",): "identical",
    ("error", "identical"): "error; identical where little of it was hit",
    ("different", "identical"): "healthy, but different; identical where little of it was hit",
    ("error",): "error",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """One row of the table: what is promised about damage of one kind."""

    site: Site
    """What is damaged."""
    extent: Literal["element", "chunk", "any"] = "any"
    """How much of it."""
    strategies: Strategies = "all"
    """In whose jobs."""
    seen_by: Literal["verified", "rest", "replica", "audit"] | None
    """The guard that notices it; None if nobody does, and then nothing is promised."""
    named: Literal["rank", "link"] | None = None
    """What incidents and errors name."""
    endings: tuple[Ending, ...] = ("identical",)
    """How the job may end. The first is that of damage to a whole tensor. "different" means other values that are still
    healthy. Empty if nobody notices."""
    audit_rate: float | None = None
    """Share of the rounds that are audited. The promise is about these rounds only. None for a job without audits."""

    @property
    def cells(self) -> tuple[str, ...]:
        """The row's cells on the page."""
        what = WORDS[self.site] + ", in an audited round" * (self.seen_by == "audit")
        seen, named = self.seen_by or "-", self.named or "-"
        return what, self.extent, self.strategies, seen, named, _ENDING_WORDS[self.endings]

    @property
    def summary(self) -> str:
        """What is promised, in a few words."""
        if self.seen_by is None:
            return "nothing"
        named = "" if self.named is None else f", {self.named} named"
        rate = 1.0 if self.audit_rate is None else self.audit_rate
        where = "" if rate == 1 else f" in the {rate:.0%} of rounds that are audited"
        return f"seen{where}{named}, {' or '.join(self.endings)}"


def _at_rest(site: Site) -> tuple[Promise, ...]:
    """Return the rows of a site that `AtRest` seals. What it cannot repair it takes from a replica, if there is one."""
    return (
        Promise(site=site, extent="element", seen_by="rest", named="rank"),
        Promise(
            site=site,
            extent="chunk",
            strategies="sharded",
            seen_by="rest",
            named="rank",
            endings=("error", "identical"),
        ),
        Promise(site=site, extent="chunk", strategies="replicated", seen_by="rest", named="rank"),
    )


def _in_model(site: Site, ending: Ending) -> tuple[Promise, ...]:
    """Return the rows of a site that no other rank can replace, with what becomes of it beyond repair."""
    return (
        Promise(site=site, extent="element", seen_by="rest", named="rank"),
        Promise(site=site, extent="chunk", seen_by="rest", named="rank", endings=(ending, "identical")),
    )


def _between_seals(site: Site) -> tuple[Promise, ...]:
    """Return the rows of a site that is damaged before it is sealed: only a comparison of replicas shows it."""
    return (
        Promise(site=site, strategies="ddp", seen_by="replica", named="rank"),
        Promise(site=site, strategies="all but ddp", seen_by=None, endings=()),
    )


PROMISES: tuple[Promise, ...] = (
    Promise(site="broadcast values", seen_by="verified"),
    Promise(site="contribution", seen_by="verified", named="link"),
    Promise(site="gathered values", seen_by="verified", named="link"),
    Promise(site="round report", extent="element", seen_by="verified", named="link"),
    Promise(
        site="round report", extent="chunk", seen_by="verified", named="link", endings=("error", "identical")
    ),
    Promise(site="sum", seen_by="verified", named="rank"),
    *_at_rest("reduced gradient"),
    *_at_rest("masters"),
    *_at_rest("optimizer state"),
    *_between_seals("step"),
    *_between_seals("published values"),
    *_at_rest("values to be shown"),
    Promise(site="shown parameters", extent="element", seen_by="rest", named="rank"),
    Promise(
        site="shown parameters",
        extent="chunk",
        strategies="sharded",
        seen_by="rest",
        named="rank",
        endings=("different", "identical"),
    ),
    Promise(site="shown parameters", extent="chunk", strategies="replicated", seen_by="rest", named="rank"),
    *_in_model("frozen parameters", "error"),
    *_in_model("buffers", "error"),
    *_in_model("error memory", "different"),
    Promise(site="anchor", strategies="sharded", seen_by="rest", named="rank"),
    Promise(site="gradient", seen_by=None, endings=()),
)
"""For a fault that strikes once, in a job on three or more ranks with a verified exchange (but for the int8 wire, which
has none), all guards that apply, and micro-batches that guards can run again."""

AUDITED = Promise(site="gradient", seen_by="audit", named="rank", audit_rate=1.0)
"""What `Audit` adds, in a round that it draws. In other rounds it adds nothing."""
SAMPLED = dataclasses.replace(AUDITED, audit_rate=0.25)
"""The same if one round in four is drawn: a rate high enough for a campaign to count what is found."""
ROWS: tuple[Promise, ...] = (*PROMISES, AUDITED, SAMPLED)
"""What a campaign draws faults for."""


def between_two(promise: Promise) -> Promise:
    """Return what remains of a promise between two ranks, which have no majority.

    Values to be shown follow from masters that agree. Nobody can say which of two steps was right, and the job ends.
    """
    if promise.site != "step" or promise.seen_by is None:
        return promise
    return dataclasses.replace(promise, named=None, endings=("error",))


def left_out(promise: Promise) -> Promise:
    """Return what remains of a promise where guards cannot run a damaged micro-batch again, and leave it out."""
    return dataclasses.replace(promise, endings=tuple(sorted({*promise.endings, "different"})))


def weakened(promise: Promise) -> Promise:
    """Return what remains of a promise if the fault strikes again and again.

    Several hits may do as much as a chunk does, or outlast all repeats, which ends the job with an error.
    """
    either = {promise.strategies, "all"} if promise.strategies != "all" else set(STRATEGIES_OF)
    alike = [other for other in PROMISES if other.site == promise.site and other.strategies in either]
    endings = {ending for other in (promise, *alike) for ending in other.endings}
    return dataclasses.replace(promise, endings=tuple(sorted(endings | {"error"})))
