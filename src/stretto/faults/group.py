"""A process group whose results are damaged as they arrive; stock DDP runs on it like anything else."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.futures import Future

from stretto.errors import ConfigError
from stretto.faults.injector import Injector
from stretto.faults.plan import FaultPlan, Site
from stretto.groups.private import private_group
from stretto.groups.throttled import gloo_group
from stretto.groups.wrapped import WrappedGroup


def register_faulty(plan: FaultPlan, name: str = "faulty") -> None:
    """Make `name` a backend of `torch.distributed`: Gloo, whose results are damaged by `plan`.

    To be called on every rank before `init_process_group(backend=name)`. All groups of a process that are made
    through it share one injector per registration: `FaultyGroup.injector`.

    Raises:
        ConfigError: `name` is a backend of torch's own.
    """
    if name in dist.Backend.backend_list and name.upper() not in dist.Backend._plugins:
        raise ConfigError(f"{name!r} is a backend of torch's own; choose another name for the faulty one")
    injectors: dict[int, Injector] = {}

    def create(store: Store, rank: int, world_size: int, timeout: timedelta) -> FaultyGroup:
        injector = injectors.setdefault(rank, Injector(plan, rank))
        return FaultyGroup(gloo_group(store, rank, world_size, timeout), injector, store, name)

    dist.Backend.register_backend(name, create, devices=["cpu"])


class FaultyGroup(WrappedGroup):
    """A process group over an inner one; an injector may damage what its collectives bring.

    Args:
        inner: Performs them.
        injector: Of this rank.
        store: Of this group; None for that of the inner one.
        backend_name: By which torch knows it, if it does.
    """

    def __init__(
        self,
        inner: dist.ProcessGroup,
        injector: Injector,
        store: Store | None = None,
        backend_name: str = "faulty",
    ) -> None:
        super().__init__(inner, store, backend_name)
        self.injector = injector

    def private(self) -> "FaultyGroup":
        """Return a sibling over the inner group's sibling, damaged by the same injector."""
        return FaultyGroup(private_group(self._inner), self.injector)

    def __getattr__(self, name: str) -> Any:
        """Return what else the inner group offers, such as a virtual cluster's clock."""
        if name == "_inner":  # not there yet
            raise AttributeError(name)
        return getattr(self._inner, name)

    def allreduce(self, tensors: Any, *options: Any) -> dist.Work:
        """All-reduce one tensor or a list of one."""
        return self._damaged("all-reduced values", tensors, self._inner.allreduce(tensors, *options))

    def allreduce_coalesced(self, tensors: list[Tensor], *options: Any) -> dist.Work:
        """All-reduce a list of tensors as one."""
        work = self._inner.allreduce_coalesced(tensors, *options)
        return self._damaged("all-reduced values", tensors, work)

    def reduce(self, tensors: Any, *options: Any) -> dist.Work:
        """Reduce to one rank."""
        return self._damaged("all-reduced values", tensors, self._inner.reduce(tensors, *options))

    def broadcast(self, tensors: Any, *options: Any) -> dist.Work:
        """Broadcast from one rank."""
        return self._damaged("broadcast values", tensors, self._inner.broadcast(tensors, *options))

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> dist.Work:
        """All-gather into a list of tensors."""
        work = self._inner.allgather(outputs, inputs, *options)
        return self._damaged(_gathered(inputs), outputs, work)

    def all_gather_single(self, output: Tensor, input: Tensor, *options: Any) -> dist.Work:
        """All-gather into one tensor."""
        work = self._inner.all_gather_single(output, input, *options)
        return self._damaged(_gathered(input), output, work)

    def all_gather_single_coalesced(self, outputs: Any, inputs: list[Tensor], *options: Any) -> dist.Work:
        """All-gather several tensors, each into one."""
        work = self._inner.all_gather_single_coalesced(outputs, inputs, *options)
        return self._damaged(_gathered(inputs), outputs, work)

    def reduce_scatter(self, outputs: Any, inputs: Any, *options: Any) -> dist.Work:
        """Reduce-scatter from a list of tensors."""
        return self._damaged("contribution", outputs, self._inner.reduce_scatter(outputs, inputs, *options))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, *options: Any) -> dist.Work:
        """Reduce-scatter from one tensor."""
        options = options or (dist.ReduceScatterOptions(),)
        work = self._inner.reduce_scatter_single(output, input, *options)
        return self._damaged("contribution", output, work)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: list[Tensor], *options: Any) -> dist.Work:
        """Reduce-scatter several tensors."""
        work = self._inner.reduce_scatter_single_coalesced(outputs, inputs, *options)
        return self._damaged("contribution", outputs, work)

    def all_to_all_single(self, output: Tensor, *call: Any) -> dist.Work:
        """All-to-all between two tensors."""
        return self._damaged("contribution", output, self._inner.all_to_all_single(output, *call))

    def alltoall(self, outputs: list[Tensor], *call: Any) -> dist.Work:
        """All-to-all between two lists of tensors."""
        return self._damaged("contribution", outputs, self._inner.alltoall(outputs, *call))

    def barrier(self, *options: Any, **named: Any) -> dist.Work:
        """Wait for all ranks; nothing can be damaged."""
        return self._inner.barrier(*options, **named)

    def _damaged(self, site: Site, tensors: Any, work: dist.Work) -> dist.Work:
        if not self.injector.is_interested(site):
            return work
        return DamagedWork(work, lambda: self.injector.offer(site, _flat(tensors)))


class DamagedWork(dist.Work):
    """A collective whose result is damaged once it is there, before anybody sees it."""

    def __init__(self, work: dist.Work, damage: Callable[[], None]) -> None:
        super().__init__()
        self._work = work
        self._damage: Callable[[], None] | None = damage
        self._once = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait as the inner collective does."""
        self._work.wait(timeout)
        self._strike()
        return True

    def is_completed(self) -> bool:
        """Whether the inner collective is over."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Whether the inner collective is over and did not fail; its backend is not to know of the damage."""
        return self._work.is_success()

    def exception(self) -> Any:
        """The inner collective's error."""
        return self._work.exception()

    def result(self) -> Any:
        """The output tensors."""
        self._strike()
        return self._work.result()

    def get_future(self) -> Future[Any]:
        """A future of the output tensors."""
        future: Future[Any] = self._work.get_future()
        return future.then(self._struck)

    def _struck(self, future: Future[Any]) -> Any:
        value = future.value()
        self._strike()
        return value

    def _strike(self) -> None:
        with self._once:
            damage, self._damage = self._damage, None
            if damage is not None:
                damage()


def _gathered(inputs: Any) -> Site:
    """Tell records of the roll call, which travel as int8, from values, which never do."""
    is_record = all(tensor.dtype == torch.int8 for tensor in _flat(inputs))
    return "roll call" if is_record else "gathered values"


def _flat(tensors: Any) -> Sequence[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    return [tensor for part in tensors for tensor in _flat(part)]
