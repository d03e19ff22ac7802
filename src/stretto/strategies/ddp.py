"""Synchronous data parallelism with a replicated optimizer."""

import dataclasses

from stretto.effects import AllReduce, Script, Step
from stretto.strategies.strategy import Strategy


@dataclasses.dataclass(frozen=True, slots=True)
class DDP(Strategy):
    """Every rank reduces the whole gradient and steps the whole optimizer.

    Staleness: 0.
    Traffic per update: one all-reduce of the gradient, exposed.
    Memory: one gradient buffer; masters, state and reduced gradient whole on every rank.
    Equals synchronous when: always.
    """

    name = "ddp"
    overlaps = False
    staleness = 0

    def update(self) -> Script:
        """θ ← Opt(θ, Σg / Σw) on every rank."""
        gradient = yield AllReduce()
        yield Step(gradient)
