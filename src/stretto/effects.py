"""All that a strategy may ask for.

A strategy is a generator that yields effects; whoever runs it answers each. `Reduce`, `AllReduce` and `Local`
answer with a `Gradient`, `Look` with a `Moment`, the others with None. See `docs/adding-a-strategy.md`.
"""

import dataclasses
from collections.abc import Generator
from typing import Any, Protocol


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
    """Take the next round's gradients of this rank alone; nothing is sent. Answer: a `Gradient`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """Commit one optimizer step with the mean of `gradient` and publish the new parameters."""

    gradient: Gradient


@dataclasses.dataclass(frozen=True, slots=True)
class Preview:
    """Publish what one more step with the mean of `gradient` would give; no state changes."""

    gradient: Gradient


@dataclasses.dataclass(frozen=True, slots=True)
class Gather:
    """Send every rank's published shard to all ranks; shown at the next landing."""


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
    drains: bool
    """Whether this rank only hands over what is left: an average is due then, whatever the plan, because only
    averages let ranks agree on an end. All else here is the same on all ranks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Average:
    """Replace every rank's replica by the mean of all, weighted by what ranks have contributed since the last time."""

    state: bool = False
    """Average the optimizer's element-wise state too."""


@dataclasses.dataclass(frozen=True, slots=True)
class Boundary:
    """The end of one committed update; the job loop yields it, strategies do not."""


Effect = Reduce | AllReduce | Local | Step | Preview | Gather | Look | Average | Boundary
Script = Generator[Effect, Any, None]
