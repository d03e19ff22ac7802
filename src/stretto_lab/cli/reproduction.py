"""`stretto reproduce`: the papers' tables and claims, listed or run again, and judged."""

from collections.abc import Sequence
from typing import Any

from stretto_lab.cli.options import parse_alone, parse_options
from stretto_lab.reproduce import MINUTES, Found, Record, ReproduceConfig, chosen, reproduce
from stretto_lab.reproduce.tables import cells_table, effects_table, markdown, told
from stretto_lab.train.simulation import SimulateConfig


def reproduce_command(words: Sequence[str]) -> None:
    """List records of the papers, or make their runs and print what these say."""
    count = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    config = parse_alone("reproduce", words[count:], ReproduceConfig())
    if config.list:
        print(_listed(chosen(words[:count])))
        return
    for found in reproduce(words[:count], config, configure, lambda line: print(line, flush=True)):
        print(_told(found))


def configure(words: Sequence[str]) -> SimulateConfig[Any]:
    """Return the run of a `stretto simulate` command; the errors are those of `parse_options`."""
    return parse_options("simulate", words, lambda task: SimulateConfig(task=task))[1]


def _listed(records: Sequence[Record]) -> str:
    rows = [
        [
            record.id,
            told(record),
            f"{MINUTES[record.id]:g}" if record.id in MINUTES else "-",
            f"stretto reproduce {record.id}",
        ]
        for record in records
    ]
    return markdown(["record", "the paper's number", "minutes here", "command"], rows)


def _told(found: Found) -> str:
    record = found.record
    lines = ["", f"{record.id}: {record.claim}", f"source: {record.source}"]
    if record.unchecked:
        return "\n".join([*lines, f"{found.verdict}: {record.unchecked}"])
    lines += [
        f"here: {record.scale}, {found.seeds} seeds",
        "",
        cells_table(found),
        "",
        effects_table(found),
        "",
    ]
    why = f": {found.why}" if found.why else ""
    return "\n".join([*lines, f"{record.id} {found.verdict}{why}"])
