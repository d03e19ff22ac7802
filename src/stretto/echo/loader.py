"""`EchoLoader`: hands out the batches of a loader, some of them several times, while the next ones are read.

At every step

    1. the plan's selector decides: a held batch, or a fresh one;
    2. a fresh batch is taken from the reader, placed, and put into the buffer;
    3. the use is counted, and the batch is handed out through `transform`.

Each step hands out exactly one batch. Ranks may therefore decide differently, and their collectives still match.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from stretto.echo.buffer import EchoBuffer, HeldBatch, change_of, copied, rebuilt
from stretto.echo.draws import DrawWatch
from stretto.echo.plans import Plan, Ready, StepRecord, check_plan, epoch_length, least_used
from stretto.echo.reader import CLOSED, Fetched, Reader, ThreadReader, open_reader
from stretto.echo.state import (
    VERSION,
    EchoOptions,
    Position,
    Resumption,
    begin_at_start,
    check_state,
    restore_loader,
    state_at_start,
    state_of,
)
from stretto.errors import ConfigError, OutOfTurn

Batch = TypeVar("Batch")


class EchoLoader(Generic[Batch]):
    """Hands out the batches of `loader`, some of them several times, as a plan says.

        for batch in parallel.feed(EchoLoader(loader, Even(2.5))):
            ...

    Every rank wraps its own loader. Attributes that this class does not have are those of the loader.

    A new iterator begins a new pass over the loader, and ends the pass before it. The first one after
    `load_state_dict` goes on in the middle. Batches that were read ahead of a pass that is left are dropped. A read
    that is under way when a pass is left ends by itself; the next pass waits for it.

    Attributes:
        loader: The bare loader.
        plan: The plan.
        options: The other options.
        use_index: Which use of its batch the last step was: 1 for the first; 0 before the first step.
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
            loader: This rank's training batches: any iterable. It may write every batch into the same memory. Do not
                wrap a loader for validation: its batches must count once.
            plan: When to echo; None is `Ready()`, which never echoes a loader that is fast enough.
            place: Called once with every fresh batch, before it is held. A copy to the device belongs here, so that
                echoes cost no transfer. It must give every batch tensors of its own. Under `resume="store"` it is
                called again with a batch that it has placed.
            transform: Called at every use, with the held batch. Random augmentation belongs here, so that every use
                has its own. It must not write into its argument, unless `EchoOptions(copy="tensors")` is set.
            options: The other options; None for the defaults.

        Raises:
            ConfigError: An argument is of the wrong kind, or the plan is `Ready` and nothing is read in the background.
        """
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
        self.wait_seconds = 0.0
        self.load_seconds = 0.0
        self._place = place
        self._transform = transform
        self._position = Position()
        self._selector = self.plan.selector(self.options.seed)
        self._selector_at_epoch = self._selector.state_dict()
        self._buffer = EchoBuffer(self.plan.pool, copies_tensors=self.options.copy == "tensors")
        self._decisions: list[int] = []
        self._reader: Reader | None = None
        """Of the newest pass, also when that is over: its last read may still be under way."""
        self._draws = DrawWatch()
        self._state_after: Any = None
        """State of the bare loader after the newest batch that was taken from the reader."""
        self._resumption: Resumption | None = None
        """Of a state that was loaded, until the next iterator begins."""
        self._loaded_state: dict[str, Any] | None = None
        """That state itself."""

    @property
    def is_fresh(self) -> bool:
        """Whether the last step was the first use of its batch."""
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
        """The number of the batch used at each step, for `Replay`; empty unless the options keep it."""
        return tuple(self._decisions)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":  # `loader` is missing while a copy is being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """Return the number of batches in this epoch, or in the next one between two epochs; exact, with echoes.

        Raises:
            TypeError: The plan depends on time, or the loader has no length, and `steps_per_epoch` is not set.
        """
        if self.options.steps_per_epoch is not None:
            return self.options.steps_per_epoch
        if not self.plan.is_predictable:
            raise TypeError(
                f"the length of an epoch under {type(self.plan).__name__} is not known beforehand: set "
                "EchoOptions(steps_per_epoch=...)"
            )
        position = self._position
        selector = self.plan.selector(self.options.seed)
        selector.load_state_dict(
            self._selector_at_epoch if position.in_epoch else self._selector.state_dict()
        )
        loader: Any = self.loader
        return epoch_length(
            selector, len(loader), position.epoch_step if position.in_epoch else position.step
        )

    def __iter__(self) -> Iterator[Batch]:
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
        reader = self._reader = open_reader(iterator, partial(state_of, self.loader), self.options.ahead)
        del iterator  # the reader's alone: the bare loader's workers end with it
        try:
            if resumption is not None:
                self._resume(resumption, reader)
            yield from self._epoch(reader)
        finally:
            reader.close()

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch(epoch)` of the loader, its samplers and its dataset, once on each that has it."""
        loader: Any = self.loader
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

    def close(self) -> None:
        """End the pass under way, and do not wait for the loader. The next iterator begins another."""
        if self._loaded_state is not None and self._position.in_epoch:  # the pass of a state that was loaded
            bare: Any = self.loader
            if (after := self._loaded_state["after"]) is not None:
                bare.load_state_dict(after)
                iter(bare)  # a stateful one begins where its state was loaded once
            self._resumption = self._loaded_state = None
            self._position.in_epoch = False
        if self._reader is not None:
            self._reader.close()

    def _leave(self) -> None:
        """End the pass under way, and wait until nobody reads the loader any more."""
        if self._reader is not None:
            self._reader.close()
            self._reader.join()
            self._reader = None
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
            "uses": [one.uses for one in held],
            "before": held[0].state_before if held else after,
            "after": after,
            "changes": [change_of(one) for one in held],
            "batches": rebuilt([one.batch for one in held], copied)
            if self.options.resume == "store"
            else None,
            "decisions": list(self._decisions) if self.options.keeps_decisions else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was saved, from the next iterator on. `EchoOptions.resume` says what is done.

        Under a plan of another class the counts go on and the plan begins anew.

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
        self._decisions = list(state["decisions"] or [])
        self._resumption = restore_loader(self.loader, state, self.options.resume)

    def _resume(self, resumption: Resumption, reader: Reader) -> None:
        """Put the batches that the saved run held into the buffer again."""
        for _ in range(resumption.skip):
            self._state_after = self._refetch(reader).state
        first = self._position.fresh - len(resumption.uses)
        for index, uses in enumerate(resumption.uses):
            if resumption.batches is None:
                fetched = self._refetch(reader)
                batch, state_after = fetched.batch, fetched.state
            else:
                batch, state_after = resumption.batches[index], self._state_after
            held = self._hold(batch, state_after, first + index, uses)
            if resumption.batches is not None:
                held.change = resumption.changes[index]

    def _refetch(self, reader: Reader) -> Fetched:
        fetched = self._take(reader)
        if fetched.has_ended:
            raise ConfigError(
                "the data ended before the place where the state was saved: expected a loader that gives the same "
                "batches again"
            )
        return fetched

    def _epoch(self, reader: Reader) -> Iterator[Batch]:
        """Hand out batches until the data end, or the steps of an epoch are done."""
        position, buffer, limit = self._position, self._buffer, self.options.steps_per_epoch
        handed_out = math.nan
        while limit is None or position.step - position.epoch_step < limit:
            if self._selector.is_measuring and torch.cuda.is_initialized():
                torch.cuda.synchronize()
            use_seconds = reader.now() - handed_out
            load_seconds = math.nan
            selected = (
                self._selector.select(position.step, buffer.held, reader.is_ready) if buffer.held else None
            )
            if selected is None:
                fetched = self._fetch(reader)
                if not fetched.has_ended:
                    load_seconds = fetched.seconds
                    selected = self._hold(fetched.batch, fetched.state, position.fresh)
                    position.fresh += 1
                elif limit is not None and buffer.held:
                    selected = least_used(buffer.held)
                else:
                    break
            batch = self._use(selected, load_seconds, use_seconds)
            handed_out = reader.now()
            yield batch
            if reader.is_closed:
                raise OutOfTurn(CLOSED)
        buffer.clear()
        position.in_epoch = False

    def _fetch(self, reader: Reader) -> Fetched:
        """Return what the loader gives next, and count the time."""
        started = reader.now()
        fetched = self._take(reader)
        self.wait_seconds += reader.now() - started
        self.load_seconds += fetched.seconds
        if fetched.has_ended:
            self._state_after = fetched.state
        return fetched

    def _take(self, reader: Reader) -> Fetched:
        """Return what the loader gives next. Only a thread beside the caller's can race for random numbers."""
        if self.options.ahead > 0 and isinstance(reader, ThreadReader):
            return self._draws.take(reader)
        return reader.take()

    def _hold(self, batch: Any, state_after: Any, number: int, uses: int = 0) -> HeldBatch:
        """Put a batch into the buffer. Containers and arrays that `place` gives may be its own."""
        placed = batch if self._place is None else rebuilt(self._place(batch), lambda tensor: tensor)
        state_before, self._state_after = self._state_after, state_after
        return self._buffer.add(placed, number, state_before, uses)

    def _use(self, held: HeldBatch, load_seconds: float, use_seconds: float) -> Batch:
        """Count a use and return the batch. Counted first: a state that is saved during the use includes it."""
        position = self._position
        batch: Batch = self._buffer.use(held, position.step)
        self.use_index = held.uses
        self._selector.record(
            StepRecord(
                step=position.step,
                is_fresh=held.uses == 1,
                load_seconds=load_seconds,
                use_seconds=use_seconds,
            )
        )
        position.step += 1
        if self.options.keeps_decisions:
            self._decisions.append(held.number)
        return batch if self._transform is None else self._transform(batch)
