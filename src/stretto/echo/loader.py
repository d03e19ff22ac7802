"""`EchoLoader`: yields the batches of a loader, some of them several times, while the next batches are read.

At every step

    1. where an update begins, the plan's selector decides: its batches are fresh, or those of the update before;
    2. a fresh batch is taken from the reader, placed, and put into the buffer;
    3. the use is counted, and the batch is given out through `transform`.

A held batch is used again only if its gradient can be new: in another update, and at parameters at which it was not
used. Otherwise a fresh batch is used. Each step yields exactly one batch, so ranks may decide differently, and their
collectives still match.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch

from stretto.echo.buffer import EchoBuffer, HeldBatch, copied, rebuilt
from stretto.echo.draws import DrawWatch
from stretto.echo.plans import Plan, Ready, StepRecord, check_plan, epoch_length
from stretto.echo.reader import CLOSED, Fetched, Reader, open_reader
from stretto.echo.state import (
    VERSION,
    EchoOptions,
    Position,
    Resumption,
    begin_at_start,
    check_state,
    restore_loader,
    set_epoch,
    state_at_start,
    state_of,
)
from stretto.echo.updates import CountedUpdates, Updates
from stretto.errors import ConfigError, OutOfTurn

Batch = TypeVar("Batch")
_unfed: weakref.WeakSet[Any] = weakref.WeakSet()
"""Loaders with a pass in progress that `feed` did not start; nothing else connects them to the job that they train."""


def check_unfed(micro_batches: int | None, where: object) -> None:
    """Raise if a loop without `feed` counts an echo's updates differently from its job.

    Args:
        micro_batches: Micro-batches in an update of the job; None if the number varies.
        where: The place, for messages.

    Raises:
        ConfigError: The numbers differ; the message gives the correct setting.
    """
    told = {loader.options.micro_batches or 1 for loader in _unfed}
    if told and micro_batches not in told:
        way = (
            ""
            if micro_batches is None
            else f", or EchoLoader(options=EchoOptions(micro_batches={micro_batches}))"
        )
        raise ConfigError(
            f"{where}: outside feed, an EchoLoader takes {min(told)} batch{'es' * (min(told) > 1)} for an "
            f"update, which has {micro_batches or 'an unknown number'} here, so an echo would repeat the same "
            f"gradients: expected `for batch in parallel.feed(loader)`{way}"
        )


def check_iterable(loader: object, call: str) -> None:
    """Raise unless a loader can be iterated.

    Raises:
        ConfigError: It cannot; the message names the call that received it.
    """
    is_iterable = hasattr(type(loader), "__iter__") or hasattr(type(loader), "__getitem__")
    if not is_iterable or getattr(loader, "shape", None) == ():  # a tensor of one number says that it can
        raise ConfigError(
            f"{call}({type(loader).__name__}): expected an iterable of batches; if this is a function, pass its result"
        )


class EchoLoader(Generic[Batch]):
    """Yields the batches of `loader`, some of them several times, by a plan.

        for batch in parallel.feed(EchoLoader(loader, Even(2.5))):
            ...

    Every rank wraps its own loader. Other attributes come from the loader.

    A new iterator begins a new pass over the loader, and ends the pass before it. The first iterator after
    `load_state_dict` continues in the middle. If a pass ends early, batches that were read ahead are dropped.

    Attributes:
        loader: The bare loader.
        plan: When to echo.
        options: The other options.
        use_index: Which use of its batch the last step was: 1 for the first; 0 before the first step.
        batch_index: Which batch the last step used: fresh batches that this rank was given before it; -1 at first.
        wait_seconds: Total time in which fresh batches were waited for.
        load_seconds: Total time that the bare loader took to give them, in the background or not.
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
            loader: This rank's training batches: any iterable. Do not echo a validation, whose batches must count
                once.
            plan: When to echo; None is `Ready()`, which never echoes a loader that is fast enough.
            place: Called once with every fresh batch, before it is held. Copy to the device here, so that echoes cost
                no transfer. It must return new tensors for every batch.
            transform: Called at every use, with the held batch. Apply random augmentation here, so that it differs
                between uses. It must not write into its argument.
            options: The other options; None for the defaults.

        Raises:
            ConfigError: An argument has the wrong type, or the plan is `Ready` and nothing is read in the background.
        """
        check_iterable(loader, "EchoLoader")
        self.loader = loader
        self.plan: Plan = Ready() if plan is None else plan
        self.options = EchoOptions() if options is None else options
        check_plan(self.plan)
        if not isinstance(self.options, EchoOptions):
            raise ConfigError(f"EchoLoader(options={options!r}): expected EchoOptions(...)")
        for name, function in (("place", place), ("transform", transform)):
            if function is not None and not callable(function):
                raise ConfigError(f"EchoLoader({name}={function!r}): expected a function of a batch, or None")
        if isinstance(self.plan, Ready) and self.options.ahead == 0:
            raise ConfigError(
                "EchoOptions(ahead=0): Ready echoes while a batch is read in the background: expected ahead >= 1, or "
                "another plan"
            )
        self.use_index = 0
        self.batch_index = -1
        self.wait_seconds = self.load_seconds = 0.0
        self._place = place
        self._transform = transform
        self._position = Position()
        self._selector = self.plan.selector(self.options.seed)
        self._selector_at_epoch = self._selector.state_dict()
        self._buffer = EchoBuffer()
        self._micro_batches: int | None = self.options.micro_batches or 1
        """Micro-batches in every update of the newest pass; None if the number varies."""
        self._reader: Reader | None = None
        """The reader of the newest pass, even after its end: its last read may still be in progress."""
        self._draws = DrawWatch()
        self._asked: Fetched | None = None
        """The loader's answer to the question whether it has more; the next fresh batch."""
        self._state_after: Any = None
        """State of the bare loader after the newest batch from the reader."""
        self._resumption: Resumption | None = None
        """Remaining work after a load, until the next iterator begins; and the loaded state."""
        self._loaded_state: dict[str, Any] | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether the last step was the first use of its batch."""
        return self.use_index == 1

    @property
    def steps(self) -> int:
        """Number of batches returned so far, over all epochs."""
        return self._position.step

    @property
    def fresh_batches(self) -> int:
        """Number of fresh batches returned so far, over all epochs."""
        return self._position.fresh

    @property
    def updates(self) -> int:
        """Number of updates begun so far, over all epochs."""
        return self._position.updates

    @property
    def mixed_updates(self) -> int:
        """Number of these updates with some fresh and some held batches."""
        return self._position.mixed

    def __getstate__(self) -> dict[str, Any]:
        """Omit the reader from copies: a copy has the position of this loader, and begins its own pass."""
        return {**vars(self), "_reader": None, "_asked": None}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":  # `loader` is missing while a copy is being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """Return the number of batches in this epoch, or between epochs in the next one, including echoes.

        It is exact where every update changes the parameters; otherwise there are fewer.

        Raises:
            TypeError: The plan depends on time, the updates have unequal numbers of micro-batches, or the loader has
                no length.
        """
        if not self.plan.is_predictable or self._micro_batches is None:
            raise TypeError(
                f"the length of an epoch under {type(self.plan).__name__} is not known beforehand"
            )
        position, selector = self._position, self.plan.selector(self.options.seed)
        begun, loader = position.in_epoch, cast(Any, self.loader)
        selector.load_state_dict(self._selector_at_epoch if begun else self._selector.state_dict())
        update = position.epoch_updates if begun else position.updates
        return epoch_length(selector, len(loader), update, self._micro_batches)

    def __iter__(self) -> Iterator[Batch]:
        passing = self.over(CountedUpdates(self.options.micro_batches or 1))
        try:
            _unfed.add(self)
            yield from passing
        finally:
            _unfed.discard(self)

    def over(self, updates: Updates) -> Iterator[Batch]:
        """Return an iterator over a pass whose batches are for `updates`; `feed` calls this.

        Raises:
            ConfigError: `EchoOptions(micro_batches=...)` has another number.
        """
        told = self.options.micro_batches
        if told is not None and updates.is_fixed and told != updates.micro_batches:
            raise ConfigError(
                f"EchoOptions(micro_batches={told}): expected the {updates.micro_batches} of the job, or None"
            )
        self._micro_batches = updates.micro_batches if updates.is_fixed else None
        _unfed.discard(self)  # an iterator of before may be kept
        return self._pass(updates)

    def _pass(self, updates: Updates) -> Iterator[Batch]:
        self._leave()
        resumption = self._resumption if self._position.in_epoch else None
        self._resumption = self._loaded_state = None
        if resumption is None:
            if self._position.step:  # before the first pass, the place in the data is the caller's
                begin_at_start(self.loader)
            self._position.begin_epoch()
            self._selector_at_epoch = self._selector.state_dict()
        iterator = iter(self.loader)
        self._state_after = state_at_start(self.loader) if resumption is None else resumption.state
        self._draws.begin()
        ahead = self.options.ahead and self.options.ahead + updates.micro_batches - 1
        reader = self._reader = open_reader(iterator, partial(state_of, self.loader), ahead)
        del iterator  # the reader's alone: the bare loader's workers end with it
        try:
            if resumption is not None:
                self._resume(resumption, reader)
            yield from self._epoch(reader, updates)
        finally:
            reader.close()

    def has_more(self, ends_update: bool) -> bool:
        """Return whether the pass may have another batch, which is not chosen yet: it depends on future parameters.

        It may wait for the loader. Only False is certain.

        Args:
            ends_update: Whether the last returned batch is the last one of its update.
        """
        if self._reader is None or not self._ask(self._reader).has_ended:
            return self._reader is not None
        # Within an update it is early enough to learn of the end with the next batch.
        return not ends_update or self._repeats(self._position.update + 1, self._buffer.held, self._reader)

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch(epoch)` on the loader, its samplers and its dataset, once on each that has it."""
        set_epoch(self.loader, epoch)

    def close(self) -> None:
        """End the pass in progress without waiting for the loader. The next iterator starts another pass."""
        if self._reader is not None:
            self._reader.close()

    def _leave(self) -> None:
        """End the pass in progress, and wait until no thread reads the loader."""
        if self._reader is not None:
            self._reader.close()
            self._reader.join()
            self._reader = None
        self._asked = None
        self._buffer.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank; also valid between two uses of a batch. `state.py` lists its entries."""
        if self._loaded_state is not None:
            loaded: dict[str, Any] = rebuilt(self._loaded_state, copied)
            return loaded
        held = self._buffer.held
        has_begun = self._position.in_epoch or self._position.step > 0
        after = self._state_after if has_begun else state_of(self.loader)
        return {
            "version": VERSION,
            "seed": self.options.seed,
            "plan": type(self.plan).__name__,
            "position": asdict(self._position),
            "selector": self._selector.state_dict(),
            "selector_at_epoch": self._selector_at_epoch,
            "held": [{"uses": one.uses, "update": one.update, "used_at": list(one.used_at)} for one in held],
            "before": held[0].state_before if held else after,
            "after": after,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved, starting with the next iterator, as `EchoOptions.resume` sets.

        Under a plan of another class the counts continue and the plan begins again.

        Raises:
            ConfigError: The state has another seed, or is not that of an `EchoLoader`.
        """
        check_state(state, self.options.seed)
        self._leave()
        self._loaded_state = state = rebuilt(state, copied)
        self._position = Position(**state["position"])
        self._selector = self.plan.selector(self.options.seed)
        self._selector_at_epoch = self._selector.state_dict()
        if state["plan"] == type(self.plan).__name__:
            self._selector.load_state_dict(state["selector"])
            self._selector_at_epoch = state["selector_at_epoch"]
        self._resumption = restore_loader(self.loader, state, self.options.resume)

    def _resume(self, resumption: Resumption, reader: Reader) -> None:
        """Restore the batches that the saved run held in the buffer."""
        for _ in range(resumption.skip):
            self._state_after = self._refetch(reader).state
        first = self._position.fresh - len(resumption.held)
        for index, fields in enumerate(resumption.held):
            fetched = self._refetch(reader)
            fields = {**fields, "number": first + index, "used_at": tuple(fields["used_at"])}
            self._hold(fetched.batch, fetched.state, len(resumption.held), **fields)

    def _refetch(self, reader: Reader) -> Fetched:
        fetched = self._draws.take(reader)
        if fetched.has_ended:
            raise ConfigError(
                "the data ended before the position of the saved state: expected a loader that gives the "
                "same batches again"
            )
        return fetched

    def _epoch(self, reader: Reader, updates: Updates) -> Iterator[Batch]:
        """Yield batches until the data end."""
        position, buffer = self._position, self._buffer
        handed_out = math.nan
        while True:
            if self._selector.is_measuring and torch.cuda.is_initialized():
                torch.cuda.synchronize()
            use_seconds, load_seconds = reader.now() - handed_out, math.nan
            if updates.begins(position.slot) or position.slot == 0:
                position.begin_update()
            parameters = updates.parameters() if self.plan.echoes else None
            usable = [one for one in buffer.held if one.can_be_used(position.update, parameters)]
            selected = self._select(usable, reader)
            if selected is None:
                fetched = self._fetch(reader)
                if fetched.has_ended:
                    break
                load_seconds = fetched.seconds
                room = buffer.room(position, self.plan.pool)
                selected = self._hold(fetched.batch, fetched.state, room, number=position.fresh)
            batch = self._use(selected, parameters, load_seconds, use_seconds)
            handed_out = reader.now()
            yield batch
            if reader.is_closed:
                raise OutOfTurn(CLOSED)
        buffer.clear()
        position.end_epoch()

    def _select(self, usable: list[HeldBatch], reader: Reader) -> HeldBatch | None:
        """Return the held batch to use now, one of `usable`, or None for a fresh one."""
        position = self._position
        if not self.plan.decides_by_update:
            return self._selector.select(position.update, usable, reader.is_ready) if usable else None
        if position.slot == 0:
            position.repeat(self._repeats(position.update, usable, reader))
        again = (one for one in usable if one.update == position.update - 1)
        return next(again, None) if position.repeats else None

    def _repeats(self, update: int, usable: list[HeldBatch], reader: Reader) -> bool:
        """Return whether `update` repeats the batches of the previous update, under a plan that decides by update."""
        again = [one for one in usable if one.update == update - 1]
        return bool(again) and self._selector.select(update, again, reader.is_ready) is not None

    def _ask(self, reader: Reader) -> Fetched:
        """Return the loader's next item and keep it, and count the time."""
        if self._asked is None:
            started = reader.now()
            self._asked = self._draws.take(reader)
            self.wait_seconds += reader.now() - started
            self.load_seconds += self._asked.seconds
        return self._asked

    def _fetch(self, reader: Reader) -> Fetched:
        """Return the loader's next item."""
        fetched, self._asked = self._ask(reader), None
        if fetched.has_ended:
            self._state_after = fetched.state
        return fetched

    def _hold(self, batch: Any, state_after: Any, size: int, **fields: Any) -> HeldBatch:
        """Put a batch into the buffer. Containers and arrays from `place` may be `place`'s own."""
        placed = batch if self._place is None else rebuilt(self._place(batch), lambda tensor: tensor)
        state_before, self._state_after = self._state_after, state_after
        return self._buffer.add(placed, size, state_before=state_before, **fields)

    def _use(self, held: HeldBatch, parameters: int | None, load_seconds: float, use_seconds: float) -> Batch:
        """Count a use and return the batch. The count comes first, so that a state saved during the use includes it."""
        position = self._position
        batch: Batch = self._buffer.use(held, position.step, position.update, parameters)
        self.use_index, self.batch_index = held.uses, held.number
        times = {"load_seconds": load_seconds, "use_seconds": use_seconds}
        record = StepRecord(update=position.update, slot=position.slot, is_fresh=self.is_fresh, **times)
        self._selector.record(record)
        position.count(self.is_fresh)
        return batch if self._transform is None else self._transform(batch)
