"""The options of an echoed loader, its position, and the state it is resumed from.

Everything about an echo that is not its plan.

Where an echoed loader stands: what a state holds beside the batches in hand.

The state of an echoed loader, and how it is taken up again.

version, seed, plan      what must fit
position, chooser        the counts and what the plan remembers
uses                     of each batch in hand, oldest first
before, after            states of the bare loader: before the oldest batch in hand, after the newest
batches                  those in hand, where the policy is to store them
decisions                numbers of the batches used so far, where they are kept
"""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

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


@dataclass(kw_only=True, slots=True)
class Position:
    """Counts on one rank."""

    step: int = 0
    """Batches handed out."""
    fresh: int = 0
    """Fresh ones among them."""
    epoch_step: int = 0
    """Batches handed out before the epoch."""
    epoch_fresh: int = 0
    """Fresh ones before the epoch."""
    in_epoch: bool = False
    """Whether an epoch is under way."""

    def begin_epoch(self) -> None:
        """Begin an epoch here."""
        self.epoch_step, self.epoch_fresh, self.in_epoch = self.step, self.fresh, True

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        return asdict(self)

    @classmethod
    def of(cls, state: dict[str, Any]) -> Self:
        """Return the position that `state_dict` described."""
        return cls(**state)


VERSION = 1


@dataclass(kw_only=True, slots=True)
class Pending:
    """What the next iterator does before it hands out anything."""

    skip: int = 0
    """Fresh batches to read and forget."""
    uses: tuple[int, ...] = ()
    """Uses of the batches to take in hand again."""
    batches: Sequence[Any] | None = None
    """Those batches themselves; None reads them again."""
    state: Any = None
    """The loader's state as it is then."""


def check_state(state: dict[str, Any], seed: int) -> None:
    """Raise ConfigError unless the state can be taken up."""
    if state.get("version") != VERSION:
        raise ConfigError(
            f"expected the state of an EchoLoader of version {VERSION}, found version {state.get('version')}"
        )
    if state["seed"] != seed:
        raise ConfigError(f"the state was saved with the echo seed {state['seed']}, here it is {seed}")


def restore_loader(
    loader: Any, state: dict[str, Any], resume: Literal["refetch", "drop", "store"]
) -> Pending:
    """Put the bare loader where `state` says, and return what is left to do.

    Raises:
        ConfigError: Batches should have been stored, and were not.
    """
    position = state["position"]
    uses: tuple[int, ...] = tuple(state["uses"]) if resume != "drop" else ()
    batches = None
    if resume == "store" and uses:
        batches = state.get("batches")
        if batches is None:
            raise ConfigError(
                "resume='store', but the state holds no batches: it was saved with another policy"
            )
    rereads = bool(uses) and batches is None
    saved = state["before"] if rereads else state["after"]
    if saved is not None and hasattr(loader, "load_state_dict"):
        loader.load_state_dict(saved)
        return Pending(uses=uses, batches=batches, state=saved)
    skip = position["fresh"] - position["epoch_fresh"] if position["in_epoch"] else 0
    if rereads:
        skip -= len(uses)
    if skip > 0:
        warnings.warn(
            f"{type(loader).__name__} has no state_dict: to continue, {skip} batches are read and thrown away",
            RuntimeWarning,
            stacklevel=3,
        )
    return Pending(skip=max(0, skip), uses=uses, batches=batches)
