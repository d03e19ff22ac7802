"""The faults of a campaign: every row of the promises and every strategy in turn, all else drawn from the seed."""

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Literal

from experiments.campaign.promises import (
    AUDITABLE,
    EXTENTS,
    ROWS,
    SAMPLED,
    STRATEGIES_OF,
    Promise,
    between_two,
    left_out,
    weakened,
)
from stretto.guards import Audit
from stretto_lab.faults import Fault
from stretto_lab.faults.plan import Lasts, Pattern, Site

RANKS = (2, 3, 5)
"""No majority; the fewest among which a majority can name one rank; and a majority that is more than one healthy rank
beside the other."""
CAMPAIGNED = STRATEGIES_OF["all"]
"""Strategies that are struck: all that the page promises something for, but `local`, whose ranks hear of incidents only
at their averages (tests/paft/test_guards.py)."""
LOOPS: tuple[Literal["micro_batch", "backward"], ...] = ("micro_batch", "backward")
_REPAIR_SHARE = 0.5
"""Share of the faults of these sites, whose repair runs micro-batches again, that are followed by another one in it."""
_RUN_AGAIN: tuple[Site, ...] = ("shown parameters", "frozen parameters", "buffers")
_WORD_PATTERNS: tuple[Pattern, ...] = ("flip", "word", "nan")
_WORD_WEIGHTS = (80, 19, 1)
"""How often each of them is drawn, in percent: one or a few wrong bits mostly, NaN once in a hundred."""
_CHUNK_PATTERNS: tuple[Pattern, ...] = ("zero", "stale", "shifted", "duplicated", "swapped", "misread")
_PAGE_SHARE = 0.4
"""Share of whole pages among them."""
_VALUE_PATTERNS: tuple[Pattern, ...] = ("nan", "infinity", "sign", "scale", "power", "huge")
_VALUE_SHARE = 0.15
"""Share of the faults that set or scale values, instead of damaging words or chunks as `draw_fault` does."""
_LASTING: tuple[Lasts, ...] = ("sticky", "bursts")
_LASTING_SHARE = 0.1
"""Share of the faults that strike again and again, in rows where each of their strikes has to be noticed."""


def draw_fault(seed: int, sites: Sequence[Site], world_size: int, opportunities: int) -> Fault:
    """Draw one fault that strikes once; the same for the same arguments.

    Half are damaged words, as frequent as on faulty devices; half are chunks or whole pages with the errors of faulty
    software.

    Args:
        seed: Of the draw, and of the fault.
        sites: To choose from.
        world_size: Ranks to choose from.
        opportunities: The instant is drawn below this number.
    """
    chance = random.Random(seed)
    site, rank, instant = chance.choice(sites), chance.randrange(world_size), chance.randrange(opportunities)
    if chance.random() < 0.5:
        return Fault(
            site=site,
            rank=rank,
            instant=instant,
            extent="element" if chance.random() < 0.5 else "run",
            pattern=chance.choices(_WORD_PATTERNS, _WORD_WEIGHTS)[0],
            bits=chance.choice((1, 2, 3, 4)),
            seed=seed,
        )
    return Fault(
        site=site,
        rank=rank,
        instant=instant,
        extent="page" if chance.random() < _PAGE_SHARE else "chunk",
        chunk_bytes=chance.choice((64, 512, 4096, 65536)),
        pattern=chance.choice(_CHUNK_PATTERNS),
        seed=seed,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobKind:
    """What the jobs of some faults have in common; each kind has golden runs of its own."""

    strategy: str
    """Its name."""
    ranks: int = 3
    """How many there are."""
    wire: str = "fp32"
    """"int8" where what only a packed wire keeps is struck."""
    loop: Literal["micro_batch", "backward"] = "micro_batch"
    """What it calls. Guards cannot run a backward pass again: they leave what a damaged one has given out."""


def kinds_of_jobs() -> list[JobKind]:
    """Return all kinds of jobs that a campaign strikes."""
    wires: tuple[str, ...] = ("fp32", "int8")
    return [
        JobKind(strategy=strategy, ranks=ranks, wire=wire, loop=loop)
        for strategy in CAMPAIGNED
        for ranks in RANKS
        for wire in wires
        for loop in LOOPS
    ]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DrawnFault:
    """One fault of a campaign."""

    number: int
    """From 0; number and seed of the campaign decide all the rest."""
    row: Promise
    """The row of the promises that it was drawn for."""
    job: "JobKind"
    """What it strikes."""
    fault: Fault
    """Its instant follows from `moment`, once it is known how often the job can be struck."""
    moment: float
    """When it strikes: the share of the site's opportunities that pass before, below 1."""
    in_repair: Site | None = None
    """What is damaged once more while the guard that has found it runs micro-batches again, on the same rank."""

    @property
    def rank(self) -> int:
        """Whose memory it damages."""
        return int(self.fault.rank)

    @property
    def promise(self) -> Promise:
        """What is promised about it."""
        promise = between_two(self.row) if self.job.ranks == 2 else self.row
        if self.job.loop == "backward" and promise.site in _RUN_AGAIN:
            promise = left_out(promise)
        return weakened(promise) if self.lasts or self.in_repair else promise

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
        if row.audit_rate is None or strategy in AUDITABLE
    ]
    random.Random(seed).shuffle(cells)
    for number, (row, strategy) in enumerate(itertools.cycle(cells)):
        chance = random.Random(f"{seed}/{number}")
        wire: str = "int8" if row.site in ("error memory", "anchor") else "fp32"
        loop = (
            "micro_batch" if row.audit_rate is not None else chance.choice(LOOPS)
        )  # an audit runs them again
        job = JobKind(strategy=strategy, ranks=chance.choice(RANKS), wire=wire, loop=loop)
        fault = _draw_fault(row, job.ranks, chance)
        again = loop == "micro_batch" and row.site in _RUN_AGAIN and chance.random() < _REPAIR_SHARE
        in_repair = chance.choice(_RUN_AGAIN) if again else None
        yield DrawnFault(
            number=number, row=row, job=job, fault=fault, moment=chance.random(), in_repair=in_repair
        )


def _draw_fault(row: Promise, ranks: int, chance: random.Random) -> Fault:
    while True:
        fault = draw_fault(chance.randrange(2**31), [row.site], ranks, opportunities=1)
        if fault.extent in EXTENTS[row.extent]:
            break
    if chance.random() < _VALUE_SHARE:
        fault = dataclasses.replace(fault, pattern=chance.choice(_VALUE_PATTERNS))
    is_always_noticed = row.seen_by is not None and row != SAMPLED
    if is_always_noticed and chance.random() < _LASTING_SHARE:
        fault = dataclasses.replace(fault, lasts=chance.choice(_LASTING), burst=chance.choice((2, 5)))
    return fault
