"""Text to learn from: the Python standard library's own sources, or texts that the user has.

Documents are split into training and held-out *as a whole* by a hash of their name, so that no file is on
both sides, and a file stays on its side when others come and go.
"""

import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple

from stretto import errors
from stretto.fields import check_at_least, check_fields
from stretto.recipes.task import extra

NOT_LIBRARY = frozenset(
    # Other people's packages, tests (odd encodings, broken sources), generated tables and vendored grammars.
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Where the text comes from, how much of it is used, and what a token is."""

    folder: str | None = None
    """Folder of your own text files, read recursively, instead of the standard library's sources."""

    suffixes: tuple[str, ...] = (".py", ".txt", ".md")
    """Endings of the files to read in `folder`."""

    dataset_path: str | None = None
    """Folder written by `datasets` with `save_to_disk`, one document per row, instead of the sources. Of a
    dictionary of splits the split `train` is read."""

    dataset_column: str = "text"
    """Column of the dataset that holds the text."""

    megabytes: float = 8.0
    """Most text to read, in units of 10**6 bytes, both sides together. The library has about 10 in all; 8 are
    read within a second and hold 7,000 micro-batches of 8 x 128 bytes before one repeats."""

    heldout_share: float = 0.1
    """Share of the documents kept for evaluation, between 0 and 1."""

    tokens: Literal["bytes", "bpe"] = "bytes"
    """A token is a byte, or a piece from a byte-level BPE, trained on the training side at every start (some
    seconds for 8 megabytes)."""

    vocabulary: int = 1024
    """Number of tokens of the BPE, at least 257. Bytes have 256 whatever this says."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, vocabulary=1)
        if self.folder is not None and self.dataset_path is not None:
            raise errors.ConfigError(
                f"text comes from one place: found folder {self.folder!r} and dataset_path "
                f"{self.dataset_path!r}; leave one out"
            )
        if not 0 < self.heldout_share < 1:
            raise errors.ConfigError(f"heldout_share must be between 0 and 1, found {self.heldout_share}")
        if not self.megabytes > 0:
            raise errors.ConfigError(f"megabytes must be positive, found {self.megabytes}")
        if self.tokens == "bpe" and self.vocabulary < 257:
            raise errors.ConfigError(
                f"a byte-level BPE needs at least 257 tokens (256 bytes and the end of a document), found "
                f"{self.vocabulary}"
            )


class Document(NamedTuple):
    """A text that is read only when needed."""

    name: str
    """Name within its source; decides the side."""

    read: Callable[[], bytes]
    """Returns the text."""


class Corpus(NamedTuple):
    """The two sides; name to text, in the order of the names' hashes."""

    train: dict[str, bytes]
    heldout: dict[str, bytes]


def read_corpus(text: Text) -> Corpus:
    """Reads both sides, each up to its share of the byte cap (the last document of a side may be cut).

    Raises:
        ConfigError: The source does not exist, or one of the sides would be empty.
        MissingExtra: `dataset_path` is set and `datasets` is not installed.
    """
    documents = sorted(_documents(text), key=lambda document: (_place(document.name), document.name))
    sides = Corpus(
        train=_fill(
            (document for document in documents if _place(document.name) >= text.heldout_share),
            int(text.megabytes * 1e6 * (1 - text.heldout_share)),
        ),
        heldout=_fill(
            (document for document in documents if _place(document.name) < text.heldout_share),
            int(text.megabytes * 1e6 * text.heldout_share),
        ),
    )
    for side, filled in sides._asdict().items():
        if not filled:
            raise errors.ConfigError(
                f"no text on the {side} side of {_source_name(text)} ({len(documents)} documents, "
                f"heldout_share {text.heldout_share:g}, {text.megabytes:g} megabytes): give more documents, "
                "or another share"
            )
    return sides


def _place(name: str) -> float:
    """A number in [0, 1) that depends on the name alone; below `heldout_share` it means held out."""
    digest = blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    # 53 bits: a double holds them exactly, so the number stays below 1.
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def _fill(documents: Iterable[Document], budget: int) -> dict[str, bytes]:
    """Reads documents until `budget` bytes are there; empty ones are left out."""
    filled: dict[str, bytes] = {}
    for document in documents:
        if budget <= 0:
            break
        if content := document.read()[:budget]:
            filled[document.name] = content
            budget -= len(content)
    return filled


def _source_name(text: Text) -> str:
    return text.folder or text.dataset_path or "the standard library's sources"


def _documents(text: Text) -> Iterator[Document]:
    if text.folder is not None:
        return _files(Path(text.folder), text.suffixes, frozenset())
    if text.dataset_path is not None:
        return _rows(text.dataset_path, text.dataset_column)
    return _files(Path(sysconfig.get_path("stdlib")), (".py",), NOT_LIBRARY)


def _files(root: Path, suffixes: tuple[str, ...], without: frozenset[str]) -> Iterator[Document]:
    if not root.is_dir():
        raise errors.ConfigError(f"the text folder {str(root)!r} does not exist or is not a folder")
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in without and not name.startswith(".")]
        for file in files:
            # Installation data, generated and full of the machine's own paths, is no source either.
            if file.endswith(suffixes) and not file.startswith("_sysconfigdata"):
                path = Path(folder, file)
                yield Document(path.relative_to(root).as_posix(), path.read_bytes)


def _rows(path: str, column: str) -> Iterator[Document]:
    datasets = extra("datasets", "text from a saved dataset (data.dataset_path)")
    try:
        rows = datasets.load_from_disk(path)
    except FileNotFoundError as error:
        raise errors.ConfigError(f"no dataset saved by `save_to_disk` at {path!r}: {error}") from error
    if isinstance(rows, datasets.DatasetDict):
        if "train" not in rows:
            raise errors.ConfigError(f"the dataset at {path!r} has no split 'train', only {sorted(rows)}")
        rows = rows["train"]
    if column not in rows.column_names:
        raise errors.ConfigError(
            f"the dataset at {path!r} has no column {column!r}, only {rows.column_names}: set dataset_column"
        )
    for index in range(len(rows)):
        yield Document(f"row {index}", partial(_row, rows, index, column))


def _row(rows: Any, index: int, column: str) -> bytes:
    return str(rows[index][column]).encode("utf-8")
