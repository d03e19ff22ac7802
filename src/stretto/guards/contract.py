"""The contract of a guard: the effects it may ask for, and the coroutines that ask.

| effect | asks for | answer | collective |
|---|---|---|---|
| `Fingerprint()` | a digest of every part of this rank's state | `dict[Part, int]` | no |
| `Share(record)` | every rank's record | `list[bytes]`, by rank | yes |
| `Copy(part, source, onto)` | a part's values from one rank put in the place of others' | None | yes |
| `Seal(what)` | checksums kept of what nobody may change for a while | None | no |
| `Inspect()` | what is sealed compared with its checksums | `list[Difference]` | no |
| `Mend(part)` | a part brought back by its checksum | `bool`: did that succeed? | no |
| `Replace(parts)` | parts taken from a rank that has them undamaged | `dict[Part, int]`: from which rank | yes |
| `Recompute()` | what follows from healthy state computed again | `dict[Part, bool]`: is a part what comes out? | no |
| `Where()` | rank and update, for messages | `str` | no |
| `Report(...)` | an `Incident` in the next `Update`, on every rank | None | no |

`Replace` is collective for strategies with a replicated optimizer; for others there is no other rank to take from, and
it raises `StateCorrupt` where anything is asked for.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from stretto.records import Incident


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
    """Keep checksums until the next `Step`, which changes everything: of masters and optimizer state, or of reduced
    gradients. What is sealed already stays as it is sealed."""

    what: Literal["state", "reduced gradient"]


@dataclasses.dataclass(frozen=True, slots=True)
class Inspect:
    """Compare everything that is sealed with its checksum. Answer: the differences."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mend:
    """Bring a sealed part back by its checksum, in place. Answer: whether it is as sealed, to the bit."""

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
    """Put an `Incident` into the next `Update`; fields are those of `stretto.records.Incident`.

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


class RoundWatch:
    """What a guard does on the compute lane, for one job; subclasses say what."""

    needs_rounds: ClassVar[bool] = False
    """Whether it has to run rounds again, so that micro-batches must come by way of `DataParallel.micro_batch`."""

    def installed(self, values: Sequence[Tensor]) -> None:
        """The model's parameters have been given `values`, in the layout's order."""

    def round_ends(self) -> Sequence[Incident]:
        """All micro-batches of a round are counted; called on all ranks. Return what was found."""
        return ()


class Guard(ABC):
    """What is checked between updates, and what is done about damage.

    A subclass is a frozen dataclass of options with a generator, `after_update`, and where needed further ones. They
    run on the communication lane and yield the effects of `stretto.guards.contract`, which the lane performs and
    answers. A guard holds no state between calls and touches no tensor: what is to be remembered is held by the lane
    (`Seal`).

    Note [One path]
        Collective effects must be asked for by all ranks alike. A guard may branch on its options and on the answers of
        collective effects, which are the same on every rank; on a local answer it may branch only around effects that
        are not collective.

    Note [When]
        at_start        before the first update, and whenever state has been loaded from a checkpoint;
        after_reduce    once per round, when the round's gradient has been summed;
        before_step     ahead of every `Step` and every `Preview`, before the reduced gradient, masters and optimizer
                        state are read again;
        after_update    once per update, when its last values have been published or gathered and before the model
                        shows them; also where the update had no weight and nothing was stepped.

        Within each moment guards run in the order in which the user gave them.
    """

    name: ClassVar[str]
    """The one spelling: row in the tables, `Incident.guard`."""
    overlaps: ClassVar[bool] = False
    """Whether the guard may run beside the gradients of the next update. One that must speak before values are shown
    says False: it waits where its strategy waits, and is hidden where its strategy is."""
    needs_replicas: ClassVar[bool] = False
    """Whether it compares ranks with each other, so that only strategies with a replicated optimizer may have it."""
    needs_equal_parameters: ClassVar[bool] = False
    """Whether all ranks have to show the same parameters, so that strategies that average replicas may not have it."""

    @property
    def rehearses_step(self) -> bool:
        """Whether every step is computed ahead on copies, segment by segment, so that `Recompute` knows its outcome."""
        return False

    @abstractmethod
    def after_update(self) -> GuardScript:
        """Yield what is to be done at the end of an update."""

    def watch_rounds(self, rounds: Any) -> RoundWatch | None:
        """Return what is to be done on the compute lane of a job; nothing, unless overridden.

        Args:
            rounds: The job's `stretto.guards.replay.GuardedRounds`.
        """
        return None

    def at_start(self) -> GuardScript:
        """Yield what is to be done with the state that training starts from; nothing, unless overridden.

        No values have been published yet, so `Fingerprint` and `Copy` may not be asked for.
        """
        yield from ()

    def after_reduce(self) -> GuardScript:
        """Yield what is to be done when a gradient has been summed; nothing, unless overridden."""
        yield from ()

    def before_step(self) -> GuardScript:
        """Yield what is to be done before gradient, masters and state are read; nothing, unless overridden."""
        yield from ()
