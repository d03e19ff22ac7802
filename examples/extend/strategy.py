"""A strategy of one's own: one file, and one line that registers it with the command line.

    python examples/extend/strategy.py train digits-resnet --strategy replicated-acco --guards replica

In a program nothing has to be registered: `stretto.DataParallel(model, optimizer, ReplicatedACCO(), micro_batches=4)`.
"""

import dataclasses

from stretto.strategies import STRATEGIES, Strategy
from stretto.strategies.contract import AllReduce, Preview, Script, Step
from stretto_lab.cli import main


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicatedACCO(Strategy):
    """ACCO whose optimizer is whole on every rank, so that a guard can compare the ranks.

        θ̃_{t+1} = peek(θ_t,  Σ g(θ̃_t; A) / w_A)                              shown while B travels
        θ_{t+1} = Opt(θ_t, [Σ g(θ̃_t; A) + Σ g(θ_t; B)] / (w_A + w_B))

    Staleness: none for B; A is taken at an estimate of the parameters it is applied to.
    Traffic per update: two all-reduces, hidden.
    Memory: that of ACCO on one rank, on every rank.
    Equals `ACCO`: to the bit on an fp32 wire without clipping, whose norm is summed in another order.
    """

    name = "replicated-acco"
    overlaps = True
    staleness = 0

    def update(self) -> Script:
        """Two rounds: estimate with A, commit with A and B."""
        at_estimate = yield AllReduce()
        yield Preview(at_estimate)
        at_committed = yield AllReduce()
        yield Step(at_estimate + at_committed)


STRATEGIES[ReplicatedACCO.name] = ReplicatedACCO  # the line of registration

if __name__ == "__main__":
    raise SystemExit(main())
