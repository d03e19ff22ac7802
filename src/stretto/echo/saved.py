"""The state of an echoed loader, and how it is taken up again.

version, seed, plan      what must fit
position, chooser        the counts and what the plan remembers
uses                     of each batch in hand, oldest first
before, after            states of the bare loader: before the oldest batch in hand, after the newest
batches                  those in hand, where the policy is to store them
decisions                numbers of the batches used so far, where they are kept
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stretto.errors import ConfigError

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
