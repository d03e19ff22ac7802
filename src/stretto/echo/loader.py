"""`EchoLoader`: uses batches again while the next ones are on their way.

Telling a loader, and what it is made of, which epoch begins.

How many batches an epoch of a planned echo has: its decisions, made without the data.

`EchoLoader`: uses batches again while the next ones are on their way.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch

from stretto.echo.buffer import Hand, HeldBatch
from stretto.echo.plans import Chooser, Even, Held, Plan, Ready, Taken, least_used
from stretto.echo.reader import Fetched, Reader, open_reader
from stretto.echo.state import VERSION, EchoOptions, Pending, Position, check_state, restore_loader
from stretto.errors import ConfigError


def set_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch(epoch)` once on each of the loader, its samplers and its dataset that has it."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [
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


def epoch_length(chooser: Chooser, fresh: int, step: int) -> int:
    """Return the batches from `step` on, where an epoch of `fresh` fresh batches begins.

    Args:
        chooser: Of a planned kind, as it is at the beginning of the epoch; it is used up.
        fresh: Batches of the bare loader.
        step: Batches handed out before.
    """
    held: Held | None = None
    taken = 0
    length = 0
    while taken <= fresh:
        is_fresh = held is None or chooser.choose(step + length, [held], _never) is None
        if is_fresh:
            held = Held(number=taken)
            taken += 1
        if taken > fresh or held is None:
            break
        held.uses += 1
        chooser.took(
            Taken(step=step + length, is_fresh=is_fresh, load_seconds=math.nan, use_seconds=math.nan)
        )
        length += 1
    return length


def _never() -> bool:
    return False


Batch = TypeVar("Batch")


class EchoLoader(Generic[Batch]):
    """Hands out the batches of `loader`, some of them several times, as a plan says.

        for batch in parallel.feed(EchoLoader(loader, Even(2.5))):
            ...

    Every rank wraps its own loader and may decide for itself: each step takes exactly one batch, so collectives
    match whatever the ranks decide. Attributes that this class does not have are the loader's.

    An iterator begins a new pass over the loader, except after `load_state_dict`, where the first one goes on in the
    middle. What had been read ahead when a pass is left is dropped.

    Attributes:
        loader: The bare loader.
        plan: The plan.
        use_index: Of the batch handed out last: 1 for its first use; 0 before the first batch.
        wait_seconds: Time so far in which fresh batches were waited for, measured at the bare loader.
        load_seconds: Time so far that the bare loader took to deliver, in the background or not.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        plan: Plan | None = None,
        *,
        place: Callable[[Any], Batch] | None = None,
        transform: Callable[[Batch], Batch] | None = None,
        options: EchoOptions | None = None,
    ) -> None:
        """Wrap `loader`.

        Args:
            loader: This rank's training batches: any iterable. Not one for validation, whose batches count once.
            plan: When to echo; None is `Even(2)`.
            place: Applied once to every fresh batch, before it is kept: moving it to the device, so that echoes
                cost no transfer. With stored states it must bear being applied again.
            transform: Applied to every use, after the echo: random augmentation belongs here, so that it is fresh
                each time. Must not write into its argument, unless uses get tensors of their own.
            options: Everything else.

        Raises:
            ConfigError: The plan needs a reader in the background, and there is none.
        """
        self.loader = loader
        self.plan: Plan = Even() if plan is None else plan
        self.options = EchoOptions() if options is None else options
        if isinstance(self.plan, Ready) and self.options.ahead == 0:
            raise ConfigError(
                "Ready echoes while a batch is read in the background: expected ahead >= 1, found 0"
            )
        self.use_index = 0
        self.wait_seconds = 0.0
        self.load_seconds = 0.0
        self._place = place
        self._transform = transform
        self._position = Position()
        self._chooser = self.plan.chooser(self.options.seed)
        self._chooser_at_epoch = self._chooser.state_dict()
        self._hand = Hand(self.plan.pool, self.options.copy)
        self._after: Any = None
        self._pending: Pending | None = None
        self._loaded: dict[str, Any] | None = None
        self._reader: Reader | None = None
        self._decisions: list[int] = []

    @property
    def is_fresh(self) -> bool:
        """Whether the batch handed out last was new."""
        return self.use_index == 1

    @property
    def steps(self) -> int:
        """Batches handed out so far, over all epochs."""
        return self._position.step

    @property
    def fresh_batches(self) -> int:
        """Fresh batches handed out so far, over all epochs."""
        return self._position.fresh

    @property
    def decisions(self) -> tuple[int, ...]:
        """The number of the batch used at each step, where the options keep it: what `Replay` repeats."""
        return tuple(self._decisions)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":  # not made yet, as when it is being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """Return the batches of the epoch that is under way, or comes next: exact, echoes included.

        Raises:
            TypeError: The loader has no length, or the plan goes by time, and no `steps_per_epoch` says one.
        """
        if self.options.steps_per_epoch is not None:
            return self.options.steps_per_epoch
        if not self.plan.is_planned:
            raise TypeError(
                f"the length of an epoch under {type(self.plan).__name__} depends on time: set steps_per_epoch"
            )
        chooser = self.plan.chooser(self.options.seed)
        position = self._position
        chooser.load_state_dict(self._chooser_at_epoch if position.in_epoch else self._chooser.state_dict())
        fresh: Any = self.loader
        return epoch_length(chooser, len(fresh), position.epoch_step if position.in_epoch else position.step)

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        pending, self._pending, self._loaded = self._pending, None, None
        goes_on = pending is not None and self._position.in_epoch
        if not goes_on:
            self._position.begin_epoch()
            self._chooser_at_epoch = self._chooser.state_dict()
            self._hand.held = []
        iterator = iter(self.loader)
        self._after = pending.state if goes_on and pending is not None else self._capture()
        reader = self._reader = open_reader(iterator, self._capture, self.options.ahead)
        is_broken = False
        try:
            if goes_on and pending is not None:
                self._take_up(pending, reader)
            yield from self._epoch(reader)
        except (Exception, KeyboardInterrupt):
            is_broken = True  # the read under way may take long to return, if it ever does: say so at once
            raise
        finally:
            reader.close(waits=not is_broken)

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, its samplers and its dataset which epoch begins, each once where it wants to know."""
        set_epoch(self.loader, epoch)

    def close(self) -> None:
        """End the reader in the background; the next iterator starts another."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank stands, also in the middle of a batch's uses."""
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        held = self._hand.held
        has_begun = self._position.in_epoch or self._position.step > 0
        after = self._after if has_begun else self._capture()
        return {
            "version": VERSION,
            "seed": self.options.seed,
            "plan": type(self.plan).__name__,
            "position": self._position.state_dict(),
            "chooser": self._chooser.state_dict(),
            "chooser_at_epoch": self._chooser_at_epoch,
            "uses": [one.uses for one in held],
            "before": held[0].state_before if held else after,
            "after": after,
            "batches": [one.batch for one in held] if self.options.resume == "store" else None,
            "decisions": list(self._decisions) if self.options.keeps_decisions else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was called; the next iterator does, with the options' policy of resuming.

        Under a plan of another kind the counts go on and the plan begins anew.

        Raises:
            ConfigError: The state has another seed, or is not one of an `EchoLoader`.
        """
        check_state(state, self.options.seed)
        self.close()
        self._loaded = copy.deepcopy(state)
        self._position = Position.of(state["position"])
        self._chooser = self.plan.chooser(self.options.seed)
        self._chooser_at_epoch = self._chooser.state_dict()
        if state["plan"] == type(self.plan).__name__:
            self._chooser.load_state_dict(state["chooser"])
            self._chooser_at_epoch = state["chooser_at_epoch"]
        self._decisions = list(state["decisions"] or [])
        self._pending = restore_loader(self.loader, state, self.options.resume)

    def _capture(self) -> Any:
        """Return a copy of the loader's state, which the loader may go on to change; None where it has none."""
        loader: Any = self.loader
        return copy.deepcopy(loader.state_dict()) if hasattr(loader, "state_dict") else None

    def _epoch(self, reader: Reader) -> Iterator[Batch]:
        """Hand out batches until the data, or the steps of an epoch, have ended."""
        handed_out = math.nan
        while not self._has_enough():
            if self._chooser.is_measuring and torch.cuda.is_initialized():
                torch.cuda.synchronize()
            use_seconds = reader.now() - handed_out
            chosen = self._choose(reader)
            load_seconds = math.nan
            if chosen is None:
                fetched = self._take(reader)
                if not fetched.has_ended:
                    load_seconds = fetched.seconds
                    chosen = self._keep(fetched)
                elif self.options.steps_per_epoch is not None and self._hand.held:
                    chosen = least_used(self._hand.held)
                else:
                    break
            batch = self._use(chosen, load_seconds, use_seconds)
            handed_out = reader.now()
            yield batch
        self._hand.held = []
        self._position.in_epoch = False

    def _choose(self, reader: Reader) -> HeldBatch | None:
        """Ask the plan, except at the beginning of an epoch, which is a fresh batch."""
        if not self._hand.held:
            return None
        return self._chooser.choose(self._position.step, self._hand.held, reader.is_ready)

    def _has_enough(self) -> bool:
        limit = self.options.steps_per_epoch
        return limit is not None and self._position.step - self._position.epoch_step >= limit

    def _take(self, reader: Reader) -> Fetched:
        """Wait for what the loader gives next."""
        started = reader.now()
        fetched = reader.take()
        self.wait_seconds += reader.now() - started
        self.load_seconds += fetched.seconds
        if fetched.has_ended:
            self._after = fetched.state
        return fetched

    def _keep(self, fetched: Fetched, number: int | None = None, uses: int = 0) -> HeldBatch:
        """Take a fresh batch in hand."""
        batch = fetched.batch if self._place is None else self._place(fetched.batch)
        before, self._after = self._after, fetched.state
        if number is None:
            number = self._position.fresh
            self._position.fresh += 1
        return self._hand.add(batch, number, before, fetched.state, uses)

    def _use(self, held: HeldBatch, load_seconds: float, use_seconds: float) -> Batch:
        """Count a use before it is handed out: a state saved while the batch is in use has it."""
        step = self._position.step
        batch: Batch = self._hand.use(held, step)
        self.use_index = held.uses
        self._chooser.took(
            Taken(step=step, is_fresh=held.uses == 1, load_seconds=load_seconds, use_seconds=use_seconds)
        )
        self._position.step += 1
        if self.options.keeps_decisions:
            self._decisions.append(held.number)
        return batch if self._transform is None else self._transform(batch)

    def _take_up(self, pending: Pending, reader: Reader) -> None:
        """Read, and take in hand, what the saved run had read and in hand."""
        number = self._position.fresh - len(pending.uses)
        for _ in range(pending.skip):
            self._after = self._reread(reader).state
        for index, uses in enumerate(pending.uses):
            if pending.batches is None:
                fetched = self._reread(reader)
            else:
                fetched = Fetched(
                    batch=pending.batches[index], has_ended=False, seconds=0.0, state=self._after
                )
            self._keep(fetched, number + index, uses)

    def _reread(self, reader: Reader) -> Fetched:
        fetched = reader.take()
        if fetched.has_ended:
            raise ConfigError(
                "the data ended before the place where the saved run was: expected a loader that gives the same "
                "batches again"
            )
        return fetched
