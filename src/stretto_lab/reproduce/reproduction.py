"""`stretto reproduce`: records of the papers are run, and judged from their runs."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from stretto.errors import ConfigError
from stretto.fields import check_at_least, check_fields, unknown_name
from stretto_lab.reproduce.book import Book
from stretto_lab.reproduce.make import make
from stretto_lab.reproduce.record import Record
from stretto_lab.reproduce.records import RECORDS
from stretto_lab.reproduce.results import Found, Site, found
from stretto_lab.reproduce.trial import Configure


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReproduceConfig:
    """Claims of the papers, run again; see the page papers."""

    list: bool = False
    """Only list the records: the paper's number, minutes here, and the command."""
    seeds: int | None = None
    """Seeds of every number; None is what the record has, five for most. An interval needs two."""
    data: str | None = None
    """Folder of the paper's data, or of some in their format: CIFAR's binary files, or text; the paper's model is
    trained, on a GPU where there is one. None trains a small model on data that every machine has."""
    scale: float = 1.0
    """With data: factor to rehearse with; on the model, the data and the updates, above 0 and at most 1."""
    out: str = "runs/reproduced"
    """Folder for runs.jsonl; runs that are in it are not made again."""
    processes: int = 2
    """Runs at a time."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, seeds=1, processes=1)
        if self.scale != 1 and self.data is None:
            raise ConfigError(f"scale={self.scale:g} needs data: a record is small without")

    @property
    def site(self) -> Site:
        """Where the records are reproduced."""
        return Site(data=self.data, scale=self.scale)


def chosen(names: Sequence[str]) -> list[Record]:
    """Return the records of these names; the name of a paper is all of its own, and no name is all.

    Raises:
        UnknownName: No record is called so.
    """
    records: dict[str, Record] = {} if names else dict(RECORDS)
    for name in names:
        own = {record.id: record for record in RECORDS.values() if name in (record.id, record.paper)}
        if not own:
            raise unknown_name("no record is called", name, RECORDS)
        records.update(own)
    return list(records.values())


def reproduce(
    names: Sequence[str], config: ReproduceConfig, configure: Configure, log: Callable[[str], None]
) -> list[Found]:
    """Make the runs of records that are missing, and return what all say.

    Args:
        names: Of records or papers; none is all.
        config: How many seeds, on what, and where to.
        configure: Reads the words of a `stretto simulate` command.
        log: Called with one line of text at a time.

    Raises:
        ConfigError: A record is unknown, or has nothing to train on the data.
        WorkerFailed: A run failed.
    """
    records, book = chosen(names), Book(Path(config.out))
    site = config.site
    make(
        records,
        book,
        seeds=config.seeds,
        site=site,
        processes=config.processes,
        configure=configure,
        log=log,
    )
    return [found(record, book, config.seeds or record.seeds, site) for record in records]
