"""All that a guard may ask for, and what it is answered.

| effect | asks for | answer | collective |
|---|---|---|---|
| `Fingerprint()` | a digest of every part of this rank's state | `dict[Part, int]` | no |
| `Share(record)` | every rank's record | `list[bytes]`, by rank | yes |
| `Copy(part, source, onto)` | a part's values from one rank put in the place of others' | None | yes |
| `Seal(what)` | imprints kept of what nobody may change for a while | None | no |
| `Inspect()` | what is sealed compared with its imprints | `list[Difference]` | no |
| `Mend(part)` | a part brought back by its imprint | `bool`: did that succeed? | no |
| `Replace(parts)` | parts taken from a rank that has them undamaged | `dict[Part, int]`: from which rank | yes |
| `Recompute()` | what follows from healthy state computed again | `dict[Part, bool]`: is a part what comes out? | no |
| `Where()` | rank and update, for messages | `str` | no |
| `Report(...)` | a `Verdict` in the next `Update`, on every rank | None | no |

`Replace` is collective for strategies with a replicated optimizer; for others there is no other rank to take from, and
it raises `StateCorrupt` where anything is asked for.
"""

import dataclasses
from collections.abc import Generator
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a rank's state; ranks of a replicated strategy have the same parts."""

    site: str
    """What kind of thing it is: "masters", "optimizer state", "reduced gradient", "values to be shown", "fixed"."""
    name: str
    """Which one, such as "bucket 3"."""

    def __str__(self) -> str:
        return f"{self.site}, {self.name}"


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """A part that is not what it was when it was sealed."""

    part: Part
    expected: int
    """Digest when it was sealed."""
    found: int
    """Digest now."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fingerprint:
    """Digest every part of the state that this rank holds.

    That is masters, optimizer state, the values that the model is to show next, and what is fixed: frozen parameters
    and buffers of whole numbers. Answer: 64-bit digests by part, in an order that is equal on all ranks of a replicated
    strategy; 0 for something fixed that was written after all, and is not to be compared.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """Gather a record of every rank. Answer: `list[bytes]`, in rank order, equal on all ranks."""

    record: bytes
    """As long as every other rank's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """Send a part from one rank to all; those named put it in the place of their own."""

    part: Part
    source: int
    onto: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Seal:
    """Keep imprints until the next `Step`, which changes everything: of masters and optimizer state, or of reduced
    gradients. What is sealed already stays as it is sealed."""

    what: Literal["state", "reduced gradient"]


@dataclasses.dataclass(frozen=True, slots=True)
class Inspect:
    """Compare everything that is sealed with its imprint. Answer: the differences."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mend:
    """Bring a sealed part back by its imprint, in place. Answer: whether it is as sealed, to the bit."""

    part: Part


@dataclasses.dataclass(frozen=True, slots=True)
class Replace:
    """Take sealed parts that are damaged beyond mending on this rank from a rank on which they are not.

    Answer: the source by part. Raises `StateCorrupt` where no rank has a part undamaged.
    """

    parts: tuple[Part, ...]
    """This rank's; none where all is well."""


@dataclasses.dataclass(frozen=True, slots=True)
class Recompute:
    """Compare this rank's parts with what they should be by their own origin.

    Values to be shown are compared with what the masters publish; masters and optimizer state with what a rehearsal of
    the last step gave, where a guard has asked for one (`Guard.rehearses_step`). Answer: by part, whether it is the
    same; parts that cannot be computed again are not in it.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Where:
    """Ask for rank and update. Answer: text for the beginning of a message."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Put a `Verdict` into the next `Update`; fields are those of `stretto.records.Verdict`.

    What one rank reports reaches every rank's `Update`; what several report alike is there once.
    """

    guard: str
    site: str
    part: str
    action: str
    ranks: tuple[int, ...] | None = None
    """None for the rank that reports."""
    expected: str | None = None
    found: str | None = None


GuardEffect = Fingerprint | Share | Copy | Seal | Inspect | Mend | Replace | Recompute | Where | Report
GuardScript = Generator[GuardEffect, Any, None]
