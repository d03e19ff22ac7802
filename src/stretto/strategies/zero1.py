"""Synchronous data parallelism with a sharded optimizer (ZeRO stage 1)."""

import dataclasses

from stretto.effects import Gather, Reduce, Script, Step
from stretto.strategies.strategy import Strategy


@dataclasses.dataclass(frozen=True, slots=True)
class ZeRO1(Strategy):
    """Every rank steps the shard it owns, then all gather the result.

    Staleness: 0.
    Traffic per update: one reduce-scatter of gradients and one all-gather of parameters, exposed.
    Memory: one gradient buffer; masters, state and reduced gradient cut by the number of ranks.
    Equals synchronous when: always.
    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
    """

    name = "zero1"
    overlaps = False
    staleness = 0

    def update(self) -> Script:
        """θ ← Opt(θ, Σg / Σw), shard by shard."""
        gradient = yield Reduce()
        yield Step(gradient)
        yield Gather()
