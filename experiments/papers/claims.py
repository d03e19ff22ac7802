"""The claims of the papers: their runs are made and judged, and docs/papers.md is made from them.

    python experiments/papers/claims.py --list
    python experiments/papers/claims.py acco.heterogeneous --seeds 3
    python experiments/papers/claims.py paft.table1 --first-seed 200 --out again
    python experiments/papers/claims.py paft.table1 --data cifar-10-batches-bin --out cifar
    python experiments/papers/claims.py --page

A claim is a record in acco.yaml, paft.yaml or echo.yaml. Its table has a cell for every row and column: runs of
`stretto simulate` that differ in their seed. A cell has what its row and its column say, and the column wins: `words`
and `real` are options, here and for the paper's model on its data; `measure` is the number of a run that the table
shows. Learning rates are chosen out of `rates`, each arm by the mean of `tuned_by`, on seeds that serve nothing else.
A line of runs.jsonl in the folder of `--out` is kept of every run, and runs that are there are not made again.

Note [The rule]
    A claim is made of effects: numbers such as points of accuracy lost. The paper may say what an effect is (`paper`).
    Where its words have to become a number to be judged, the limit (`least`, `most`) is ours; `limit` is its reason.
    With the 95 % interval of our seeds

        holds            the interval lies within the limits, and it contains the paper's number, if there is one
        holds in shape   the interval lies within the limits, the paper's number does not lie in it
        does not hold    the interval lies outside of the limits
        cannot be checked  the interval contains a limit, or there is none: too few seeds, or no runs

    A record has the verdict of the effect that speaks most against it. Intervals are of paired differences or ratios,
    seed by seed, and are not widened for the number of comparisons. A computed record, of a time model or of the
    ledger, has a number and no interval: seeds are no evidence there. It meets the paper's number if it rounds to it.
"""

import argparse
import dataclasses
import math
import re
import shlex
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from enum import StrEnum
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import yaml
from book import Book, Interval, interval

from stretto.errors import ConfigError, CorruptionError, NonFinite
from stretto.fields import unknown_name
from stretto.strategies import STRATEGIES
from stretto.strategies.ledger import ledger_of
from stretto_lab.cli.options import parse_options
from stretto_lab.observe import read_json_lines
from stretto_lab.train.outcome import Outcome
from stretto_lab.train.simulation import SimulateConfig, simulate

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "papers.md"
RUNS = ROOT / "benchmarks" / "results" / "2026-11-25-papers"
TUNING_SEEDS = (100, 101)
"""Learning rates are chosen on these; no verdict uses them."""
Line = dict[str, Any]
"""What is kept of a run."""
Reading = Callable[[str, str], float]
"""Returns the number in a row and a column: ours with one seed, or the paper's."""


@dataclasses.dataclass(frozen=True)
class Measure:
    """A number of a run."""

    unit: str
    of: Callable[[Line], float | None]
    """Of a run's line; None where the run does not have it."""
    digits: int = 1
    """Behind the point, in tables."""


def _of_whole(number: Callable[[Line], float]) -> Callable[[Line], float | None]:
    """Return what reads a number that a run which diverged does not have."""
    return lambda line: None if line["error"] else number(line)


def _accuracy(line: Line) -> float | None:
    """Return the share that is right, in percent; a run that diverged guesses nothing right."""
    if line["error"]:
        return 0.0
    return None if line["accuracy"] is None else 100 * float(line["accuracy"])


def loads_to(target: float) -> Measure:
    """Return the fresh batches of a rank until the held-out loss falls to `target`, between evaluations on a line."""
    return Measure(f"loads to a loss of {target:g}", lambda line: _crossing(line, target, "fresh"))


def steps_to(target: float) -> Measure:
    """Return the updates until the held-out loss falls to `target`."""
    return Measure(f"updates to a loss of {target:g}", lambda line: _crossing(line, target, "step"))


def seconds_to(target: float) -> Measure:
    """Return the time in which the held-out loss falls to `target`."""
    return Measure(
        f"s to a loss of {target:g}", lambda line: _crossing(line, target, "training_seconds"), digits=2
    )


def divergence_over(unit: float) -> Measure:
    """Return the squared distance of replicas at their first average, in units of σ² Σ η² of all coordinates."""
    return Measure(
        "σ² Σ η²",
        lambda line: line["divergences"][0] ** 2 / unit if line["divergences"] else None,
        digits=3,
    )


def held_gigabytes(strategy: str, ranks: int, billions: float) -> Measure:
    """Return what a rank holds of a model in 16 bits, but for the optimizer: by the ledger."""
    chosen = STRATEGIES[strategy]()
    held = ledger_of(chosen).memory_bytes(chosen, parameter=2, accumulation=2, world_size=ranks)
    return Measure("GB", lambda _: held * billions)


def _crossing(line: Line, target: float, axis: str) -> float | None:
    """Return where on an axis the line between two evaluations crosses a loss; None where it never does."""
    before = None
    for point in line["curve"]:
        loss = point["heldout_loss"]
        if loss is None or not math.isfinite(loss):
            before = None
            continue
        if loss <= target:
            if before is None:
                return float(point[axis])
            share = (before["heldout_loss"] - target) / (before["heldout_loss"] - loss)
            return float(before[axis] + share * (point[axis] - before[axis]))
        before = point
    return None


MEASURES: Mapping[str, Any] = {
    "accuracy": Measure("%", _accuracy),
    "loss": Measure("nats", lambda line: line.get("heldout_loss"), digits=3),
    "perplexity": Measure("perplexity", _of_whole(lambda line: math.exp(line["heldout_loss"]))),
    "bound": Measure("times the bound", lambda line: line.get("heldout_loss"), digits=3),
    "milliseconds": Measure(
        "ms an update", _of_whole(lambda line: 1000 * line["training_seconds"] / line["updates"]), digits=2
    ),
    "rate": Measure("samples a second", lambda line: line.get("samples_per_second"), digits=0),
    "waited": Measure(
        "% of the time waited",
        _of_whole(lambda line: 100 * line["exposed_seconds"] / line["training_seconds"]),
    ),
    "sent": Measure("MB sent", _of_whole(lambda line: line["sent_bytes"] / 1e6), digits=2),
    **{one.__name__: one for one in (loads_to, steps_to, seconds_to, divergence_over, held_gigabytes)},
}
"""What `measure` and `tuned_by` of a record may say."""


def evaluated(text: str, names: Mapping[str, Any]) -> Any:
    """Return what an expression of a record says."""
    return eval(text, {**names, "__builtins__": {}})


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of a record's table: runs that differ in their seed."""

    measure: str
    words: str | None
    """Options of `stretto simulate` that make it what it is; None where the measure needs no run."""
    real: str | None = None
    """Options in the place of `words` for the paper's model on its data; None where they are the same."""
    paper: float | None = None
    rates: tuple[float, ...] = ()
    """Learning rates to choose from; none keeps that of the words."""
    tuned_by: str = "loss"
    """What is lowest, on average, at the rate that is chosen."""

    @property
    def read(self) -> Measure:
        """The measure itself."""
        return evaluated(self.measure, MEASURES)


@dataclasses.dataclass(frozen=True)
class Effect:
    """A number that a claim is about, and what the paper says of it."""

    says: str
    of: str
    """The number: an expression of `of(row, column)`, seed by seed, and for the paper's cells."""
    least: float = -math.inf
    """The number is not below it."""
    most: float = math.inf
    """Nor above it."""
    limit: str = ""
    """Why `least` and `most` are what they are."""
    paper: float | None = None
    """The paper's own number, where its cells do not say it."""
    digits: int = 1

    def value(self, reading: Reading) -> float:
        """Return the number."""
        return float(evaluated(self.of, {"of": reading, "log": math.log, "min": min, "max": max}))


@dataclasses.dataclass(frozen=True)
class Record:
    """One table, figure or claim."""

    id: str
    """PAPER.NAME."""
    claim: str
    source: str
    kind: str = "paper"
    """Who says it: the paper, the authors in an answer to a review, or nobody yet: a reviewer has asked a question."""
    told: str = ""
    """The paper's number, for a list; empty where the effects have it, or where there are words alone."""
    setting: str = ""
    """What is trained here: words of `stretto simulate`."""
    real: str = ""
    """The same for the paper's model on its data, with {data} for the folder, and {here} for that of this program."""
    cells: Mapping[str, Mapping[str, Cell]] = dataclasses.field(default_factory=dict)
    effects: tuple[Effect, ...] = ()
    seeds: int = 5
    looks: int = 1
    """How often verdicts were looked at before there were so many seeds."""
    computed: bool = False
    """Whether a model computes its numbers, of time or memory: they have no interval over seeds."""
    scale: str = ""
    differences: str = ""
    answer: str = ""
    needs: str = ""
    """What would decide it, where it cannot be checked."""

    @property
    def paper(self) -> str:
        """The key of its paper."""
        return self.id.partition(".")[0]

    def every_cell(self) -> Iterator[Cell]:
        """Yield the cells that have runs."""
        return (cell for row in self.cells.values() for cell in row.values() if cell.words is not None)

    def of_paper(self, effect: Effect) -> float | None:
        """Return what the paper says an effect is, by its own words or its table; None where it has no number."""
        if effect.paper is not None:
            return effect.paper
        numbers = {
            row: {column: cell.paper for column, cell in own.items()} for row, own in self.cells.items()
        }

        def reading(row: str, column: str) -> float:
            number = numbers[row][column]
            return math.nan if number is None else number

        found = effect.value(reading)
        return None if math.isnan(found) else found


def record_of(id: str, given: Mapping[str, Any]) -> Record:
    """Return a record as its file has it."""
    own = dict(given)
    shared = {key: own.pop(key) for key in ("rates", "tuned_by") if key in own}
    rows, columns = own.pop("rows", {}), own.pop("columns", {})
    cells = {
        row: {
            name: _cell({**shared, **_named(of_row, "words"), **_named(of_column, "measure"), "column": name})
            for name, of_column in columns.items()
            if isinstance(of_row, str) or name in of_row.get("columns", columns)
        }
        for row, of_row in rows.items()
    }
    effects = tuple(Effect(**effect) for effect in own.pop("effects", ()))
    return Record(id=id, cells=cells, effects=effects, **own)


def _named(given: str | Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return {key: given} if isinstance(given, str) else given


def _cell(given: Mapping[str, Any]) -> Cell:
    fields = {field.name: given[field.name] for field in dataclasses.fields(Cell) if field.name in given}
    for key in ("words", "real", "measure"):
        if fields.get(key) is not None:
            fields[key] = fields[key].format(**given)
    if isinstance(paper := fields.get("paper"), Mapping):
        fields["paper"] = paper[given["column"]]
    return Cell(**{**fields, "rates": tuple(fields.get("rates", ()))})


def load() -> tuple[dict[str, Any], dict[str, Record]]:
    """Return the papers and all records by their names; what reviewers asked comes last."""
    files = {
        key: yaml.safe_load((HERE / f"{key}.yaml").read_text("utf-8")) for key in ("acco", "paft", "echo")
    }
    given = [
        own
        for part in ("records", "questions")
        for file in files.values()
        for own in file.get(part, {}).items()
    ]
    return {key: file["paper"] for key, file in files.items()}, {id: record_of(id, own) for id, own in given}


class Verdict(StrEnum):
    """What we say of a claim, from what speaks least against it to what speaks most."""

    HOLDS = "holds"
    IN_SHAPE = "holds in shape"
    UNCHECKED = "cannot be checked"
    FAILS = "does not hold"


def judge(found: Interval | None, effect: Effect, computed: bool = False) -> Verdict:
    """Return the verdict on one effect, whose `paper` is its number; see Note [The rule].

    Args:
        found: Of the seeds that were run; None where one of them has no value.
        effect: What the paper says.
        computed: A mean alone decides.
    """
    if found is None or ("low" not in found and not computed):
        return Verdict.UNCHECKED
    low, high = found.get("low", found["mean"]), found.get("high", found["mean"])
    if high < effect.least or low > effect.most:
        return Verdict.FAILS
    if low < effect.least or high > effect.most:
        return Verdict.UNCHECKED
    if effect.paper is None:
        return Verdict.HOLDS
    rounding = 0.5 * 10**-effect.digits if computed else 0
    return Verdict.HOLDS if low - rounding <= effect.paper <= high + rounding else Verdict.IN_SHAPE


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict that speaks most against a claim; without any it cannot be checked."""
    return max(verdicts, key=list(Verdict).index, default=Verdict.UNCHECKED)


@dataclasses.dataclass(frozen=True)
class CellFound:
    """What the runs of a cell say."""

    cell: Cell
    words: str
    """Of its runs; empty before its rate is chosen."""
    values: Mapping[int, float]
    """By seed; those whose runs have the number."""
    runs: int
    """How many there are."""


@dataclasses.dataclass(frozen=True)
class EffectFound:
    """What the runs say of an effect."""

    effect: Effect
    """With the paper's number."""
    interval: Interval | None
    """Over the seeds; None where a run does not have the number."""
    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class Found:
    """What the runs of a record say."""

    record: Record
    seeds: int = 0
    cells: Mapping[str, Mapping[str, CellFound]] = dataclasses.field(default_factory=dict)
    effects: tuple[EffectFound, ...] = ()
    verdict: Verdict = Verdict.UNCHECKED
    why: str = ""
    """Of a record that cannot be checked, why, and what it needs."""
    cpu_seconds: float = 0
    """Of all its runs, those that choose rates among them."""


@dataclasses.dataclass(frozen=True)
class Site:
    """The runs of records: those that are in a book, here or with the paper's model on real data."""

    book: Book
    seeds: int | None = None
    """Of every cell; None is each record's own number."""
    first_seed: int = 0
    """Another one makes a replication: with the same seeds a run has the same bits."""
    data: str | None = None
    also: str = ""
    """Options behind those of every run, to rehearse with."""

    def words(self, record: Record, cell: Cell) -> str:
        """Return the words of a cell's runs, without seed and learning rate.

        Raises:
            ConfigError: There are data, and the record has nothing to train on them.
        """
        if self.data is None:
            return f"{record.setting} {cell.words} {self.also}".rstrip()
        if not record.real:
            raise ConfigError(f"{record.id} takes no data: leave out --data")
        real = record.real.format(data=shlex.quote(self.data), here=shlex.quote(str(HERE)))
        return f"{real} --device auto {cell.words if cell.real is None else cell.real} {self.also}".rstrip()

    def line_of(self, words: str, seed: int) -> Line | None:
        """Return what was kept of a run, or None."""
        return self.book.find({"words": words, "seed": seed})

    def tuning(self, record: Record, cell: Cell) -> dict[float, list[tuple[str, int]]]:
        """Return the runs that choose a cell's rate; with the paper's model its own rate stays."""
        words = self.words(record, cell)
        rates = cell.rates if self.data is None else ()
        return {rate: [(f"{words} --task.lr {rate:g}", seed) for seed in TUNING_SEEDS] for rate in rates}

    def chosen(self, record: Record, cell: Cell) -> str | None:
        """Return the words of a cell's runs at the rate that ends lowest; None before that is known."""
        costs: dict[str, float] = {}
        for trials in self.tuning(record, cell).values():
            lines = [self.line_of(*trial) for trial in trials]
            if None in lines:
                return None
            numbers = [evaluated(cell.tuned_by, MEASURES).of(line) for line in lines]
            # A run that never gets there has no end of it.
            costs[trials[0][0]] = statistics.fmean(math.inf if one is None else one for one in numbers)
        return min(costs, key=costs.__getitem__) if costs else self.words(record, cell)

    def seeds_of(self, record: Record) -> range:
        """Return the seeds of a record's cells.

        Raises:
            ConfigError: One of them has chosen learning rates.
        """
        seeds = range(self.first_seed, self.first_seed + (self.seeds or record.seeds))
        if taken := [seed for seed in TUNING_SEEDS if seed in seeds]:
            raise ConfigError(
                f"seeds {taken} choose learning rates and decide nothing: take another --first-seed"
            )
        return seeds

    def missing(self, records: Iterable[Record]) -> list[tuple[str, int]]:
        """Return the runs that are still to be made: those that choose a rate before those that use it."""
        wanted: dict[tuple[str, int], None] = {}
        for record in records:
            for cell in record.every_cell():
                for trials in self.tuning(record, cell).values():
                    wanted.update(dict.fromkeys(trials))
                if (words := self.chosen(record, cell)) is not None:
                    wanted.update(dict.fromkeys((words, seed) for seed in self.seeds_of(record)))
        return [trial for trial in wanted if self.line_of(*trial) is None]

    def found(self, record: Record) -> Found:
        """Return what the runs that were made say of a record."""
        if not record.effects:
            return Found(record, why=record.needs)
        seeds = self.seeds_of(record)
        table = {
            row: {column: self._cell_found(record, cell, seeds) for column, cell in columns.items()}
            for row, columns in record.cells.items()
        }
        effects = tuple(_effect_found(record, effect, table, seeds) for effect in record.effects)
        verdict = worst(one.verdict for one in effects)
        trials = {
            trial
            for cell in record.every_cell()
            for own in self.tuning(record, cell).values()
            for trial in own
        }
        trials |= {(one.words, seed) for own in table.values() for one in own.values() for seed in seeds}
        lines = [line for trial in trials if (line := self.line_of(*trial)) is not None]
        return Found(
            record=record,
            seeds=len(seeds),
            cells=table,
            effects=effects,
            verdict=verdict,
            why="; ".join(filter(None, (_why(effects), record.needs)))
            if verdict is Verdict.UNCHECKED
            else "",
            cpu_seconds=math.fsum(line["cpu_seconds"] for line in lines),
        )

    def _cell_found(self, record: Record, cell: Cell, seeds: range) -> CellFound:
        if cell.words is None:
            given = cell.read.of({})
            return CellFound(cell, "", {} if given is None else dict.fromkeys(seeds, given), len(seeds))
        words, measure = self.chosen(record, cell), cell.read
        lines = {} if words is None else {seed: self.line_of(words, seed) for seed in seeds}
        made = {seed: measure.of(line) for seed, line in lines.items() if line is not None}
        values = {seed: number for seed, number in made.items() if number is not None}
        return CellFound(cell, words or "", values, len(made))


def _effect_found(
    record: Record, effect: Effect, table: Mapping[str, Mapping[str, CellFound]], seeds: range
) -> EffectFound:
    values = []
    for seed in seeds:
        try:
            values.append(effect.value(lambda row, column, seed=seed: table[row][column].values[seed]))
        except (KeyError, ZeroDivisionError):  # a run is missing, or does not have the number
            continue
    around = interval(values) if values and len(values) == len(seeds) else None
    if record.computed and around is not None:
        around = {"mean": around["mean"]}
    judged = dataclasses.replace(effect, paper=record.of_paper(effect))
    return EffectFound(judged, around, judge(around, judged, record.computed))


def _why(effects: Sequence[EffectFound]) -> str:
    open_ones = [one for one in effects if one.verdict is Verdict.UNCHECKED]
    if any(one.interval is None for one in open_ones):
        return "runs are missing, or do not have the number"
    if any("low" not in (one.interval or {}) for one in open_ones):
        return "one seed has no interval"
    return "the interval contains a limit"


def configure(words: str, seed: int) -> SimulateConfig[Any]:
    """Return the run of a `stretto simulate` command."""
    recipe, *options = shlex.split(words)
    # Records name a recipe of their own from the root of a checkout, so that no run's words have a path of one machine.
    given = [str(ROOT / recipe) if ".py:" in recipe else recipe, *options, "--seed", str(seed)]
    return parse_options("simulate", given, lambda task: SimulateConfig(task=task))[1]


def make(records: Sequence[Record], site: Site, processes: int) -> None:
    """Make all runs of some records that are not in the book; each is in it as soon as it is over.

    Raises:
        ConfigError: A run cannot be, before any is made.
        WorkerFailed: A run failed in another way than by diverging.
    """
    while todo := site.missing(records):
        configurations = [configure(*trial) for trial in todo]
        print(f"{len(todo)} runs to make, {min(processes, len(todo))} at a time", flush=True)
        with ProcessPoolExecutor(processes, get_context("forkserver"), torch.set_num_threads, (1,)) as pool:
            made = {pool.submit(perform, one): trial for one, trial in zip(configurations, todo, strict=True)}
            for done, future in enumerate(as_completed(made), start=1):
                (words, seed), line = made[future], future.result()
                site.book.add({"words": words, "seed": seed, **line})
                ended = line["error"] or f"loss {line['heldout_loss']}, accuracy {line['accuracy']}"
                print(f"  {done} of {len(todo)}: stretto simulate {words} --seed {seed}: {ended}", flush=True)


def perform(simulation: SimulateConfig[Any]) -> Line:
    """Make a run, and return what is kept of it; a run that diverged is kept too.

    Numbers are means over ranks, whose replicas may differ; bytes, waits and fresh batches are those of rank 0.
    """
    started = time.process_time()
    folder = Path(tempfile.mkdtemp(prefix="stretto-claims-"))
    error = None
    outcomes: Sequence[Outcome] = ()
    try:
        outcomes = simulate(dataclasses.replace(simulation, run_dir=str(folder / "run"))).values
    except (NonFinite, CorruptionError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        updates = read_json_lines(folder / "run" / "updates.jsonl")
        evaluations = read_json_lines(folder / "run" / "evaluations.jsonl")
        shutil.rmtree(folder, ignore_errors=True)
    kept: Line = {}
    if outcomes:
        right = [outcome.accuracy for outcome in outcomes if outcome.accuracy is not None]
        loss = statistics.fmean(outcome.heldout_loss for outcome in outcomes)
        kept = {
            "accuracy": statistics.fmean(right) if right else None,
            "heldout_loss": loss if math.isfinite(loss) else None,
        }
        of_first = (
            "updates", "samples", "training_seconds", "samples_per_second", "exposed_seconds", "sent_bytes",
            "fresh_batches",
        )  # fmt: skip
        kept |= {key: getattr(outcomes[0], key) for key in of_first}
    return {
        "error": error,
        **kept,
        "curve": _curve(updates, evaluations),
        "averages": sum(update["gap"] == 0 for update in updates),
        "intervals": sorted({update["interval"] for update in updates if update["interval"]}),
        "divergences": [update["divergence"] for update in updates if update["divergence"] is not None],
        "micro_batches": [
            count for one in updates[-1:] for count, ranks in one["micro_batches"] for _ in range(ranks)
        ],
        "cpu_seconds": round(time.process_time() - started, 2),
    }


def _curve(updates: Sequence[Line], evaluations: Sequence[Line]) -> list[Line]:
    """Return the evaluations of rank 0, each with the fresh batches, samples and bytes before it."""
    fresh = samples = sent = 0
    points, left = [], list(evaluations)
    for update in [{"step": 0, "fresh": 0, "samples": 0, "sent_bytes": 0}, *updates]:
        fresh, samples = fresh + update["fresh"], samples + update["samples"]
        sent += update["sent_bytes"]
        while left and left[0]["step"] == update["step"]:
            point = left.pop(0)
            counts = {"fresh": fresh, "samples": samples, "sent_bytes": sent}
            points.append(
                {**counts, **{key: point[key] for key in ("step", "training_seconds", "heldout_loss")}}
            )
    return points


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; its columns are not aligned, which nobody sees on a page."""
    lines = [head, *rows]
    text = ["|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in lines]
    return "\n".join([text[0], "|" + "---|" * len(head), *text[1:]])


def number(value: float, digits: int) -> str:
    """Return a number with thousands parted, and no sign before a zero."""
    text = f"{value:,.{digits}f}"
    return text.removeprefix("-") if not any(digit in "123456789" for digit in text) else text


def around(found: Interval | None, digits: int) -> str:
    """Return a mean with its interval."""
    if found is None:
        return "none"
    if "low" not in found:
        return number(found["mean"], digits)
    mean, low, high = (number(found[key], digits) for key in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def cell_text(found: CellFound) -> str:
    """Return our mean, and in brackets the paper's number."""
    digits, values, paper = found.cell.read.digits, found.values, found.cell.paper
    text = (
        number(statistics.fmean(values.values()), digits)
        if values
        else "not reached"
        if found.runs
        else "none"
    )
    if values and len(values) < found.runs:
        text += f" in {len(values)} of {found.runs}"
    return text if paper is None else f"{text} ({number(paper, digits)})"


def cells_table(found: Found) -> str:
    """Return a record's own table: rows and columns as in the paper."""
    units: dict[str, set[str]] = {}
    for own in found.cells.values():
        for column, one in own.items():
            units.setdefault(column, set()).add(one.cell.read.unit)
    head = ["", *(f"{column}, {min(unit)}" if len(unit) == 1 else column for column, unit in units.items())]
    return markdown(
        head,
        [
            [name, *(cell_text(row[column]) if column in row else "" for column in units)]
            for name, row in found.cells.items()
        ],
    )


def effects_table(found: Found) -> str:
    """Return what decides the verdict: every effect with its interval, what the paper says, and our limit."""
    rows = [
        [
            one.effect.says,
            around(one.interval, one.effect.digits),
            "" if one.effect.paper is None else number(one.effect.paper, one.effect.digits),
            limits(one.effect),
            one.verdict,
        ]
        for one in found.effects
    ]
    return markdown(["what is compared", "here, 95 %", "the paper", "our limit", "verdict"], rows)


def limits(effect: Effect) -> str:
    """Return the limits of ours, and why they are what they are."""
    both = (("at least", effect.least), ("at most", effect.most))
    said = ", ".join(f"{word} {number(one, effect.digits)}" for word, one in both if math.isfinite(one))
    return ": ".join(filter(None, (said, effect.limit)))


def page(text: str, papers: Mapping[str, Any], all_found: Sequence[Found]) -> str:
    """Return the page with what stands between `<!-- made: NAME -->` and `<!-- end -->` made anew."""
    verdicts = {key: [one.verdict for one in all_found if one.record.paper == key] for key in papers}
    of_papers = [
        [
            f"*{paper['title']}*, {paper['authors']}",
            ", ".join(f"[{name}]({link})" for name, link in paper["links"].items()),
            paper["read"],
        ]
        for paper in papers.values()
    ]
    counts = [[one, *(str(verdicts[key].count(one)) for key in papers)] for one in Verdict]
    made = {
        "papers": markdown(["paper", "where", "what is judged"], of_papers),
        "counts": markdown(["verdict", *(paper["name"] for paper in papers.values())], counts),
        **{key: claims(one for one in all_found if one.record.paper == key) for key in papers},
    }
    block = re.compile(r"(<!-- made: ([\w-]+) -->\n).*?(\n<!-- end -->)", re.DOTALL)
    return block.sub(lambda found: found[1] + made[found[2]] + found[3], text)


def claims(all_found: Iterable[Found]) -> str:
    """Return the table of claims with their verdicts: of each the effect that decides."""
    rows = []
    for one in all_found:
        record = one.record
        deciding = next((effect for effect in one.effects if effect.verdict is one.verdict), None)
        theirs, limit, here = record.told, "", ""
        if deciding is not None:
            effect = deciding.effect
            theirs = record.told if effect.paper is None else number(effect.paper, effect.digits)
            limit, here = limits(effect), f"{effect.says}: {around(deciding.interval, effect.digits)}"
        if one.verdict is Verdict.UNCHECKED:
            needs = f"needs {record.needs}" if record.needs else one.why
            here = "; ".join(filter(None, (here if deciding and deciding.interval else "", needs)))
        elif record.computed:
            here += ", computed"
        looks = f", {record.looks} looks" if record.looks > 1 else ""
        claim = f"Ours: {record.claim}" if record.kind == "question" else record.claim
        rows.append(
            [f"`{record.id}`", f"{claim} ({record.source})", theirs, here, limit, f"**{one.verdict}**{looks}"]
        )
    return markdown(
        [
            "record",
            "what they say, and where",
            "their number",
            "here, with the 95 % interval",
            "our limit",
            "verdict",
        ],
        rows,
    )


def named(names: Sequence[str], records: Mapping[str, Record]) -> list[Record]:
    """Return the records of these names; the name of a paper is all of its own, and no name is all.

    Raises:
        UnknownName: No record is called so.
    """
    for name in names:
        if not any(name in (record.id, record.paper) for record in records.values()):
            raise unknown_name("no record is called", name, records)
    return [record for record in records.values() if not names or {record.id, record.paper} & {*names}]


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="RECORD", help="or a paper: acco, paft, echo; none is all"
    )
    parser.add_argument("--list", action="store_true", help="only list the records")
    parser.add_argument(
        "--page", action="store_true", help="make the tables of docs/papers.md from the kept runs"
    )
    parser.add_argument("--seeds", type=int, help="of every number; an interval needs two")
    parser.add_argument(
        "--first-seed", type=int, default=0, help="another one repeats a record independently"
    )
    parser.add_argument(
        "--data", help="folder of the paper's data: its model is trained, on a GPU if there is one"
    )
    parser.add_argument("--also", default="", help='options behind those of every run, as "--updates 4"')
    parser.add_argument("--out", type=Path, default=Path("runs/claims"), help="folder of runs.jsonl")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    options = parser.parse_args()
    papers, all_records = load()
    records = named(options.names, all_records)
    if options.list:
        for record in records:
            print(f"{record.id:26} {record.claim}")
        return
    if options.page:
        results = [Site(Book(RUNS)).found(record) for record in records]
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), papers, results), encoding="utf-8")
        return
    site = Site(Book(options.out), options.seeds, options.first_seed, options.data, options.also)
    make(records, site, options.processes)
    for record in records:
        one = site.found(record)
        print(f"\n{record.id}: {record.claim}\nsource: {record.source}")
        if record.effects:
            print(f"here: {record.scale}, {one.seeds} seeds, {one.cpu_seconds / 60:.1f} CPU minutes")
            print(f"not as there: {record.differences}\n")
            print("\n\n".join(filter(None, (record.answer, cells_table(one), effects_table(one)))) + "\n")
        print(f"{record.id} {one.verdict}{f': {one.why}' if one.why else ''}")


if __name__ == "__main__":
    main()
