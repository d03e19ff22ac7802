"""The contract of a strategy: the effects it may ask for, and the coroutine that asks.

A strategy is a generator that yields effects; its caller answers each. `Reduce`, `AllReduce` and `Local` answer with
a `Gradient`, `Look` with a `Moment`, an `Average` with a probe with a `Divergence`, `Launch` with a boolean, the
others with None. See `docs/adding-a-strategy.md`.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any, ClassVar, Literal, Protocol

WorkerKind = Literal["rank", "node"]
"""Who steps one replica: a rank alone, or the ranks of a node together."""


class Gradient(Protocol):
    """A reduced gradient, held in shards by the ranks; all a strategy may do with it is add and pass it on."""

    def __add__(self, other: Any, /) -> "Gradient":
        """Return the sum of two reduced gradients; the parts must not be used alone afterwards."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Reduce:
    """Sum the next round's gradients over ranks; each rank keeps the shard it owns. Answer: a `Gradient`."""


@dataclasses.dataclass(frozen=True, slots=True)
class AllReduce:
    """Sum the next round's gradients over ranks; each rank keeps all of it. Answer: a `Gradient`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Local:
    """Take the next round's gradients of this worker alone; nothing is sent to others. Answer: a `Gradient`."""

    worker: WorkerKind = "rank"
    """Whose they are; those of a node are summed over its ranks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """Commit one optimizer step with the mean of `gradient` and publish the new parameters."""

    gradient: Gradient


@dataclasses.dataclass(frozen=True, slots=True)
class Preview:
    """Publish the parameters after one more step with the mean of `gradient`, without a change of state."""

    gradient: Gradient


@dataclasses.dataclass(frozen=True, slots=True)
class Gather:
    """Send every rank's published shard to all ranks; the model shows them when the round is complete."""


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """Ask where the job stands. Answer: a `Moment`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """Where the job stands after a step."""

    round_index: int
    """Rounds before this one."""
    gap: int
    """Rounds since the last average, this one included."""
    is_finishing: bool
    """Whether this rank's worker has no more data, and nothing in this round: then an average is due, because only
    averages let ranks agree on an end. After an `AllReduce`, whether all ranks submit only remaining rounds. All else
    here is the same on all ranks.
    """
    interval: int | None = None
    """What the script has last asked for by `Postpone`."""
    in_flight_rounds: int | None = None
    """Rounds since the fragment in flight was sent; None if none is in flight."""


@dataclasses.dataclass(frozen=True, slots=True)
class Average:
    """Replace every rank's replica by the mean of all, after `AllReduce`.

    Every rank has stepped with everything: replicas count alike, those that are not finite are skipped, and nothing
    is sent where all are equal. Answer: a `Divergence` where a probe is given, otherwise None.
    """

    state: bool = False
    """Average the optimizer's element-wise state too."""
    probe: int = 0
    """Coordinates at which ranks are compared; the same number at all averages of a strategy. 0 compares nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """How far replicas had come apart until an average; the same on all ranks. Replicas skipped are skipped here."""

    are_equal: bool
    """Whether all replicas were the same, to the bit."""
    distances: tuple[float, ...]
    """2-norm of what the average has changed, by replica: at the probe's coordinates, times √(d / p)."""
    gradient_norms: tuple[float, ...]
    """2-norm of the mean gradient of the replica's rank alone, in the last update; 0 where replicas are equal."""
    signal: float
    """Squared 2-norm of the mean gradient of all ranks without its noise, over the last updates
    (`stretto.averaging.probe`); an estimate, which may be below zero."""
    variance: float
    """Of the noise, per coordinate of the mean gradient, over the same updates."""

    @property
    def noise(self) -> float:
        """Standard deviation of the noise, per coordinate of the mean gradient."""
        return math.sqrt(self.variance)

    @property
    def mean_distance(self) -> float:
        """2-norm of what the average has changed, in the mean of replicas."""
        return sum(self.distances) / len(self.distances)

    @classmethod
    def none(cls) -> "Divergence":
        """Return the divergence of a lone replica: for code that reads a script without performing it."""
        return cls(are_equal=True, distances=(0.0,), gradient_norms=(0.0,), signal=0.0, variance=0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Postpone:
    """Remember after how many updates the next average is wanted: in every `Moment`, in records and checkpoints."""

    updates: int


@dataclasses.dataclass(frozen=True, slots=True)
class OuterStep:
    """How the anchor, which all ranks hold alike, steps towards the mean of their replicas."""

    learning_rate: float
    momentum: float
    nesterov: bool = True
    """Whether the step looks ahead along its new velocity."""


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """Let the parameters, or a fragment of them, leave for the mean of all replicas, or an outer step towards it.

    Only after `Local`, and one fragment at a time. Replicas are weighted by the contributions of their ranks since it
    was last sent; the ranks of a node that is one worker hold the same replica, which so has the weight of all of
    them. A fragment of an outer step is in flight during the next rounds, until its `Land`; a mean arrives in the
    same update.

    Ranks agree here on their end. So a rank that drains asks for the next launch, due or not, and waits for the others.
    If all drain, nothing leaves, and all replicas are replaced by their mean. Answer: whether the fragment left.
    """

    outer: OuterStep | None = None
    """The outer step; None takes the mean itself, of everything at once and without an anchor."""
    fragment: int = 0
    """Which one, from 0."""
    fragments: int = 1
    """Into how many the parameters are cut, for outer steps."""
    keeps_progress: bool = False
    """Whether its `Land` adds what this rank has changed since."""
    state: bool = False
    """Average the optimizer's element-wise state too; only with a mean."""


@dataclasses.dataclass(frozen=True, slots=True)
class Land:
    """Wait for the fragment that has left, and mix what it brings into this rank's replica."""

    mix: float = 0.0
    """Share of the replica that stays; the rest is the mean or the new anchor, with the kept share of the progress
    since.
    """
    delay: int = 0
    """Rounds for which the fragment has was sent on a rank that has data."""


@dataclasses.dataclass(frozen=True, slots=True)
class Begin:
    """The beginning of an update that may ask for more than gradients; the lane yields it, strategies do not."""


@dataclasses.dataclass(frozen=True, slots=True)
class Boundary:
    """The end of one committed update; the lane yields it, strategies do not."""


Effect = (
    Reduce
    | AllReduce
    | Local
    | Step
    | Preview
    | Gather
    | Look
    | Average
    | Postpone
    | Launch
    | Land
    | Begin
    | Boundary
)
ACCUMULATIONS = (Reduce, AllReduce, Local)
"""Effects that wait for the compute lane's gradients: each begins a round."""
Script = Generator[Effect, Any, None]


class Strategy(ABC):
    """How gradients become parameter updates.

    A subclass is a frozen dataclass of options with one generator, `update`, that performs exactly one
    committed update. It may branch on its options only, so that every rank takes the same path. The number
    of rounds, the traffic and the buffers follow from a dry run of the generator (`stretto.strategies.ledger`).
    """

    name: ClassVar[str]
    """The one spelling: file name, command-line word, row in the tables."""
    overlaps: ClassVar[bool]
    """Whether the exchange of one round runs during the gradients of the next."""
    staleness: ClassVar[int]
    """Committed updates between the parameters a gradient is taken at and those it is applied to."""

    @property
    def fixes_split(self) -> bool:
        """Whether the options fix how micro-batches are split over rounds, which a clock could not keep."""
        return False

    @abstractmethod
    def update(self) -> Script:
        """Yield the effects of one update, from its first `Reduce` to its last publication."""

    def quotas(self, micro_batches: int, rounds: int) -> tuple[int, ...]:
        """Split one update's micro-batches of a rank over the rounds, as evenly as integers allow.

        Args:
            micro_batches: Micro-batches per rank and update.
            rounds: Rounds per update.

        Returns:
            Micro-batches per round, at least one each when `micro_batches >= rounds`; later rounds are larger.
        """
        return tuple(
            (micro_batches * (i + 1)) // rounds - (micro_batches * i) // rounds for i in range(rounds)
        )
