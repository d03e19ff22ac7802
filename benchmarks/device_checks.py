"""What checks of a device are made of: their record, delays, collectives that last, small networks and trainings.

A check is called on every rank, gives the facts that it has found, and raises `Failed` where they are not as they
should be. On processors it is a rehearsal: the same code, smaller and without delays, so that a mistake of the check
itself shows before a device is lent. `benchmarks/first_half_hour.py` runs all of them, `tests/gpu` each once.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stretto as st
from benchmarks.staged import StagedGroup
from stretto.groups import SoloGroup, private_group
from stretto.groups.collective_group import CollectiveGroup, CompletedWork
from stretto.groups.collectives import Call

STRATEGIES: Mapping[str, Callable[[], st.Strategy]] = {
    "ddp": st.DDP,
    "zero1": st.ZeRO1,
    "dpu": st.DPU,
    "wp": st.WeightPrediction,
    "acco": st.ACCO,
    "local": lambda: st.LocalSGD(0.5),
    "diloco": lambda: st.DiLoCo(3, outer_lr=1.0, outer_momentum=0.0, delay=1, keep_progress=True),
    "paft": st.PAFTSync,
}
MICRO_BATCHES = 2


class Failed(Exception):
    """Something is not as it should be."""


def expect(holds: bool, what: str) -> None:
    """Raise unless `holds`."""
    if not holds:
        raise Failed(what)


@dataclasses.dataclass(frozen=True)
class Check:
    """One of the checks."""

    run: Callable[[torch.device], dict[str, Any]]
    """Gives the facts; raises `Failed`."""
    question: str
    ranks: int = 0
    """Processes that call it in a default Gloo group; 0 is one process without a group."""
    seconds: float = 60.0
    """Time limit."""
    alone: bool = False
    """Whether it looks at times, so that nothing else may run beside it."""
    needs_cuda: bool = False
    """Whether there is nothing to rehearse on processors."""


# What checks are made of


def delay(device: torch.device, seconds: float) -> None:
    """Keep the current stream busy; processors do not wait in a rehearsal."""
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * _cycles_per_second(device)))


@functools.cache
def _cycles_per_second(device: torch.device) -> float:
    cycles = 50_000_000
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda._sleep(cycles)  # the first one loads the kernel, and lets an idle clock rise
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
    return cycles / (begin.elapsed_time(end) / 1000)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Lasting(SoloGroup):
    """A lone rank whose collectives keep the stream busy for a while.

    Args:
        device: Where they run.
        seconds: How long each of them takes on a device.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        super().__init__()
        self._device, self._seconds = device, seconds
        self._cycles = int(seconds * _cycles_per_second(device)) if device.type == "cuda" else 0

    def private(self) -> "Lasting":
        """Return another one."""
        return Lasting(self._device, self._seconds)

    def perform(self, call: Call) -> dist.Work:
        """Copy after the delay."""
        if self._cycles:
            torch.cuda._sleep(self._cycles)
        return super().perform(call)


class Twins(CollectiveGroup):
    """Rank 0 of two that contribute the same, on one device.

    As NCCL's, its collectives run on a stream of their own, after what the caller's stream was given, and a wait orders
    streams. They take as long as their bytes need. What the other rank would have sent of its own is a copy of this
    rank's: so times are right, and a model that is trained on it is none.

    Args:
        device: Where they run.
        seconds_per_byte: How long they take for every byte that a rank sends.
    """

    orders_streams = True
    may_wait_again = False

    def __init__(self, device: torch.device, seconds_per_byte: float = 0.0) -> None:
        super().__init__(0, 2, "twins")
        self._device, self._seconds_per_byte = device, seconds_per_byte
        self.bytes = 0
        """Sent so far."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._cycles_per_second = _cycles_per_second(device) if device.type == "cuda" else 0.0

    def private(self) -> "Twins":
        """Return this group: nobody else uses it."""
        return self

    def get_group_store(self) -> Any:
        """Refuse: the other rank would give no signs of life there."""
        raise RuntimeError("twins have no store")

    def perform(self, call: Call) -> dist.Work:
        """Queue the collective."""
        self.bytes += call.sent_bytes
        if self._stream is None:
            _mirror(call)
            return CompletedWork(call.outputs)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            if cycles := int(self._seconds_per_byte * call.sent_bytes * self._cycles_per_second):
                torch.cuda._sleep(cycles)
            _mirror(call)
            return QueuedWork(call)


def _mirror(call: Call) -> None:
    """Write what a collective gives where both ranks contribute the same."""
    name, own = call.operation.name, torch.cat([one.flatten() for one in call.inputs])
    sums = name in ("all_reduce", "reduce_scatter") and call.reduction == dist.ReduceOp.SUM
    whole = torch.cat([own] * (call.world_size if name == "all_gather" else 1))
    if name == "all_to_all":
        whole = own[: own.numel() // call.world_size].repeat(call.world_size)
    reached = 0
    for output in call.outputs:
        part = whole[reached : reached + output.numel()].view_as(output)
        output.copy_(part * call.world_size if sums else part)
        reached += output.numel()


class QueuedWork(dist.Work):
    """A collective on a stream.

    Args:
        call: Its tensors live until it is waited for.
    """

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call: Call | None = call
        self._outputs = call.outputs
        self._end = torch.cuda.Event()
        self._end.record()

    def is_completed(self) -> bool:
        """Whether the device has done it."""
        return self._end.query()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Order the caller's stream after it."""
        torch.cuda.current_stream().wait_event(self._end)
        self._call = None
        return True

    def result(self) -> list[Tensor]:
        """The tensors that it writes."""
        return self._outputs


def network(device: torch.device, width: int = 64, seed: int = 0) -> nn.Module:
    """Return a small network, always the same."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 4)).to(device)


def batches(device: torch.device, count: int, seed: int = 1) -> list[Tensor]:
    """Return batches of the network's inputs."""
    draws = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 16, generator=draws).to(device) for _ in range(count)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return a loss that trains it."""
    return nn.functional.cross_entropy(model(batch).float(), batch[:, :4].argmax(1))


def trained(
    device: torch.device,
    strategy: st.Strategy,
    updates: int = 6,
    waits: bool = False,
    data: int = 1,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2),
    before: Callable[[int], None] = lambda index: None,
    **settings: Any,
) -> list[Tensor]:
    """Return the parameters after a training on `data`, a seed; `waits` leaves nothing of a device beside anything."""
    model = network(device)
    parallel = st.DataParallel(
        model, optimizer(model.parameters()), strategy, micro_batches=MICRO_BATCHES, **settings
    )
    for index, batch in enumerate(parallel.feed(batches(device, updates * MICRO_BATCHES, data))):
        before(index)
        parallel.backward(loss_of(model, batch))
        if waits:
            synchronize(device)
    parallel.finish()
    expect(parallel.steps == updates, f"expected {updates} updates, found {parallel.steps}")
    return [parameter.detach().cpu() for parameter in model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Return whether all bits are equal."""
    return all(map(torch.equal, one, other))


@contextmanager
def alone_in_a_group(device: torch.device) -> Iterator[None]:
    """Make a default group of this process, over NCCL on CUDA."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_one_device() -> StagedGroup:
    """Return a group of all ranks for tensors of one device that they share."""
    return StagedGroup(private_group(dist.group.WORLD))
