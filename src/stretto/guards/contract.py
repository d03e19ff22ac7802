"""The interface of a guard: the effects that it may yield, and its coroutines.

| effect | asks for | answer | collective |
|---|---|---|---|
| `Fingerprint()` | a digest of every part of this rank's state | `dict[Part, int]` | no |
| `Share(record)` | every rank's record | `list[bytes]`, by rank | yes |
| `Copy(part, source, onto)` | one rank's values of a part written over those of other ranks | None | yes |
| `Seal(what)` | checksums of values that may not change until their next use | None | no |
| `Inspect(*what)` | sealed values compared with their checksums | `list[Difference]` | no |
| `Mend(part)` | a part repaired from its checksum | `bool`: did that succeed? | no |
| `Publish(part)` | values to be shown written again from the masters | None | no |
| `Clear(part)` | a part set to zero | None | no |
| `Replace(parts)` | parts copied from a rank where they are healthy | `dict[Part, int]`: from which rank | yes |
| `Recompute()` | parts computed again from healthy state | `dict[Part, bool]`: is the result the same? | no |
| `Where()` | rank and update, for messages | `str` | no |
| `Ranks()` | the names of the ranks that `Share` asks | `Sequence[int]`, in their order | no |
| `Report(...)` | an `Incident` in the next `Update`, on every rank | None | no |

`Replace` is collective for strategies with a replicated optimizer. With other strategies no second rank has the parts,
so it raises `StateCorrupt` if any part is given.

Where the ranks of a node hold shards of one model, collective effects connect the ranks that hold the same shard.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from stretto.records import Incident


class Part(NamedTuple):
    """One tensor of a rank's state; ranks of a replicated strategy have the same parts."""

    site: str
    """The kind of tensor: "masters", "optimizer state", "anchor", "velocity", "reduced gradient", "error memory",
    "values to be shown" or "fixed"."""
    name: str
    """Name of the tensor within its kind, such as "bucket 3"."""

    def __str__(self) -> str:
        return f"{self.site}, {self.name}"


Sealable = Literal["state", "anchor", "reduced gradient", "error memory", "values to be shown"]
"""Kinds of values that can be sealed: masters and optimizer state, which change at a step; anchors, to which changes
are added; reduced gradients, from their sum to their step; the residual of a wire (its rounding errors), which
changes at every sum; values that have been gathered or published, until they are shown."""


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """A part that has changed since it was sealed."""

    part: Part
    expected: int
    """Digest at the seal."""
    found: int
    """Digest now."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fingerprint:
    """Return digests of every part that is equal on all ranks.

    The parts are the values that the model will show next; with a replicated optimizer, masters and optimizer state;
    anchors, if ranks send changes, and under outer steps these alone while replicas differ; and with a strategy that
    does not overlap, fixed tensors: frozen parameters and integer buffers. Answer: 64-bit digests by part, in the
    same order on all ranks. The digest is 0 for a fixed tensor that was written; such a part is not
    compared.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """Gather a record of every rank. Answer: `list[bytes]`, in the order of `Ranks`, equal on all ranks."""

    record: bytes
    """A record of the same length on every rank."""


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """Send a part from one rank to all; the ranks in `onto` replace their part. Both are indices into `Ranks`."""

    part: Part
    source: int
    onto: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Seal:
    """Keep checksums of values until the job changes them. A part that is already sealed keeps its checksum."""

    what: Sealable


@dataclasses.dataclass(frozen=True, slots=True)
class Inspect:
    """Compare sealed values with their checksums. Answer: the differences."""

    what: tuple[Sealable, ...] = ("state", "anchor", "reduced gradient")


@dataclasses.dataclass(frozen=True, slots=True)
class Mend:
    """Repair a sealed part in place from its checksum. Answer: whether it is bit-identical to the sealed values."""

    part: Part


@dataclasses.dataclass(frozen=True, slots=True)
class Replace:
    """Replace sealed parts that this rank cannot mend by the parts of a rank on which they are healthy.

    Answer: the source rank by part. Raises `StateCorrupt` if a part is damaged on every rank.
    """

    parts: tuple[Part, ...]
    """This rank's damaged parts; empty if there are none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Publish:
    """Write damaged values for the model again, from the masters of a replicated optimizer.

    Raises `StateCorrupt` if the result differs from its seal, and under a sharded strategy.
    """

    part: Part


@dataclasses.dataclass(frozen=True, slots=True)
class Clear:
    """Set a sealed part to zero, and seal it again."""

    part: Part


@dataclasses.dataclass(frozen=True, slots=True)
class Recompute:
    """Compute this rank's parts again, and compare.

    Values to be shown are compared with their seal, or with what the masters of a replicated optimizer publish.
    Answer: by part, whether it is the same; parts that cannot be computed again are missing.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Where:
    """Ask for rank and update. Answer: text at the start of messages."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    """Ask for the ranks that collective effects connect. Answer: their numbers in the job, in order."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Put an `Incident` into the next `Update`; see `stretto.records.Incident` for its fields.

    A report of one rank reaches every rank's `Update`. Equal reports of several ranks appear there once.
    """

    guard: str
    site: str
    part: str
    action: str
    ranks: tuple[int, ...] | None = None
    """The numbers of the ranks concerned; None means the rank that reports."""
    expected: str | None = None
    found: str | None = None


GuardEffect = (
    Fingerprint
    | Share
    | Copy
    | Seal
    | Inspect
    | Mend
    | Replace
    | Publish
    | Clear
    | Recompute
    | Where
    | Ranks
    | Report
)
GuardScript = Generator[GuardEffect, Any, None]


class RoundWatch:
    """A guard's work on the compute lane of one job; every method does nothing unless overridden."""

    needs_rounds: ClassVar[bool] = False
    """Whether it must run rounds again, so that micro-batches must use `DataParallel.micro_batch`."""

    def installed(self, values: Sequence[Tensor]) -> None:
        """The model's parameters have been given `values`, in the layout's order."""

    def begin_again(self) -> None:
        """The model has loaded a checkpoint's state."""

    def round_ends(self) -> Sequence[Incident]:
        """All micro-batches of a round are counted; called on all ranks. Return the incidents found."""
        return ()


class Guard(ABC):
    """A check that runs between updates, and the repair of the damage it finds.

    A subclass is a frozen dataclass of options with a generator, `after_update`, and others where needed. They run on
    the communication lane and yield the effects of `stretto.guards.contract`, which the lane performs and answers. A
    guard holds no state between calls and touches no tensor: the lane keeps what must be remembered (`Seal`).

    Note [One path]
        All ranks must ask for the same collective effects, in the same order. A guard may branch on its options, and on
        the answers to collective effects, which are the same on every rank. A branch on a local answer may contain only
        effects that are not collective.

    Note [When]
        at_start        before the first update, and whenever state has been loaded from a checkpoint;
        before_reduce   once per round, before its gradient is sent; and before state is saved;
        after_reduce    once per round, when the round's gradient has been summed;
        before_step     before every `Step` and every `Preview` reads the reduced gradient, masters and optimizer state;
        after_gather    whenever the values that the model will show have been gathered;
        before_land     before the arrival of a fragment with which ranks have stepped together; its values are anchors;
        after_update    once per update, after its last values have been published or gathered and before the model
                        shows them; also if the update had no weight and nothing was stepped;
        before_install  once per round, on the compute lane, right before the model shows what it brought. Ranks come
                        here at different times: effects that are not collective only.

        At each of these moments, guards run in the order in which the user gave them.
    """

    name: ClassVar[str]
    """Name on the command line, in tables and in `Incident.guard`."""
    overlaps: ClassVar[bool] = False
    """Whether the guard may run while the next update's gradients accumulate. A guard that must finish before values
    are shown sets False; its time is then exposed or hidden like its strategy's."""
    needs_replicas: ClassVar[bool] = False
    """Whether it compares ranks, so that it does not run while replicas may differ."""
    needs_equal_parameters: ClassVar[bool] = False
    """Whether all ranks must show the same parameters, so that it does not work with averages of replicas."""
    agrees_inside: ClassVar[bool] = False
    """Whether its round watch communicates with the other ranks of its node before it acts, if each holds a shard
    (`GuardedRounds.agree`): no rank can run a round again, or skip it, alone."""
    repairs_sent: ClassVar[bool] = False
    """Whether its round watch makes ranks sum gradients again that were sent before it found them wrong
    (`Accumulation.restart`), and before a reduction it looks only at the residual of the wire. Gradients may then
    leave during the backward pass."""

    def looks_before_sending(self, *, has_residual: bool) -> bool:
        """Return whether the guard must check a round before any of it is sent.

        Args:
            has_residual: Whether the wire has a residual (its rounding errors), which is sent with the gradients.
        """
        kind = type(self)
        looks = kind.before_reduce is not Guard.before_reduce or kind.watch_rounds is not Guard.watch_rounds
        return looks and (has_residual or not kind.repairs_sent)

    @abstractmethod
    def after_update(self) -> GuardScript:
        """Yield the effects at the end of an update."""

    def watch_rounds(self, rounds: Any) -> RoundWatch | None:
        """Return the guard's work on the compute lane of a job; None by default.

        Args:
            rounds: The job's `stretto.guards.replay.GuardedRounds`.
        """
        return None

    def at_start(self) -> GuardScript:
        """Yield the effects on the initial state of training; none by default.

        No values have been published yet, so `Fingerprint` and `Copy` are not allowed.
        """
        yield from ()

    def before_reduce(self) -> GuardScript:
        """Yield the effects before a gradient is sent; none by default."""
        yield from ()

    def after_reduce(self) -> GuardScript:
        """Yield the effects after a gradient has been summed; none by default."""
        yield from ()

    def before_step(self) -> GuardScript:
        """Yield the effects before gradient, masters and optimizer state are read; none by default."""
        yield from ()

    def after_gather(self) -> GuardScript:
        """Yield the effects after values have been gathered; none by default."""
        yield from ()

    def before_land(self) -> GuardScript:
        """Yield the effects before a fragment arrives; none by default."""
        yield from ()

    def before_install(self) -> GuardScript:
        """Yield the effects before the model shows a round's values; none by default."""
        yield from ()
