"""Runs are made: some at a time, each in the book as soon as it is over, and never silent for long."""

import shlex
import time
from collections.abc import Callable, Sequence

from stretto_lab.patience import SECONDS
from stretto_lab.reproduce.book import Book
from stretto_lab.reproduce.record import Record
from stretto_lab.reproduce.results import Site, missing
from stretto_lab.reproduce.trial import Configure, Line, Trial, perform
from stretto_lab.train.processes import results_on_workers


def make(
    records: Sequence[Record],
    book: Book,
    *,
    seeds: int | None,
    site: Site,
    processes: int,
    configure: Configure,
    log: Callable[[str], None],
) -> None:
    """Make all runs of some records that are not in the book.

    Args:
        records: Those that cannot be checked have no runs.
        book: Takes the runs.
        seeds: Of every cell; None is each record's own number.
        site: Here, or with real data.
        processes: Runs at a time.
        configure: Reads a command.
        log: Called with one line of text at a time.

    Raises:
        ConfigError: A run cannot be, before any is made.
        WorkerFailed: A run failed in another way than by diverging.
    """
    while todo := _missing(records, book, seeds, site):
        configurations = [configure([*shlex.split(trial.words), "--seed", str(trial.seed)]) for trial in todo]
        log(f"{len(todo)} runs to make, {min(processes, len(todo))} at a time")
        started, done = time.monotonic(), 0
        for made in results_on_workers(perform, configurations, processes, __name__, patience=SECONDS):
            if made is None:
                log(f"  {done} of {len(todo)} runs, {time.monotonic() - started:.0f} s")
                continue
            number, line = made
            done += 1
            book.add({"words": todo[number].words, "seed": todo[number].seed, **line})
            log(f"  {done} of {len(todo)}: {_described(todo[number], line)}")


def _missing(records: Sequence[Record], book: Book, seeds: int | None, site: Site) -> list[Trial]:
    wanted = (
        trial
        for record in records
        if not record.unchecked
        for trial in missing(record, book, seeds or record.seeds, site)
    )
    return list(dict.fromkeys(wanted))


def _described(trial: Trial, line: Line) -> str:
    if line["error"]:
        return f"{trial.command}: {line['error'].splitlines()[0][:80]}"
    loss = "not finite" if line["heldout_loss"] is None else f"{line['heldout_loss']:.4f}"
    accuracy = "" if line["accuracy"] is None else f", {line['accuracy']:.1%} right"
    return f"{trial.command}: loss {loss}{accuracy}, {line['cpu_seconds']:.1f} s"
