"""The synchronous strategies: replicated optimizer (DDP) and sharded optimizer (ZeRO-1)."""

import dataclasses

from stretto.strategies.contract import AllReduce, Gather, Reduce, Script, Step, Strategy


@dataclasses.dataclass(frozen=True, slots=True)
class DDP(Strategy):
    """Every rank reduces the whole gradient and steps the whole optimizer.

    Staleness: 0.
    Traffic per update: one all-reduce of the gradient; a part is hidden behind the last backward pass.
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


@dataclasses.dataclass(frozen=True, slots=True)
class ZeRO1(Strategy):
    """Every rank steps the shard it owns, then all gather the result.

    Staleness: 0.
    Traffic per update: one reduce-scatter of gradients, of which a part is hidden behind the last backward pass, and
    one all-gather of parameters, exposed.
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
