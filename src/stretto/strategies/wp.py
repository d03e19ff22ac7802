"""Weight prediction: a delayed update whose gradients are taken at a guess of the next parameters."""

import dataclasses

from stretto.effects import Gather, Preview, Reduce, Script, Step
from stretto.strategies.strategy import Strategy


@dataclasses.dataclass(frozen=True, slots=True)
class WeightPrediction(Strategy):
    """Commit with the delayed gradient, and show what one more such step would give.

        θ_t     = Opt(θ_{t-1}, g_{t-1})            committed
        x_{t+1} = peek(θ_t, g_{t-1})               shown; g_{t+1} is taken here

    Staleness: 1 update, predicted away to first order.
    Traffic per update: as ZeRO-1, hidden; only the prediction is sent.
    Memory: as DPU.
    Equals synchronous when: approximately, while successive gradients are alike.
    Source: Chen et al., "SAPipe" (option 2); the "ACCO-WP" ablation of Nabli et al., "ACCO".
    """

    name = "wp"
    overlaps = True
    staleness = 1

    def update(self) -> Script:
        """Step, then peek once more with the same gradient."""
        gradient = yield Reduce()
        yield Step(gradient)
        yield Preview(gradient)
        yield Gather()
