"""The delayed strategies: gradients computed at parameters one update old (DPU), or at a prediction (WP)."""

import dataclasses

from stretto.strategies.contract import Gather, Preview, Reduce, Script, Step, Strategy
from stretto.strategies.synchronous import ZeRO1


@dataclasses.dataclass(frozen=True, slots=True)
class DPU(ZeRO1):
    """The update of ZeRO-1, performed during the next update's gradients.

        θ_{t+1} = Opt(θ_t, g(θ_{t-1}))

    Staleness: 1 update, uncompensated: with Adam it costs loss, and more at larger learning rates.
    Traffic per update: as ZeRO-1, hidden.
    Memory: as ZeRO-1 and a second gradient buffer.
    Equals synchronous when: never; it is a baseline.
    Source: Ren et al., "ZeRO-Offload"; Li et al., "Pipe-SGD".
    """

    name = "dpu"
    overlaps = True
    staleness = 1


@dataclasses.dataclass(frozen=True, slots=True)
class WeightPrediction(Strategy):
    """Commit with the delayed gradient, and show the parameters after one more such step.

        θ_t     = Opt(θ_{t-1}, g_{t-1})            committed
        x_{t+1} = peek(θ_t, g_{t-1})               shown; g_{t+1} is taken here

    Staleness: 1 update, corrected to first order by the prediction.
    Traffic per update: as ZeRO-1, hidden; only the prediction is sent.
    Memory: as DPU.
    Equals synchronous when: approximately, while successive gradients are similar.
    Source: Chen et al., "SAPipe" (option 2); "WP" of Nabli et al., "ACCO", section 3.1.
    """

    name = "wp"
    overlaps = True
    staleness = 1

    def update(self) -> Script:
        """Step, then publish a prediction with the same gradient."""
        gradient = yield Reduce()
        yield Step(gradient)
        yield Preview(gradient)
        yield Gather()
