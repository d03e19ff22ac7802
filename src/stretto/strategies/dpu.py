"""Delayed parameter update: the synchronous update, one round late."""

import dataclasses

from stretto.strategies.zero1 import ZeRO1


@dataclasses.dataclass(frozen=True, slots=True)
class DPU(ZeRO1):
    """The update of ZeRO-1, performed beside the next update's gradients.

        θ_{t+1} = Opt(θ_t, g(θ_{t-1}))

    Staleness: 1 update, uncompensated: with Adam it costs loss, and more at larger learning rates.
    Traffic per update: as ZeRO-1, hidden.
    Memory: as ZeRO-1 and a second gradient buffer.
    Equals synchronous when: never; the warning example.
    Source: Ren et al., "ZeRO-Offload"; Li et al., "Pipe-SGD".
    """

    name = "dpu"
    overlaps = True
    staleness = 1
