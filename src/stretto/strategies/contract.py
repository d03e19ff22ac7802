"""The interface of a strategy: the effects that it may yield, and its coroutine.

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
"""The worker that steps one replica: a rank, or the ranks of a node together."""


class Gradient(Protocol):
    """A reduced gradient, held in shards by the ranks; a strategy may only add it and pass it on."""

    def __add__(self, other: Any, /) -> "Gradient":
        """Return the sum of two reduced gradients; the summands must not be used afterwards."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Reduce:
    """Sum the next round's gradients over ranks; each rank keeps its own shard. Answer: a `Gradient`."""


@dataclasses.dataclass(frozen=True, slots=True)
class AllReduce:
    """Sum the next round's gradients over ranks; each rank keeps the whole sum. Answer: a `Gradient`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Local:
    """Use only the gradients of this worker in the next round, without other workers. Answer: a `Gradient`."""

    worker: WorkerKind = "rank"
    """The worker; for "node" the gradients are summed over its ranks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """Commit one optimizer step with the mean of `gradient` and publish the new parameters."""

    gradient: Gradient


@dataclasses.dataclass(frozen=True, slots=True)
class Preview:
    """Publish the parameters after one more step with the mean of `gradient`, without changing the state."""

    gradient: Gradient


@dataclasses.dataclass(frozen=True, slots=True)
class Gather:
    """Send every rank's published shard to all ranks; the model shows them when the round is complete."""


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """Ask for the progress of the job. Answer: a `Moment`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """The progress of a job after a step."""

    round_index: int
    """Rounds before this one."""
    gap: int
    """Rounds since the last average, including this round."""
    is_finishing: bool
    """Whether this rank's worker has no more data, and nothing in this round: then an average is due, because ranks
    can agree on an end only at an average. After an `AllReduce`, whether all ranks submit only remaining rounds. All
    other fields are equal on all ranks."""
    interval: int | None = None
    """The last interval that the script requested by `Postpone`."""
    in_flight_rounds: int | None = None
    """Rounds since the fragment in flight was sent; None if none is in flight."""


@dataclasses.dataclass(frozen=True, slots=True)
class Average:
    """Replace every rank's replica by the mean of all replicas, after `AllReduce`.

    Every rank has stepped with the whole gradient, so all finite replicas count equally; if all are equal, nothing is
    sent. Answer: a `Divergence` if there is a probe, otherwise None.
    """

    state: bool = False
    """Average the optimizer's element-wise state too."""
    probe: int = 0
    """Number of coordinates at which ranks are compared, the same at all averages of a strategy; 0 compares none."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """Distances between replicas before an average; equal on all ranks. Skipped replicas are not included."""

    are_equal: bool
    """Whether all replicas were bit-identical."""
    distances: tuple[float, ...]
    """By replica: 2-norm of the change by the average, at the probe's coordinates, times √(d / p)."""
    gradient_norms: tuple[float, ...]
    """By replica: 2-norm of the rank's own mean gradient in the last update; 0 if replicas are equal."""
    signal: float
    """Squared 2-norm of all ranks' mean gradient without its noise, over the last updates
    (`stretto.averaging.probe`); the estimate may be below zero."""
    variance: float
    """Variance of the noise, per coordinate of the mean gradient, over the same updates."""

    @property
    def noise(self) -> float:
        """Standard deviation of the noise, per coordinate of the mean gradient."""
        return math.sqrt(self.variance)

    @property
    def mean_distance(self) -> float:
        """Mean over replicas of the 2-norm of the change by the average."""
        return sum(self.distances) / len(self.distances)

    @classmethod
    def none(cls) -> "Divergence":
        """Return the divergence of a single replica, for code that reads a script without performing it."""
        return cls(are_equal=True, distances=(0.0,), gradient_norms=(0.0,), signal=0.0, variance=0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Postpone:
    """Set the number of updates until the next average; every `Moment`, records and checkpoints contain it."""

    updates: int


@dataclasses.dataclass(frozen=True, slots=True)
class OuterStep:
    """A step of the anchor, which all ranks hold, towards the mean of their replicas."""

    learning_rate: float
    momentum: float
    nesterov: bool = True
    """Whether the step looks ahead along its new velocity."""


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """Start sending the parameters, or a fragment of them, for the mean of all replicas or an outer step towards it.

    It is allowed only after `Local`, for one fragment at a time. Replicas are weighted by their ranks' contributions
    since the fragment was last sent; if a node is one worker, its replica has the weight of all its ranks. A fragment
    of an outer step is in flight during the next rounds, until its `Land`; a mean arrives in the same update.

    Ranks agree on the end of training here. So a rank without more data requests the next launch, due or not, and waits
    for the others. If no rank has more data, nothing is sent, and all replicas are replaced by their mean. Answer:
    whether the fragment was sent.
    """

    outer: OuterStep | None = None
    """The outer step; None uses the mean itself, of all parameters at once and without an anchor."""
    fragment: int = 0
    """Index of the fragment, from 0."""
    fragments: int = 1
    """Number of fragments into which outer steps cut the parameters."""
    keeps_progress: bool = False
    """Whether its `Land` adds this rank's changes since the launch."""
    state: bool = False
    """Whether to average the optimizer's element-wise state too; only with a mean."""


@dataclasses.dataclass(frozen=True, slots=True)
class Land:
    """Wait for the fragment in flight, and mix the result into this rank's replica."""

    mix: float = 0.0
    """Share of the replica that is kept; the rest is the mean or the new anchor, plus progress since the launch if
    it is kept."""
    delay: int = 0
    """Number of rounds for which the fragment was in flight, on a rank that has data."""


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
"""Effects that wait for the compute lane's gradients; each starts a round."""
Script = Generator[Effect, Any, None]


class Strategy(ABC):
    """How gradients become parameter updates.

    A subclass is a frozen dataclass of options with one generator, `update`, that performs exactly one committed
    update. It may branch only on its options, so that every rank takes the same path. The number of rounds, the traffic
    and the buffers follow from a dry run of the generator (`stretto.strategies.ledger`).
    """

    name: ClassVar[str]
    """The strategy's name: of its file, on the command line, and in tables."""
    overlaps: ClassVar[bool]
    """Whether the exchange of one round overlaps the gradients of the next."""
    staleness: ClassVar[int]
    """Number of updates committed between the computation of a gradient and its application."""

    @property
    def fixes_split(self) -> bool:
        """Whether the options fix how micro-batches are split over rounds, which excludes a clock."""
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
