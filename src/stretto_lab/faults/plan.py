"""Faults as data: where, when and how values are damaged, so that a run with faults can be repeated to the bit.

On the command line, faults are one line of text:

    site:rank=R|all[:key=value]...[,site:...]     masters:rank=1:instant=3:lasts=sticky,gathered-values:rank=0

Settings are the fields of `Fault`; spaces in a site's name may be hyphens.
"""

import dataclasses
import random
from collections.abc import Collection
from typing import Any, Literal, get_args

from stretto.errors import ConfigError
from stretto.fields import check_fields, field_types, read_settings, split_settings, unknown_name

WireSite = Literal[
    "contribution", "gathered values", "all-reduced values", "broadcast values", "round report"
]
MemorySite = Literal[
    "gradient",
    "sum",
    "reduced gradient",
    "masters",
    "optimizer state",
    "step",
    "published values",
    "values to be shown",
    "shown parameters",
    "frozen parameters",
    "buffers",
    "error memory",
    "anchor",
]
Site = WireSite | MemorySite
Lasts = Literal["once", "sticky", "bursts"]
Extent = Literal["element", "run", "fraction", "chunk", "page", "all"]
Pattern = Literal[
    "flip",
    "word",
    "nan",
    "infinity",
    "zero",
    "sign",
    "scale",
    "power",
    "huge",
    "stale",
    "shifted",
    "duplicated",
    "swapped",
    "misread",
]

WIRE_SITES: tuple[str, ...] = get_args(WireSite)
MEMORY_SITES: tuple[str, ...] = get_args(MemorySite)
SITES = WIRE_SITES + MEMORY_SITES
LASTS: tuple[str, ...] = get_args(Lasts)
EXTENTS: tuple[str, ...] = get_args(Extent)
PATTERNS: tuple[str, ...] = get_args(Pattern)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One cause of damage on one rank.

    An *opportunity* is a moment when values of a site can be damaged: a collective, a sum or a micro-batch has just
    ended. Each rank counts the opportunities of each site from 0.
    """

    site: Site
    """The damaged values. On the wire, on arrival: contributions to a sum, gathered values, all-reduced and broadcast
    values, records of the round report. In memory: the gradient between micro-batches, the owner's sum, the reduced
    gradient before the step, masters and optimizer state between updates, masters directly after an optimizer step
    ("step"), published values before they are sent, gathered values before they are shown, parameters, frozen
    parameters and buffers in the model, the wire's residual (its rounding errors), the anchor to which changes are
    added."""
    rank: int | Literal["all"]
    """The rank whose memory is damaged; "all" damages each rank, with `seed` plus its rank as the seed."""
    instant: int = 0
    """The first opportunity at which the fault occurs, counted from 0."""
    lasts: Lasts = "once"
    """How often the fault occurs: once, at every later opportunity too ("sticky"), or in bursts with pauses."""
    rate: float = 1.0
    """Probability that the fault occurs at such an opportunity, drawn from the seed."""
    burst: int = 5
    """Length of a burst, and of the pause after it, in opportunities."""
    extent: Extent = "element"
    """How much of one tensor is damaged: one element; a run of four neighbours; a scattered `fraction`; a chunk of
    `chunk_bytes`; a page, which is an aligned 4 KiB, and for "swapped" two pages; or all."""
    fraction: float = 1e-3
    """Share of damaged elements if the extent is "fraction"; at least one element."""
    chunk_bytes: int = 4096
    """Length of a chunk; at most the whole tensor."""
    pattern: Pattern = "flip"
    """The kind of damage; `stretto_lab.faults.injector` documents each. For random noise see `stretto.noise`."""
    bits: int = 1
    """Number of flipped bits per element, for "flip"."""
    seed: int | None = None
    """Seed of the damaged elements, bits and opportunities. None uses the run's seed, or 0 in a program."""

    def __post_init__(self) -> None:
        check_fields(self)
        rank = 0 if self.rank == "all" else self.rank
        if min(rank, self.instant) < 0 or min(self.burst, self.bits, self.chunk_bytes) < 1:
            raise ConfigError(
                f"{self}: expected a rank and instant from 0, burst, bits and chunk_bytes from 1"
            )
        if not 0 < self.rate <= 1 or not 0 < self.fraction <= 1:
            raise ConfigError(f"{self}: expected 0 < rate, fraction <= 1")

    def is_on(self, opportunity: int) -> bool:
        """Return whether the fault may occur at this opportunity."""
        since = opportunity - self.instant
        if since < 0 or (since > 0 and self.lasts == "once"):
            return False
        if self.lasts == "bursts" and since // self.burst % 2 == 1:
            return False
        return self.rate == 1.0 or random.Random(f"{self.seed or 0}/{opportunity}").random() < self.rate


@dataclasses.dataclass(frozen=True, slots=True)
class FaultPlan:
    """All faults of one run."""

    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    def drawn_from(self, seed: int) -> "FaultPlan":
        """Return the plan with a seed for each fault that has none."""
        return FaultPlan(
            tuple(
                dataclasses.replace(fault, seed=seed) if fault.seed is None else fault
                for fault in self.faults
            )
        )

    def of_rank(self, rank: int) -> tuple[Fault, ...]:
        return tuple(
            fault
            if fault.rank == rank
            else dataclasses.replace(fault, rank=rank, seed=(fault.seed or 0) + rank)
            for fault in self.faults
            if fault.rank in (rank, "all")
        )

    def going_on(self, left_out: Collection[int]) -> "FaultPlan":
        """Return the plan for a run that continues in new processes without some ranks.

        It keeps the recurring faults of the remaining ranks, by their new numbers. A fault that occurs once is over.
        """
        return FaultPlan(
            tuple(
                dataclasses.replace(fault, rank=fault.rank - sum(other < fault.rank for other in left_out))
                if fault.rank != "all"
                else fault
                for fault in self.faults
                if fault.lasts != "once" and fault.rank not in left_out
            )
        )


_SITES_BY_WORD: dict[str, Any] = {site.replace(" ", "-"): site for site in SITES}
_KINDS = {name: kind for name, kind in field_types(Fault).items() if name != "site"}


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Read faults; "none" are none.

    Raises:
        UnknownName: There is no such site or setting.
        ConfigError: A value cannot be read, or is not allowed.
    """
    if text.strip() == "none":
        return ()
    return tuple(_read_fault(part.strip()) for part in text.split(","))


def _read_fault(text: str) -> Fault:
    word, _ = split_settings(text)
    site = word.replace(" ", "-")
    if site not in _SITES_BY_WORD:
        raise unknown_name("no site of a fault is called", word, _SITES_BY_WORD)
    settings = read_settings(text, _KINDS)
    if "rank" not in settings:
        raise ConfigError(
            f"{text!r}: expected the rank whose memory is damaged, as {word}:rank=1 or {word}:rank=all"
        )
    return Fault(site=_SITES_BY_WORD[site], **settings)
