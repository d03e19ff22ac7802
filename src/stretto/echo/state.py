"""The options of an echoed loader, and its saved state.

A saved state (`EchoLoader.state_dict`) is a mapping:

    version, seed, plan              what must fit
    position                         the counts of `Position`
    selector, selector_at_epoch      what the plan remembers, now and at the beginning of the epoch
    held                             of each held batch, oldest first: uses, last update, and the parameters it has met
    before, after                    states of the bare loader before the oldest held batch, and after the newest
"""

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stretto.errors import ConfigError
from stretto.fields import check_at_least, check_fields, shown

VERSION = 3
"""Version of this format."""

Resume = Literal["refetch", "drop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EchoOptions:
    """Options of `EchoLoader` in addition to its plan."""

    seed: int = 0
    """Seed of the plan's random draws. With equal seeds all ranks echo at the same updates; seeds may also differ."""
    micro_batches: int | None = None
    """Micro-batches per update, for loops without `feed`, such as `gradient_accumulation_steps` of a Trainer. None
    is 1. `feed` uses its job's number, and refuses another."""
    ahead: int = 2
    """Number of fresh batches to read in the background while others are used, and one more for every further
    micro-batch of an update. With 1 the loader stands still as soon as these are ready: `Even(2.5)` over a loader 2.5
    times as slow as a step would wait at every second update. With 0 batches are read on the caller's thread, as the
    bare loader does. Choose it for loaders without workers that draw random numbers, which a warning names: they share
    the process's generators with the model, and a thread would change the order of the draws from run to run."""
    resume: Resume = "refetch"
    """What happens to held batches when a state is loaded. "refetch" reads them again, which is exact unless the
    loader augments at random; "drop" drops them with their remaining uses."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, ahead=0, micro_batches=1)


@dataclass(kw_only=True, slots=True)
class Position:
    """The position of one rank's loader."""

    step: int = 0
    """Number of returned batches, over all epochs."""
    fresh: int = 0
    """Fresh batches among them."""
    updates: int = 0
    """Updates begun, over all epochs."""
    mixed: int = 0
    """Number of these updates with some fresh and some held batches."""
    epoch_step: int = 0
    """Batches given out before this epoch."""
    epoch_fresh: int = 0
    """Number of fresh batches returned before this epoch."""
    epoch_updates: int = 0
    """Updates begun before this epoch."""
    in_epoch: bool = False
    """Whether an epoch is in progress."""
    slot: int = 0
    """Batches that the update in progress has used."""
    fresh_slots: int = 0
    """Number of fresh batches among these."""
    slots_before: int = 0
    """Number of batches that the previous update used."""
    repeats: bool = False
    """Whether the update in progress repeats the batches of the previous one."""

    @property
    def update(self) -> int:
        """Updates begun before the one in progress."""
        return self.updates - 1

    def begin_epoch(self) -> None:
        """Begin an epoch here; with it an update begins."""
        self.epoch_step, self.epoch_fresh, self.epoch_updates = self.step, self.fresh, self.updates
        self.in_epoch = True
        self.slot = 0

    def end_epoch(self) -> None:
        """End the epoch. An update without a batch did not begin."""
        self.updates -= self.slot == 0 and self.updates > self.epoch_updates
        self.in_epoch = False

    def begin_update(self) -> None:
        """Begin an update with the next batch."""
        self.updates += 1
        self.slots_before, self.slot, self.fresh_slots = self.slot, 0, 0

    def repeat(self, repeats: bool) -> None:
        """Set whether the update in progress repeats the batches of the previous update."""
        self.repeats = repeats

    def count(self, is_fresh: bool) -> None:
        """Count a returned batch."""
        was_mixed = 0 < self.fresh_slots < self.slot
        self.step += 1
        self.slot += 1
        self.fresh += is_fresh
        self.fresh_slots += is_fresh
        self.mixed += not was_mixed and 0 < self.fresh_slots < self.slot


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """The work of the first iterator after `load_state_dict` before it returns a batch."""

    skip: int
    """Number of fresh batches to read and drop."""
    held: Sequence[dict[str, Any]]
    """Uses so far of the batches to hold again, oldest first: fields of `HeldBatch`."""
    state: Any
    """State of the bare loader at this place, if it has one."""


def check_state(state: object, seed: int) -> None:
    """Raise ConfigError unless `state` has this version and `seed`."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"expected the state of an EchoLoader, found {shown(state)}")
    version = state.get("version")
    if not isinstance(version, int) or version != VERSION:
        raise ConfigError(
            f"expected the state of an EchoLoader of version {VERSION}, found version {shown(version)}"
        )
    if not isinstance(state.get("seed"), int) or state["seed"] != seed:
        raise ConfigError(
            f"the state was saved with EchoOptions(seed={shown(state.get('seed'))}), but here the seed is {seed}"
        )


def restore_loader(loader: Any, state: dict[str, Any], resume: Resume) -> Resumption:
    """Load its part of `state` into the bare loader, and return the remaining work.

    Warns:
        RuntimeWarning: The loader has no `load_state_dict`; batches have to be read and thrown away.
    """
    position = Position(**state["position"])
    held: Sequence[dict[str, Any]] = () if resume == "drop" else state["held"]
    loader_state = state["before"] if held else state["after"]
    if loader_state is not None and hasattr(loader, "load_state_dict"):
        loader.load_state_dict(loader_state)
        if _begins_where_loaded(loader):
            loader.set_epoch(
                loader_state["epoch"]
            )  # a state of another epoch would be passed over in silence
        return Resumption(skip=0, held=held, state=loader_state)
    begin_at_start(loader)
    skip = position.fresh - position.epoch_fresh if position.in_epoch else 0
    skip = max(0, skip - len(held))
    if skip > 0:
        warnings.warn(
            f"{type(loader).__name__} has no state_dict: to resume, Stretto reads {skip} batches and drops them",
            RuntimeWarning,
            stacklevel=3,
        )
    return Resumption(skip=skip, held=held, state=None)


def left(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a loader after the end of the pass in which `state` was saved."""
    position = {**state["position"], "in_epoch": False}
    return {**state, "position": position, "held": [], "before": state["after"]}


def state_of(loader: Any) -> Any:
    """Return a copy of the loader's state, which it may continue to change; None if it has none."""
    return copy.deepcopy(loader.state_dict()) if hasattr(loader, "state_dict") else None


def state_at_start(loader: Any) -> Any:
    """Return the loader's state before the first batch of a pass; None if every pass begins at the start without it.

    A streaming data set of Hugging Face keeps the state of the previous pass until its first batch is read.
    """
    return None if _begins_where_loaded(loader) else state_of(loader)


def begin_at_start(loader: Any) -> None:
    """Let the next pass start with the first batch.

    A streaming data set of Hugging Face begins every pass where a state was loaded once, until user code sets another
    epoch.
    """
    streams: list[Any] = [loader, getattr(loader, "dataset", None)]
    for stream in streams:
        if _begins_where_loaded(stream):
            stream._starting_state_dict = None


def set_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch(epoch)` on a loader, its samplers and its dataset, once on each that has it."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts: list[Any] = [
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "dataset", None),
    ]
    told: list[Any] = []
    for part in parts:
        if hasattr(part, "set_epoch") and not any(part is other for other in told):
            part.set_epoch(epoch)
            told.append(part)


def _begins_where_loaded(loader: object) -> bool:
    """Return whether `loader` is a streaming data set of Hugging Face, which need not be installed."""
    return hasattr(loader, "_starting_state_dict")
