"""Text from the source code of the Python standard library.

A document is used for training or held out *as a whole*; a hash of its name decides. So no file is on both sides, and a
file stays on its side when others are added or removed.
"""

import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from stretto import errors
from stretto.fields import check_fields

NOT_LIBRARY = frozenset(
    # Other people's packages, tests (odd encodings, broken sources), generated tables and vendored grammars.
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3"}
)
HELDOUT_SHARE = 0.1
"""Share of documents that are held out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """How much of the source code is used."""

    megabytes: float = 8.0
    """Most text to read, in units of 10**6 bytes, both sides together. The library has about 10 in all; 8 are
    read within a second and hold 7,000 micro-batches of 8 x 128 bytes before one repeats."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.megabytes > 0:
            raise errors.ConfigError(f"megabytes must be positive, found {self.megabytes}")


class Document(NamedTuple):
    """A text that is read only when needed."""

    name: str
    """Name within its source; the name decides the side."""

    read: Callable[[], bytes]
    """Returns the text."""

    @property
    def place(self) -> float:
        """A number in [0, 1) that depends only on the name; below `HELDOUT_SHARE` the document is held out."""
        digest = blake2b(self.name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
        # 53 bits: a double holds them exactly, so the number stays below 1.
        return (int.from_bytes(digest, "big") >> 11) / 2**53


class Corpus(NamedTuple):
    """The two sides, each as texts by name, sorted by the documents' places."""

    train: dict[str, bytes]
    heldout: dict[str, bytes]


def read_corpus(text: Text) -> Corpus:
    """Read both sides, each up to its share of `megabytes` (the last document of a side may be cut)."""
    documents = sorted(_sources(), key=lambda document: (document.place, document.name))
    heldout = [document for document in documents if document.place < HELDOUT_SHARE]
    return Corpus(
        train=_read(documents[len(heldout) :], int(text.megabytes * 1e6 * (1 - HELDOUT_SHARE))),
        heldout=_read(heldout, int(text.megabytes * 1e6 * HELDOUT_SHARE)),
    )


def _read(documents: list[Document], num_bytes: int) -> dict[str, bytes]:
    """Read documents up to `num_bytes`; empty documents are skipped."""
    texts: dict[str, bytes] = {}
    for document in documents:
        if num_bytes <= 0:
            break
        if content := document.read()[:num_bytes]:
            texts[document.name] = content
            num_bytes -= len(content)
    return texts


def _sources() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in NOT_LIBRARY and not name.startswith(".")]
        for file in files:
            # Installation data is generated and full of the machine's own paths: not a source.
            if file.endswith(".py") and not file.startswith("_sysconfigdata"):
                path = Path(folder, file)
                yield Document(path.relative_to(root).as_posix(), path.read_bytes)
