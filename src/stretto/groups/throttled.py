"""Gloo behind a slow link: every collective completes as late as the link would let it, without burning CPU.

A collective begins on the wire when every rank has entered it, which a barrier of the inner group tells, waits
for what was sent before it, and is complete when its bytes have arrived and Gloo has really run it:

    complete = max(ran, arrived),   arrived = max(entered, wire free) + 8 sent / rate + latency

`sent` is what this rank sends (`stretto.groups.link`): links are full duplex, and the collectives move as much
in as out.
"""

import collections
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from stretto.errors import ConfigError
from stretto.groups import link as traffic
from stretto.groups.link import Link, Wire
from stretto.groups.wrapped import LateWork, WrappedGroup


def register_throttled(link: Link, name: str = "throttled") -> None:
    """Make `name` a backend of `torch.distributed`: Gloo on `link`, shared by all groups of this process.

    To be called on every rank before `init_process_group(backend=name)`. Registering a name again replaces its
    link for the groups made from then on.

    Raises:
        ConfigError: `name` is a backend of torch's own.
    """
    if name in dist.Backend.backend_list and name.upper() not in dist.Backend._plugins:
        raise ConfigError(f"{name!r} is a backend of torch's own; choose another name for the throttled one")
    wire = Wire(link)

    def create(store: Store, rank: int, world_size: int, timeout: timedelta) -> ThrottledGroup:
        return ThrottledGroup(gloo_group(store, rank, world_size, timeout), store, wire, name)

    dist.Backend.register_backend(name, create, devices=["cpu"])


def gloo_group(store: Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return a plain Gloo group that torch's registries know nothing of."""
    inner_store = PrefixStore("inner", store)
    group = dist.ProcessGroup(inner_store, rank, world_size)
    gloo = dist.ProcessGroupGloo(inner_store, rank, world_size, timeout)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    for device in ("cpu", "cuda"):  # Gloo takes tensors of both
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


class ThrottledGroup(WrappedGroup):
    """A process group over an inner one that delays completions by a wire's model and counts what is sent."""

    def __init__(self, inner: dist.ProcessGroup, store: Store, wire: Wire, backend_name: str) -> None:
        super().__init__(inner, store, backend_name)
        self._wire = wire
        self._sent: collections.Counter[str] = collections.Counter()
        self._counting = threading.Lock()

    # What was sent

    @property
    def sent(self) -> dict[str, int]:
        """Bytes this rank has sent, by collective."""
        with self._counting:
            return dict(self._sent)

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank has sent in all collectives of this group."""
        return sum(self.sent.values())

    @property
    def link(self) -> Link:
        """The link this group shares with all groups of its backend in this process."""
        return self._wire.link

    def _issue(
        self, collective: str, sent_bytes: int, start: Callable[..., dist.Work], *call: Any
    ) -> dist.Work:
        with self._counting:
            self._sent[collective] += sent_bytes
        if self.link.is_free:
            return start(*call)
        entered = self._inner.barrier().get_future()
        work = LateWork(start(*call))
        entered.add_done_callback(
            lambda done: work.after(done, lambda: self._wire.send(sent_bytes, work.advance))
        )
        return work

    # Collectives

    def allreduce(self, tensors: Any, *options: Any) -> dist.Work:
        """All-reduce one tensor or a list of one."""
        sent = traffic.all_reduce(_bytes(tensors), self.size())
        return self._issue("all_reduce", sent, self._inner.allreduce, tensors, *options)

    def allreduce_coalesced(self, tensors: list[Tensor], *options: Any) -> dist.Work:
        """All-reduce a list of tensors as one."""
        sent = traffic.all_reduce(_bytes(tensors), self.size())
        return self._issue("all_reduce", sent, self._inner.allreduce_coalesced, tensors, *options)

    def reduce(self, tensors: Any, *options: Any) -> dist.Work:
        """Reduce to one rank."""
        sent = traffic.reduce(_bytes(tensors), self.rank(), _root(options), self.size())
        return self._issue("reduce", sent, self._inner.reduce, tensors, *options)

    def broadcast(self, tensors: Any, *options: Any) -> dist.Work:
        """Broadcast from one rank."""
        sent = traffic.broadcast(_bytes(tensors), self.rank(), _root(options), self.size())
        return self._issue("broadcast", sent, self._inner.broadcast, tensors, *options)

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> dist.Work:
        """All-gather into a list of tensors."""
        sent = traffic.all_gather(_bytes(inputs), self.size())
        return self._issue("all_gather", sent, self._inner.allgather, outputs, inputs, *options)

    def allgather_coalesced(self, outputs: Any, inputs: list[Tensor], *options: Any) -> dist.Work:
        """All-gather a list of tensors into lists."""
        sent = traffic.all_gather(_bytes(inputs), self.size())
        return self._issue("all_gather", sent, self._inner.allgather_coalesced, outputs, inputs, *options)

    def all_gather_single(self, output: Tensor, input: Tensor, *options: Any) -> dist.Work:
        """All-gather into one tensor."""
        sent = traffic.all_gather(_bytes(input), self.size())
        return self._issue("all_gather", sent, self._inner.all_gather_single, output, input, *options)

    def all_gather_single_coalesced(self, outputs: Any, inputs: list[Tensor], *options: Any) -> dist.Work:
        """All-gather several tensors, each into one."""
        sent = traffic.all_gather(_bytes(inputs), self.size())
        start = self._inner.all_gather_single_coalesced
        return self._issue("all_gather", sent, start, outputs, inputs, *options)

    def reduce_scatter(self, outputs: Any, inputs: Any, *options: Any) -> dist.Work:
        """Reduce-scatter from a list of tensors."""
        sent = traffic.reduce_scatter(_bytes(inputs), self.size())
        return self._issue("reduce_scatter", sent, self._inner.reduce_scatter, outputs, inputs, *options)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, *options: Any) -> dist.Work:
        """Reduce-scatter from one tensor."""
        sent = traffic.reduce_scatter(_bytes(input), self.size())
        options = options or (dist.ReduceScatterOptions(),)
        return self._issue("reduce_scatter", sent, self._inner.reduce_scatter_single, output, input, *options)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: list[Tensor], *options: Any) -> dist.Work:
        """Reduce-scatter several tensors."""
        sent = traffic.reduce_scatter(_bytes(inputs), self.size())
        start = self._inner.reduce_scatter_single_coalesced
        return self._issue("reduce_scatter", sent, start, outputs, inputs, *options)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], *options: Any
    ) -> dist.Work:
        """All-to-all between two tensors cut along their first dimension; no splits mean equal ones."""
        parts = _parts(input, input_splits, self.size())
        sent = traffic.all_to_all(parts, self.rank())
        start = self._inner.all_to_all_single
        return self._issue("all_to_all", sent, start, output, input, output_splits, input_splits, *options)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], *options: Any) -> dist.Work:
        """All-to-all between two lists of tensors."""
        sent = traffic.all_to_all([tensor.nbytes for tensor in inputs], self.rank())
        return self._issue("all_to_all", sent, self._inner.alltoall, outputs, inputs, *options)

    def gather(self, outputs: Any, inputs: Any, *options: Any) -> dist.Work:
        """Gather on one rank."""
        sent = traffic.gather(_bytes(inputs), self.rank(), _root(options))
        return self._issue("gather", sent, self._inner.gather, outputs, inputs, *options)

    def scatter(self, outputs: Any, inputs: Any, *options: Any) -> dist.Work:
        """Scatter from one rank."""
        sent = traffic.scatter(_bytes(outputs), self.rank(), _root(options), self.size())
        return self._issue("scatter", sent, self._inner.scatter, outputs, inputs, *options)

    def barrier(self, *options: Any, **named: Any) -> dist.Work:
        """Wait for all ranks; costs the latency."""
        return self._issue("barrier", 0, lambda: self._inner.barrier(*options, **named))

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """Refused: a link between two ranks is not modelled.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a throttled group models collectives, not send and recv; use a plain Gloo group for those"
        )

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """Refused, see `send`."""
        return self.send(tensors, rank, tag)


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    return sum(_bytes(tensor) for tensor in tensors)


def _parts(input: Tensor, splits: Sequence[int], world_size: int) -> list[int]:
    if not splits:
        return [input.nbytes // world_size] * world_size
    row = input.nbytes // max(1, input.shape[0])
    return [rows * row for rows in splits]


def _root(options: tuple[Any, ...]) -> int:
    """Read the root rank, which is a field of torch's options or an argument of the short forms."""
    first = options[0] if options else 0
    return first if isinstance(first, int) else int(first.rootRank)
