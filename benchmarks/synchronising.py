"""Calls by which the host waits for its device, counted by the line that makes them.

A job on a device is quick as long as its host only hands over work. A call that needs a result waits until the device
has done all that was handed over before. `Synchronisations` counts such calls. On CUDA it asks PyTorch for them. On a
machine without a device it takes the processor for one: all tensors are the device's, but for those that would lie in
the host's memory beside a device (made without `device=`, from bytes or arrays, or by `cpu()`).

    counted = Synchronisations()
    group = counted.on(inner)                      # its collectives order streams, as on NCCL
    with counted.watching():                       # from before the job is made
        parallel = DataParallel(model, optimizer, strategy, group=group)
        ...                                        # warm up
        counted.lines.clear()
        parallel.backward(loss)
    print(counted.lines)
"""

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.engine.on_device import choose_runtime
from stretto.engine.runtime import Pending, Runtime, RuntimeOver
from stretto.groups.collectives import Call
from stretto.groups.private import private_group
from stretto.groups.wrapped import WrappedGroup

T = TypeVar("T")

_OWN_FILE = __file__
_TORCH = str(Path(torch.__file__).parent)
_READS = ("numpy", "tolist", "__array__")
"""Methods by which Python reads a tensor's memory without an operation."""
_MADE = ("as_tensor", "tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn")
"""Functions whose result lies in the host's memory unless they are given a device."""
_DATA_DEPENDENT = (
    "_local_scalar_dense",
    "equal",
    "allclose",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
)
"""Operations whose result the host must know."""


class Synchronisations:
    """Counts the calls that make the host wait, by source line.

    Args:
        device: Of the jobs that are watched.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        if self.device.type == "cuda" and self.device.index is None:  # a thread is told which one
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.lines: Counter[str] = Counter()
        """How often each line has made the host wait: `file:line function`, the nearest one outside PyTorch."""
        self._lock = threading.Lock()
        self._here = threading.local()
        self._is_watching = False
        self._on_device: dict[int, tuple[torch.UntypedStorage, bool]] = {}
        """By its number, what is known of a storage; kept, so that no other one is given the number."""

    def on(self, group: dist.ProcessGroup) -> "CountedGroup":
        """Return a group over `group` whose blocking waits are counted, and whose lanes are watched."""
        return CountedGroup(group, self)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what this thread does inside the block, and the lanes of jobs on groups made by `on`."""
        self._is_watching = True
        try:
            with self._asking_cuda() if self.device.type == "cuda" else self.in_thread():
                yield
        finally:
            self._is_watching = False

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Watch this thread, if `watching` is on and the thread is not watched yet."""
        watches = (
            self._is_watching and self.device.type != "cuda" and not getattr(self._here, "is_watched", False)
        )
        with ExitStack() as stack:
            if watches:
                self._here.is_watched = True
                stack.callback(setattr, self._here, "is_watched", False)
                stack.enter_context(_Operations(self))
                stack.enter_context(_Calls(self))
            yield

    def note(self) -> None:
        """Count one synchronising call of whoever calls."""
        frame = sys._getframe(1)
        while frame.f_back is not None and _is_below(frame.f_code.co_filename):
            frame = frame.f_back
        place = Path(frame.f_code.co_filename)
        with self._lock:
            self.lines[f"{place.parent.name}/{place.name}:{frame.f_lineno} {frame.f_code.co_name}"] += 1

    def is_on_device(self, tensor: Tensor) -> bool:
        """Whether a tensor would lie on the device."""
        storage = tensor.untyped_storage()
        # What is made of bytes or of an array refers to memory of the host, which cannot be resized.
        return self._on_device.get(storage._cdata, (storage, storage.resizable()))[1]

    def read(self, tensor: Tensor) -> None:
        """Count that the host reads the memory of a tensor, which cannot be resized from then on."""
        self.note()
        storage = tensor.untyped_storage()
        self._on_device[storage._cdata] = storage, True

    def place(self, tensors: list[Tensor], *, on_device: bool) -> None:
        """Take tensors for the device's, or for the host's."""
        for tensor in tensors:
            if self.is_on_device(tensor) != on_device:
                storage = tensor.untyped_storage()
                self._on_device[storage._cdata] = storage, on_device

    @contextmanager
    def _asking_cuda(self) -> Iterator[None]:
        def shown(message: Warning | str, *_: object, **__: object) -> None:
            if "synchronizing CUDA operation" in str(message):
                self.note()

        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = shown
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)


def _is_below(file: str) -> bool:
    return file in (_OWN_FILE, warnings.__file__) or file.startswith((_TORCH, "<"))


def _tensors(*values: object) -> list[Tensor]:
    """Return the tensors among values and in lists of them: no operation is given or gives more than that."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(*value)
    return found


class _Operations(TorchDispatchMode):
    """Counts operations whose result the host must know, and follows which tensors are the host's."""

    def __init__(self, counted: Synchronisations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._counted = counted

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs, name = _tensors(*args, *(kwargs or {}).values()), func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        on_device = any(map(self._counted.is_on_device, inputs))
        if on_device and (name in _DATA_DEPENDENT or _is_masked(name, inputs[1:])):
            self._counted.note()
        if inputs:
            self._counted.place(_tensors(result), on_device=on_device)
        return result


def _is_masked(name: str, indices: list[Tensor]) -> bool:
    return name.startswith("index") and any(index.dtype in (torch.bool, torch.uint8) for index in indices)


class _Calls(TorchFunctionMode):
    """Counts what Python reads without an operation, and what goes from the host to the device or back."""

    def __init__(self, counted: Synchronisations) -> None:
        super().__init__()
        self._counted = counted

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        counted, named = self._counted, kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _READS and counted.is_on_device(args[0]):
            counted.read(args[0])
        result = func(*args, **named)
        if name in _MADE and isinstance(result, Tensor):
            on_device = named.get("device", "cpu") != "cpu"
            counted.place([result], on_device=on_device)
            if on_device and name in ("tensor", "as_tensor"):
                counted.note()
        elif name in ("cpu", "to") and args and isinstance(args[0], Tensor):
            return self._moved(name, args[0], result, [*args[1:], *named.values()], **named)
        return result

    def _moved(
        self,
        name: str,
        tensor: Tensor,
        result: Any,
        given: list[object],
        non_blocking: bool = False,
        **_: object,
    ) -> Any:
        """Return what a tensor's method gives back: a copy where a device would have copied.

        Args:
            name: Of the method.
            tensor: Whose it is.
            result: What it gives back here.
            given: All that it was given.
            non_blocking: Of `to`: the host goes on at once, as it does with memory that is pinned.
        """
        counted, is_on_device = self._counted, self._counted.is_on_device(tensor)
        if name == "cpu" and is_on_device:
            counted.note()
            result = result.clone()
            counted.place([result], on_device=False)
        elif name == "to" and not is_on_device and any(isinstance(one, str | torch.device) for one in given):
            if not non_blocking:
                counted.note()
            result = result.clone() if result is tensor else result
            counted.place([result], on_device=True)
        return result


class CountedGroup(WrappedGroup):
    """A group whose works order streams, as NCCL's do: a wait for one returns at once, a question may be answered no.

    Args:
        inner: Performs the collectives.
        counted: Counts waits that block the host: those with a timeout, and questions that are asked until they are
            answered yes.
    """

    may_wait_again = False
    orders_streams = True

    def __init__(self, inner: dist.ProcessGroup, counted: Synchronisations) -> None:
        super().__init__(inner, None, "counted")
        self.counted = counted

    def perform(self, call: Call) -> dist.Work:
        """Start a collective."""
        return _CountedWork(super().perform(call), self.counted)

    def private(self) -> "CountedGroup":
        """Return another group of the same ranks."""
        return CountedGroup(private_group(self.inner), self.counted)

    def lane_runtime(self, *, overlaps: bool) -> Runtime:
        """Return what the lanes of jobs on this group run on."""
        return _WatchedRuntime(
            choose_runtime(self.inner, self.counted.device, overlaps=overlaps), self.counted
        )


class _CountedWork(dist.Work):
    """One collective under way."""

    def __init__(self, work: dist.Work, counted: Synchronisations) -> None:
        super().__init__()
        self._work = work
        self._counted = counted
        self._was_asked = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Order streams after the collective; with a timeout, let the host wait for it."""
        if timeout:
            self._counted.note()
        return bool(self._work.wait())

    def is_completed(self) -> bool:
        """Whether it is over: not at once, and who asks again waits."""
        if not self._was_asked:
            self._was_asked = True
            return False
        self._counted.note()
        self._work.wait()
        return True

    def result(self) -> Any:
        """The tensors that it has written."""
        return self._work.result()


class _WatchedRuntime(RuntimeOver):
    """A runtime whose work is watched.

    Args:
        runtime: Performs it.
        counted: Watches.
    """

    def __init__(self, runtime: Runtime, counted: Synchronisations) -> None:
        super().__init__(runtime)
        self._counted = counted

    def spawn(self, work: Callable[[], T]) -> Pending[T]:
        """Start `work` after everything spawned before."""

        def watched() -> T:
            with self._counted.in_thread():
                return work()

        return super().spawn(watched)
