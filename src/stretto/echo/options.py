"""Everything about an echo that is not its plan."""

from dataclasses import dataclass
from typing import Literal

from stretto.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class EchoOptions:
    """Options of `EchoLoader`."""

    seed: int = 0
    """Of the plan's coins. Equal seeds echo at equal steps on all ranks; ranks may also have seeds of their own."""
    ahead: int = 2
    """Fresh batches read in the background while others are used. With 1 the loader stands still as soon as that one is
    there, and `Even(2.5)` over a loader 2.5 times as slow as a step would wait every second batch. 0 reads on the
    caller's thread, as the bare loader does: for loaders without workers that draw from the process's random state,
    which a thread would race for."""
    copy: Literal["containers", "tensors"] = "containers"
    """What each use gets new: containers costs microseconds and lets a loop pop keys; tensors is for loops that write
    in place, and for loaders that write into the batches they gave before."""
    steps_per_epoch: int | None = None
    """End an epoch after so many batches, on every rank alike: one whose data end sooner echoes what it has in hand.
    None ends with the data."""
    resume: Literal["refetch", "drop", "store"] = "refetch"
    """What becomes of batches in hand when a state is loaded: read again; left out; or kept in the state themselves,
    which is exact even for loaders that augment at random, and large."""
    keeps_decisions: bool = False
    """Keep the number of the batch used at each step, for `Replay`: 8 bytes per step, in the state too."""

    def __post_init__(self) -> None:
        if self.ahead < 0:
            raise ConfigError(f"ahead must be at least 0, found {self.ahead}")
        if self.steps_per_epoch is not None and self.steps_per_epoch < 1:
            raise ConfigError(f"steps_per_epoch must be at least 1, found {self.steps_per_epoch}")
