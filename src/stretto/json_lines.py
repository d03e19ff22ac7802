"""Records in files: one JSON object per line, and whole JSON files that are replaced in one step."""

import errno
import gzip
import json
import os
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from stretto.disk import read_whole, replace_file, writing_to
from stretto.errors import ConfigError
from stretto.records import plain

_END = 1 << 12
"""Bytes to read first at a file's end, to find its last line."""


class JsonLines:
    """Appends records that have a `step`.

    Every record is passed to the operating system at once: a killed process loses at most the line that it was writing.
    If a full disk accepts only a part of a record, that part is removed again, so that two records are never joined.

    Args:
        path: The file.
        keep_until: Keep the leading records up to this step and append after them; None starts an empty file.

    Raises:
        ConfigError: A line among the kept ones is not a record.
    """

    def __init__(self, path: Path, keep_until: int | None) -> None:
        kept = 0
        if keep_until is not None:
            for line, record in _records(path):
                if not _step_of(record, path) <= keep_until:
                    break
                kept += len(line)
        self._path = path
        with writing_to(path):
            self._file = path.open("ab", buffering=0)
            self._file.truncate(kept)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record`.

        Raises:
            DiskError: It cannot be written; the file ends after the previous record.
        """
        with writing_to(self._path):
            _append(self._file, record)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def append_json_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append `record` to a file that is rarely written and whose records are never removed.

    An incomplete last line of a killed process is removed first; only the end of the file is read. Raises as
    `JsonLines.write`.
    """
    with writing_to(path), path.open("a+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        length, begin, last = _END, size, b""
        while begin and b"\n" not in last[:-1]:  # the whole last line, or the line before a half one
            length, begin = 2 * length, max(0, size - length)
            last = os.pread(file.fileno(), size - begin, begin)
        *_, line = last.splitlines(keepends=True) or [b""]
        if not line.endswith(b"\n") or not _is_record(line):
            file.truncate(size - len(line))
        _append(file, record)


def _is_record(line: bytes) -> bool:
    try:
        return type(json.loads(line)) is dict
    except (ValueError, RecursionError):
        return False


def replace_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file in one step; raises as `replace_file`."""
    text = json.dumps(plain(content), indent=2, allow_nan=False) + "\n"
    replace_file(path, lambda unfinished: unfinished.write_text(text))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file; an incomplete last line is skipped, and a missing file has no records.

    A file whose name ends in `.gz` is unpacked.

    Raises:
        ConfigError: A line is not a record.
    """
    return [record for _, record in _records(path)]


def _step_of(record: Mapping[str, Any], path: Path) -> int:
    """Return the step of a record; raise if it has none."""
    step = record.get("step")
    if type(step) is not int:
        raise ConfigError(
            f"{path}: expected records with a step, found {str(dict(record))[:60]}; restore the file, or move "
            "it away to begin a new file"
        )
    return step


def _append(file: FileIO, record: Mapping[str, Any]) -> None:
    """Append the whole record or nothing; numbers that are not finite become null."""
    line = json.dumps(plain(record), allow_nan=False).encode() + b"\n"
    end = os.fstat(file.fileno()).st_size
    try:
        written = file.write(line)
        if written != len(line):
            raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes were taken; is the disk full?")
    except OSError:
        file.truncate(end)
        raise


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the complete lines of a file with their records."""
    try:
        content = gzip.decompress(read_whole(path)) if path.suffix == ".gz" else read_whole(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    lines = content.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            return
        try:
            record = json.loads(line)
            if type(record) is not dict:
                raise ValueError("it is no object")
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                return  # two halves, of which the first was written by a process that died
            raise ConfigError(
                f"{path}, line {number}: expected one JSON object, found {line[:40]!r} ({error}); restore the "
                "file, or move it away to begin a new file"
            ) from error
        yield line, record
