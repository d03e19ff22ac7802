"""The generation and the owner of a share of a job's state, and its file name."""

import dataclasses
import re

from stretto.errors import StrettoError
from stretto.share import read_share

_NAME = re.compile(r"(\d+)-(\d+)-([0-9a-f]*)\.(\d+)-of-(\d+)\.([0-9a-f]{32})")


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Generation:
    """Identifies a generation; later ones compare greater."""

    term: int
    """How often a job had begun or continued before this was kept, as far as its ranks knew."""
    step: int
    """Number of committed updates."""
    key: str = ""
    """Drawn whenever a job begins or continues, because ranks that did not know of each other may have equal counts."""


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a generation."""

    owners: int
    """Number of shares of the generation."""
    digest: str
    content: memoryview
    """Bytes as in a checkpoint's file."""

    @property
    def is_sound(self) -> bool:
        """Whether the bytes are unchanged since they were kept."""
        try:
            read_share(self.content, "a share", self.digest)
        except StrettoError:
            return False
        return True

    def name(self, generation: Generation, owner: int) -> str:
        """Return its file name."""
        return f"{generation.term}-{generation.step}-{generation.key}.{owner}-of-{self.owners}.{self.digest}"


def named(name: str) -> tuple[Generation, int, int, str] | None:
    """Return generation, owner, number of owners and digest of the share in a file of this name; None for another
    file.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    term, step, key, owner, owners, digest = found.groups()
    return Generation(int(term), int(step), key), int(owner), int(owners), digest
