"""Which generation of a job's state a rank holds a share of, and what it is called in a file."""

import dataclasses
import re

from stretto.errors import StrettoError
from stretto.share import read_share

_NAME = re.compile(r"(\d+)-(\d+)-([0-9a-f]*)\.(\d+)-of-(\d+)\.([0-9a-f]{32})")


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Generation:
    """Which one it is; later ones are greater."""

    term: int
    """How often a job had begun or gone on until it was kept, as far as its ranks knew."""
    step: int
    """Committed updates."""
    key: str = ""
    """Drawn whenever a job begins or continues: ranks that did not know of each other may count alike."""


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a generation."""

    owners: int
    """How many shares the generation has."""
    digest: str
    content: memoryview
    """Those of a file of a checkpoint."""

    @property
    def is_sound(self) -> bool:
        """Whether it is what it was when it was kept."""
        try:
            read_share(self.content, "a share", self.digest)
        except StrettoError:
            return False
        return True

    def name(self, generation: Generation, owner: int) -> str:
        """Return its name as a file."""
        return f"{generation.term}-{generation.step}-{generation.key}.{owner}-of-{self.owners}.{self.digest}"


def named(name: str) -> tuple[Generation, int, int, str] | None:
    """Return generation, owner, number of owners and digest of the share whose file has this name, if it is one's."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    term, step, key, owner, owners, digest = found.groups()
    return Generation(int(term), int(step), key), int(owner), int(owners), digest
