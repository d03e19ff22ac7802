"""SAPipe's first and third way of looking ahead: one file, and one line that registers it with the command line.

    python examples/extend/sapipe.py train digits-resnet --strategy sapipe
    python examples/extend/sapipe.py train digits-resnet --strategy sapipe:mixed=on

The second way, with the last reduced gradient, is the library's `wp`.
"""

import dataclasses

from stretto.fields import check_fields
from stretto.strategies import STRATEGIES, Strategy
from stretto.strategies.contract import AllReduce, PreviewOwn, Script, Step
from stretto_lab.cli import main


@dataclasses.dataclass(frozen=True, slots=True)
class SAPipe(Strategy):
    """A delayed update whose gradients are taken where the rank's own last gradient leads.

        θ_t       = Opt(θ_{t-1}, ḡ_{t-1})                                                committed
        x_{t+1,r} = peek(θ_t, g_{t,r})                                                   shown; option 1
        x_{t+1,r} = peek(θ_t, (W ḡ_{t-1} - w g_{t-1,r} + w g_{t,r}) / W)                 shown; option 3, `mixed`

    ḡ is the mean over ranks, g_r the gradient of rank r, w its weight and W that of all; where counts change, W counts
    the new w.

    Staleness: 1 update, predicted away as far as a rank's own gradient tells.
    Traffic per update: one all-reduce of the gradient, hidden. The estimate is made where both are there, and exposed:
    one optimizer step over all parameters.
    Memory: the optimizer is whole on every rank, because an estimate needs its state for all parameters; two gradient
    buffers, and for `mixed` 4 bytes per parameter more.
    Equals synchronous when: there is one rank, from the third update on.
    Source: Chen et al., "SAPipe: Staleness-Aware Pipeline for Data-Parallel DNN Training", options 1 and 3 without
    delay compensation; all layers are delayed.
    """

    mixed: bool = False
    """Put the new gradient into the last reduced one in place of this rank's old one; otherwise it leads alone."""

    name = "sapipe"
    overlaps = True
    staleness = 1

    def __post_init__(self) -> None:
        check_fields(self)

    def update(self) -> Script:
        """One round, performed beside the next update's gradients, which lead on at its landing."""
        gradient = yield AllReduce()
        yield PreviewOwn(gradient, self.mixed)
        yield Step(gradient)


STRATEGIES[SAPipe.name] = SAPipe  # the line of registration

if __name__ == "__main__":
    raise SystemExit(main())
