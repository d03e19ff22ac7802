"""A table, figure or claim of a paper as a record: its source, its numbers, and the runs that stand for it here."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Literal

from stretto_lab.reproduce.trial import Line
from stretto_lab.reproduce.verdict import Limits

MORE_SEEDS = 10
"""Of records that five seeds did not decide."""
Reading = Callable[[str, str], float]
"""Returns the number in a row and a column: ours with one seed, or the paper's."""


def number_in(row: str, column: str) -> Callable[[Reading], float]:
    """Return what reads a cell."""
    return lambda of: of(row, column)


def above(row: str, other: str, column: str) -> Callable[[Reading], float]:
    """Return what reads by how much a row is above another one."""
    return lambda of: of(row, column) - of(other, column)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Paper:
    """One of the three papers."""

    key: str
    """Its records are called KEY.NAME."""
    title: str
    authors: str
    """As the pages that are stored in public name them."""
    links: Mapping[str, str]
    """Title of a link, and where it leads."""
    read: str
    """What of it could be read: all numbers are from there."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """A number of a run."""

    unit: str
    """As tables write it."""
    of: Callable[[Line], float | None]
    """Of a run's line; None where the run does not have it."""
    digits: int = 1
    """Behind the point, in tables."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One cell of a record's table: runs that differ in their seed."""

    measure: Measure
    words: str | None = None
    """Options of `stretto simulate` that make it what it is; None where the measure needs no run."""
    real: str | None = None
    """Options in the place of `words` for the paper's model on its data; None where they are the same."""
    paper: float | None = None
    """The paper's number."""
    rates: tuple[float, ...] = ()
    """Learning rates to choose from on seeds that serve for nothing else; none keeps that of the words."""
    tuned_by: Measure | None = None
    """What is lowest, on average, at the rate that is chosen; None is the held-out loss at the end."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """A number that a claim is about, and what the paper says of it."""

    says: str
    """What the number is."""
    of: Callable[[Reading], float]
    """From the cells of the table, seed by seed, and from the paper's cells."""
    limits: Limits
    digits: int = 1
    """Behind the point."""

    def of_paper(self, record: "Record") -> float | None:
        """Return what the paper says it is, by its own table, or else by its words; None where it has no number."""
        if self.limits.paper is not None:
            return self.limits.paper

        def reading(row: str, column: str) -> float:
            number = record.cells[row][column].paper
            return math.nan if number is None else number

        found = self.of(reading)
        return None if math.isnan(found) else found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One table, figure or claim."""

    id: str
    """PAPER.NAME."""
    claim: str
    """What the paper says, in a sentence."""
    kind: Literal["paper", "answer", "question"] = "paper"
    """Who says it: the paper, the authors in an answer to a review, or nobody yet: a reviewer has asked."""
    source: str
    """Where it says so."""
    told: str = ""
    """The paper's number, for a list; empty where the effects have it, or where there are words alone."""
    setting: str = ""
    """What is trained here: words of `stretto simulate`."""
    real: str = ""
    """The same for the paper's model on its data, with {data} for the folder; empty where the record has none."""
    cells: Mapping[str, Mapping[str, Cell]] = dataclasses.field(default_factory=dict)
    """By row and column of the table."""
    effects: tuple[Effect, ...] = ()
    """What decides the verdict."""
    seeds: int = 5
    """Seeds of every cell, where no other number is asked for."""
    scale: str = ""
    """Model, ranks, updates and data, in words."""
    differences: str = ""
    """What is not as in the paper."""
    answer: str = ""
    """What we make of it, in a sentence or two; no number that the table has."""
    unchecked: str = ""
    """Why it cannot be checked here; empty where it can."""

    @property
    def paper(self) -> str:
        """The key of its paper."""
        return self.id.partition(".")[0]
