"""Memory that is freed too early, found by order and not by chance: Note [Streams] of `engine/streams.py`, checked.

Each lane is a stream, and so is each group's wire: a collective reads and writes there from its start until somebody
follows it. A stream knows of the others what it has followed. A block that is freed goes back to the stream that
allocated it, and here the next operation of that stream gets it and writes into it. So what any stream does with a
block must be known to its owner by then. If it is not, a device could read what is not there any more.

What runs on a CUDA device alone is not seen: the side stream of a departure, and `record_stream`.
"""

import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stretto.engine.on_device import choose_runtime
from stretto.engine.runtime import Pending, Runtime, RuntimeOver
from stretto.groups.collectives import Call
from stretto.groups.private import private_group
from stretto.groups.wrapped import WrappedGroup

Clock = dict[str, int]
"""How far a stream knows each stream to be."""
OWN = "the user's stream"
_HOST = "the host"


class Block:
    """Memory: who has allocated it, where, and how far each stream was when it used it last."""

    def __init__(self, owner: str, made_by: str) -> None:
        self.owner = owner
        self.made_by = made_by
        self.uses: Clock = {}


class Lifetimes:
    """Follows the memory of one rank's job on a group made by `on`."""

    def __init__(self) -> None:
        self.early: Counter[str] = Counter()
        """Blocks that their owner could give again before others were done with them: who made and who used them."""
        self.crossed = 0
        """Freed blocks that more than one stream had used."""
        self._known: dict[str, Clock] = defaultdict(dict)
        self._blocks: dict[int, Block] = {}
        self._freed: list[Block] = []
        self._busy: Counter[str] = Counter({OWN: 1})
        self._here = threading.local()
        self._lock = threading.RLock()

    def on(self, group: ProcessGroup) -> "FollowedGroup":
        return FollowedGroup(group, self)

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """Take what this thread does for work of that stream."""
        self._here.name = name
        try:
            with Operations(self):
                yield
        finally:
            self._here.name = None

    @property
    def here(self) -> str | None:
        return getattr(self._here, "name", None)

    def mark(self) -> Clock:
        return self.place_of(self.here or OWN)

    def place_of(self, stream: str) -> Clock:
        """What a stream knows now."""
        with self._lock:
            return dict(self._known[stream])

    def follow(self, mark: Clock, stream: str | None = None) -> None:
        with self._lock:
            known = self._known[stream or self.here or OWN]
            for name, place in mark.items():
                known[name] = max(place, known.get(name, 0))

    def end_until(self, mark: Clock) -> None:
        """Note that the host has seen a device come to `mark`: what was before it is over for all streams."""
        self.follow(mark, _HOST)

    def begin(self, stream: str) -> None:
        with self._lock:
            self._busy[stream] += 1

    def end(self, stream: str) -> None:
        with self._lock:
            self._busy[stream] -= 1

    def use(self, tensors: list[Tensor], stream: str, what: str) -> None:
        """Let a stream do something with tensors: with memory that it was given, or that it gets now."""
        with self._lock:
            known = self._known[stream]
            known[stream] = known.get(stream, 0) + 1
            returned = [block for block in self._freed if block.owner == stream]
            self._freed = [block for block in self._freed if block.owner != stream]
            for block in returned:
                self._check(block)
            for tensor in tensors:
                storage = tensor.untyped_storage()
                block = self._blocks.get(storage._cdata)
                if block is None and not storage.resizable():
                    continue  # memory of the host: of bytes or of an array
                if block is None:
                    block = self._blocks[storage._cdata] = Block(stream, f"{what} {tuple(tensor.shape)}")
                    weakref.finalize(storage, self._free, storage._cdata).atexit = False
                block.uses[stream] = known[stream]

    def _free(self, number: int) -> None:
        with self._lock:
            block = self._blocks.pop(number)
            self.crossed += len(block.uses) > 1
            if self.here == block.owner or not self._busy[block.owner]:
                self._freed.append(block)  # the owner allocates next when it does something next
            else:
                self._check(block)  # it may do so at any moment

    def _check(self, block: Block) -> None:
        known, over = self._known[block.owner], self._known[_HOST]
        for stream, place in block.uses.items():
            if max(known.get(stream, 0), over.get(stream, 0)) < place:
                self.early[f"{block.made_by} of {block.owner}, used on {stream}"] += 1


class Operations(TorchDispatchMode):
    """Tells of the memory that operations of a thread use."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        super().__init__()
        self._lifetimes = lifetimes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        stream = self._lifetimes.here
        if stream is not None:
            used = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, Tensor)]
            self._lifetimes.use(used, stream, str(func))
        return result


class FollowedGroup(WrappedGroup):
    """A group whose collectives run on a stream of their own, and whose works order streams, as NCCL's do."""

    orders_streams = True
    may_wait_again = False

    def __init__(self, inner: ProcessGroup, lifetimes: Lifetimes) -> None:
        super().__init__(inner, None, "followed")
        self._lifetimes = lifetimes

    def perform(self, call: Call) -> Work:
        wire, lifetimes = f"wire {id(self)}", self._lifetimes
        lifetimes.follow(lifetimes.mark(), wire)
        lifetimes.use([*call.inputs, *call.outputs], wire, call.operation.name)
        return FollowedWork(super().perform(call), lifetimes, lifetimes.place_of(wire))

    def private(self) -> "FollowedGroup":
        return FollowedGroup(private_group(self.inner), self._lifetimes)

    def lane_runtime(self, *, overlaps: bool) -> Runtime:
        runtime = choose_runtime(self.inner, torch.device("cpu"), overlaps=overlaps)
        return FollowedRuntime(runtime, self._lifetimes) if overlaps else runtime


class FollowedWork(Work):
    """A collective; once it is over it holds none of its tensors."""

    def __init__(self, work: Work, lifetimes: Lifetimes, end: Clock) -> None:
        super().__init__()
        self._work: Work | None = work
        self._lifetimes = lifetimes
        self._end = end

    def is_completed(self) -> bool:
        """Whether it is over: whoever asks, asks until it is."""
        self._take()
        self._lifetimes.end_until(self._end)
        return True

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._take()
        self._lifetimes.follow(self._end)
        return True

    def _take(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


class FollowedRuntime(RuntimeOver):
    """A lane with a stream of its own, which follows the caller at take-off and is followed at the landing."""

    def __init__(self, runtime: Runtime, lifetimes: Lifetimes) -> None:
        super().__init__(runtime)
        self._lifetimes = lifetimes
        self._stream = f"lane {id(self)}"

    def spawn(self, work: Callable[[], Any]) -> Pending[Any]:
        started = self._lifetimes.mark()
        self._lifetimes.begin(self._stream)

        def followed() -> tuple[Any, Clock]:
            with self._lifetimes.stream(self._stream):
                self._lifetimes.follow(started)
                result = work()
                return result, self._lifetimes.mark()

        return FollowedPending(super().spawn(followed), self._lifetimes, self._stream)


class FollowedPending:
    """Work of a lane."""

    def __init__(self, pending: Pending[tuple[Any, Clock]], lifetimes: Lifetimes, stream: str) -> None:
        self._pending = pending
        self._lifetimes = lifetimes
        self._stream = stream

    def done(self) -> bool:
        return self._pending.done()

    def result(self) -> Any:
        result, finished = self._pending.result()
        self._lifetimes.follow(finished)
        self._lifetimes.end(self._stream)
        return result
