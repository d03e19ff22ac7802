"""What the runs of a record say: which are missing, the numbers of its table, its effects and its verdict."""

import dataclasses
import math
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence

from stretto.errors import ConfigError
from stretto_lab.reproduce.book import Book
from stretto_lab.reproduce.intervals import Interval, interval
from stretto_lab.reproduce.record import Cell, Effect, Record
from stretto_lab.reproduce.trial import Line, Trial
from stretto_lab.reproduce.verdict import Verdict, judge, worst

TUNING_SEEDS = (100, 101)
"""Learning rates are chosen on these; no verdict uses them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Where records are reproduced: here, at a size that fits, or with the paper's model on real data."""

    data: str | None = None
    """Folder of the data; None trains what the record has for here."""
    scale: float = 1.0
    """With data, the factor to rehearse with: on the model, the data and the updates."""

    def words(self, record: Record, cell: Cell) -> str:
        """Return the words of a cell's runs, without seed and learning rate.

        Raises:
            ConfigError: There are data, and the record has nothing to train on them.
        """
        if self.data is None:
            return f"{record.setting} {cell.words}"
        if not record.real:
            raise ConfigError(f"{record.id} takes no data: leave out --data")
        real = record.real.format(data=shlex.quote(self.data))
        scaled = "" if self.scale == 1 else f" --scale {self.scale:g}"
        return f"{real} --device auto{scaled} {cell.words if cell.real is None else cell.real}"

    def rates(self, cell: Cell) -> tuple[float, ...]:
        """Return the rates to choose from; with the paper's model its own rate stays."""
        return cell.rates if self.data is None else ()


def at_rate(words: str, rate: float) -> str:
    """Return the words with a learning rate."""
    return f"{words} --task.lr {rate:g}"


def missing(record: Record, book: Book, seeds: int, site: Site) -> list[Trial]:
    """Return the runs that are still to be made: those that choose a rate before those that use it."""
    wanted: dict[Trial, None] = {}
    for _, _, cell in cells(record):
        if cell.words is None:
            continue
        tuning = _tuning(record, cell, site)
        chosen = _words(record, cell, book, site)
        wanted.update(dict.fromkeys(tuning))
        if chosen is not None:
            wanted.update(dict.fromkeys(Trial(chosen, seed) for seed in range(seeds)))
    return [trial for trial in wanted if line_of(book, trial) is None]


def cells(record: Record) -> Iterator[tuple[str, str, Cell]]:
    """Yield row, column and cell of a record's table."""
    for row, columns in record.cells.items():
        for column, cell in columns.items():
            yield row, column, cell


def line_of(book: Book, trial: Trial) -> Line | None:
    """Return what was kept of a run, or None."""
    return book.find({"words": trial.words, "seed": trial.seed})


def _tuning(record: Record, cell: Cell, site: Site) -> list[Trial]:
    words = site.words(record, cell)
    return [Trial(at_rate(words, rate), seed) for rate in site.rates(cell) for seed in TUNING_SEEDS]


def _words(record: Record, cell: Cell, book: Book, site: Site) -> str | None:
    """Return the words of a cell's runs at the rate that ends lowest; None before that is known."""
    words = site.words(record, cell)
    if not site.rates(cell):
        return words
    costs: dict[float, float] = {}
    for rate in site.rates(cell):
        lines = [line_of(book, Trial(at_rate(words, rate), seed)) for seed in TUNING_SEEDS]
        made = [_cost(cell, line) for line in lines if line is not None]
        if len(made) < len(lines):
            return None
        costs[rate] = statistics.fmean(made)
    return at_rate(words, min(costs, key=costs.__getitem__))


def _cost(cell: Cell, line: Line) -> float:
    """Return what the best rate has least of; a run that never gets there has no end of it."""
    number = line.get("heldout_loss") if cell.tuned_by is None else cell.tuned_by.of(line)
    return math.inf if number is None else number


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CellFound:
    """What the runs of a cell say."""

    cell: Cell
    words: str
    """Of its runs; empty before its rate is chosen."""
    values: Mapping[int, float]
    """By seed; those whose runs have the number."""
    runs: int
    """How many there are."""

    @property
    def interval(self) -> Interval | None:
        """Of the values; None without any."""
        return interval(list(self.values.values())) if self.values else None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EffectFound:
    """What the runs say of an effect."""

    effect: Effect
    interval: Interval | None
    """Over the seeds; None where a run does not have the number."""
    paper: float | None
    """What the paper says."""
    verdict: Verdict


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What the runs of a record say."""

    record: Record
    seeds: int
    cells: Mapping[str, Mapping[str, CellFound]]
    effects: tuple[EffectFound, ...]
    verdict: Verdict
    why: str
    """Of a record that cannot be checked, why."""
    cpu_seconds: float
    """Of all its runs, those that choose rates among them."""


def found(record: Record, book: Book, seeds: int, site: Site) -> Found:
    """Return what the runs that were made say of a record."""
    if record.unchecked:
        return Found(
            record=record, seeds=0, cells={}, effects=(), verdict=Verdict.UNCHECKED, why=record.unchecked, cpu_seconds=0
        )  # fmt: skip
    table = {
        row: {column: _cell_found(record, cell, book, seeds, site) for column, cell in columns.items()}
        for row, columns in record.cells.items()
    }
    effects = tuple(_effect_found(record, effect, table, seeds) for effect in record.effects)
    verdict = worst(effect.verdict for effect in effects)
    return Found(
        record=record,
        seeds=seeds,
        cells=table,
        effects=effects,
        verdict=verdict,
        why=_why(effects) if verdict is Verdict.UNCHECKED else "",
        cpu_seconds=_cpu_seconds(record, table, book, seeds, site),
    )


def _cell_found(record: Record, cell: Cell, book: Book, seeds: int, site: Site) -> CellFound:
    if cell.words is None:
        given = cell.measure.of({})
        values = {} if given is None else dict.fromkeys(range(seeds), given)
        return CellFound(cell=cell, words="", values=values, runs=seeds)
    words = _words(record, cell, book, site)
    lines = {} if words is None else {seed: line_of(book, Trial(words, seed)) for seed in range(seeds)}
    made = {seed: line for seed, line in lines.items() if line is not None}
    numbers = {seed: cell.measure.of(line) for seed, line in made.items()}
    values = {seed: number for seed, number in numbers.items() if number is not None}
    return CellFound(cell=cell, words=words or "", values=values, runs=len(made))


def _effect_found(
    record: Record, effect: Effect, table: Mapping[str, Mapping[str, CellFound]], seeds: int
) -> EffectFound:
    values = [_value(effect, table, seed) for seed in range(seeds)]
    known = [value for value in values if value is not None]
    around = interval(known) if known and len(known) == seeds else None
    paper = effect.of_paper(record)
    limits = dataclasses.replace(effect.limits, paper=paper)
    return EffectFound(effect=effect, interval=around, paper=paper, verdict=judge(around, limits))


def _value(effect: Effect, table: Mapping[str, Mapping[str, CellFound]], seed: int) -> float | None:
    """Return the effect with a seed; None where a run is missing, or does not have the number."""
    try:
        return effect.of(lambda row, column: table[row][column].values[seed])
    except (KeyError, ZeroDivisionError):
        return None


def _why(effects: Sequence[EffectFound]) -> str:
    open_ones = [one for one in effects if one.verdict is Verdict.UNCHECKED]
    if any(one.interval is None for one in open_ones):
        return "runs are missing, or do not have the number"
    if any("low" not in (one.interval or {}) for one in open_ones):
        return "one seed has no interval"
    return "the interval contains the limit: these seeds do not decide it"


def _cpu_seconds(
    record: Record, table: Mapping[str, Mapping[str, CellFound]], book: Book, seeds: int, site: Site
) -> float:
    with_runs = [cell for _, _, cell in cells(record) if cell.words is not None]
    trials = dict.fromkeys(trial for cell in with_runs for trial in _tuning(record, cell, site))
    for columns in table.values():
        for one in columns.values():
            trials.update(dict.fromkeys(Trial(one.words, seed) for seed in range(seeds)))
    lines = [line_of(book, trial) for trial in trials]
    return math.fsum(line["cpu_seconds"] for line in lines if line is not None)
