"""`stretto reproduce`: the papers' tables and claims, listed or run again, and judged."""

import sys
from collections.abc import Sequence
from typing import Any

from stretto_lab.cli.options import parse_alone, parse_options
from stretto_lab.observe import print_table
from stretto_lab.patience import COLUMNS, fold
from stretto_lab.reproduce import MINUTES, Found, Record, ReproduceConfig, chosen, reproduce
from stretto_lab.reproduce.tables import cells_table, effects_table, markdown, told
from stretto_lab.train.simulation import SimulateConfig


def reproduce_command(words: Sequence[str]) -> None:
    """List records of the papers, or make their runs and print what these say."""
    count = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    config = parse_alone("reproduce", words[count:], ReproduceConfig())
    if config.list:
        _print_list(chosen(words[:count]))
        return
    for found in reproduce(words[:count], config, configure, lambda line: print(fold(line), flush=True)):
        print_found(found)


def configure(words: Sequence[str]) -> SimulateConfig[Any]:
    """Return the run of a `stretto simulate` command; the errors are those of `parse_options`."""
    return parse_options("simulate", words, lambda task: SimulateConfig(task=task))[1]


def _print_list(records: Sequence[Record]) -> None:
    width = max(len(record.id) for record in records)
    print(f"{'stretto reproduce':{width}}  minutes here  the paper's number")
    for record in records:
        minutes = f"{MINUTES[record.id]:g}" if record.id in MINUTES else "-"
        print(fold(f"{record.id:{width}}  {minutes:>12}  {told(record)}", indent=width + 16))


def print_found(found: Found) -> None:
    """Print what a record's runs say: its tables and its verdict, or why there is none."""
    record = found.record
    print(fold(f"\n{record.id}: {record.claim}\nsource: {record.source}"))
    if record.unchecked:
        print(fold(f"{found.verdict}: {record.unchecked}"))
        return
    print(fold(f"here: {record.scale}, {found.seeds} seeds"))
    for head, rows in (cells_table(found), effects_table(found)):
        print()
        if sys.stdout.isatty():
            print_table("record", "", head, rows, left=len(head), width=COLUMNS)
        else:
            print(markdown(head, rows))
    why = f": {found.why}" if found.why else ""
    print(fold(f"\n{record.id} {found.verdict}{why}"))
