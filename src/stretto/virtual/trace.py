"""The trace of a run: what every rank did when, in virtual time, in the order in which it happened."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash


class Span(NamedTuple):
    """One piece of work of one rank."""

    rank: int
    work: str
    """Its kind, such as micro-batch or step."""
    start_ns: int
    stop_ns: int


class Transfer(NamedTuple):
    """One collective, which all ranks of a group performed."""

    group: str
    sequence: int
    """Position among the group's collectives, from 0."""
    what: str
    """Operation, elements and dtype."""
    sent_bytes: int
    """By all ranks together."""
    entered: tuple[int, ...]
    """The ranks in the order in which they entered."""
    start_ns: int
    """When the last one had."""
    stop_ns: int
    """When it was over."""


class Trace:
    """The records of one run."""

    def __init__(self) -> None:
        self.records: list[Span | Transfer] = []

    def lines(self) -> Iterator[str]:
        """Yield every record as one line of JSON."""
        for record in self.records:
            yield json.dumps({"record": type(record).__name__.lower(), **record._asdict()})

    def digest(self) -> str:
        """Return a hexadecimal xxh3 digest of all lines: equal for equal runs."""
        digest = xxhash.xxh3_128()
        for line in self.lines():
            digest.update(line.encode())
        return digest.hexdigest()

    def write(self, path: Path) -> None:
        """Write the lines to a file."""
        path.write_text("".join(f"{line}\n" for line in self.lines()))
