"""Text to learn from: the sources of the Python standard library, or text that the user has.

A document is used for training or held out *as a whole*; a hash of its name decides. So no file is on both sides, and
a file stays on its side when others are added or removed.
"""

import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple

from stretto import errors
from stretto.fields import check_at_least, check_fields
from stretto_lab.recipes.task import extra

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

    @property
    def place(self) -> float:
        """A number in [0, 1) that depends on the name alone; below `heldout_share` the document is held out."""
        digest = blake2b(self.name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
        # 53 bits: a double holds them exactly, so the number stays below 1.
        return (int.from_bytes(digest, "big") >> 11) / 2**53


class Corpus(NamedTuple):
    """The two sides: name to text, sorted by the documents' places."""

    train: dict[str, bytes]
    heldout: dict[str, bytes]


def read_corpus(text: Text) -> Corpus:
    """Read both sides, each up to its share of `megabytes` (the last document of a side may be cut).

    Raises:
        ConfigError: The source does not exist, or one of the sides would be empty.
        MissingExtra: `dataset_path` is set and `datasets` is not installed.
    """
    documents = sorted(_documents(text), key=lambda document: (document.place, document.name))
    heldout = [document for document in documents if document.place < text.heldout_share]
    train = documents[len(heldout) :]
    corpus = Corpus(
        train=_read(train, int(text.megabytes * 1e6 * (1 - text.heldout_share))),
        heldout=_read(heldout, int(text.megabytes * 1e6 * text.heldout_share)),
    )
    for side, filled in corpus._asdict().items():
        if not filled:
            source = text.folder or text.dataset_path or "the standard library's sources"
            raise errors.ConfigError(
                f"no text on the {side} side of {source} ({len(documents)} documents, heldout_share "
                f"{text.heldout_share:g}, {text.megabytes:g} megabytes): give more documents, or another share"
            )
    return corpus


def _read(documents: list[Document], num_bytes: int) -> dict[str, bytes]:
    """Read documents until there are `num_bytes`; empty ones are left out."""
    texts: dict[str, bytes] = {}
    for document in documents:
        if num_bytes <= 0:
            break
        if content := document.read()[:num_bytes]:
            texts[document.name] = content
            num_bytes -= len(content)
    return texts


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
            # Installation data is generated and full of the machine's own paths: not a source.
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

    def read(index: int) -> bytes:
        return str(rows[index][column]).encode("utf-8")

    for index in range(len(rows)):
        yield Document(f"row {index}", partial(read, index))
