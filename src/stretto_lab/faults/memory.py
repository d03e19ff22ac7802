"""Faults in memory: the tensors of a job are damaged between its steps.

Hooks before and after some of the job's calls are the opportunities. They are attached from outside, so the job's code
contains nothing about faults.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from stretto.flat import shard_of
from stretto.optimizer import ShardedOptimizer
from stretto.parallel import DataParallel
from stretto.strategies import Strategy
from stretto.strategies.contract import ACCUMULATIONS, Script
from stretto_lab.faults.injector import Injector
from stretto_lab.faults.plan import Site

ON_COMPUTE_LANE: tuple[Site, ...] = (
    "gradient",
    "values to be shown",
    "shown parameters",
    "frozen parameters",
    "buffers",
)
"""Sites on the compute lane, where an update counts once it is complete."""


def strike_memory(parallel: DataParallel, injector: Injector) -> None:
    """Inject the planned faults into the memory of a job from now on.

    | site | opportunity |
    |---|---|
    | gradient | after every micro-batch, in the accumulated gradient |
    | sum | after every sum of contributions |
    | reduced gradient | after every exchange of gradients, when guards have recorded it |
    | masters, optimizer state | before the lane begins a round |
    | step | after every optimizer step |
    | published values | after masters have been written into the outgoing buffer |
    | values to be shown | when a round is over on the lane, and before the model shows it |
    | shown parameters, frozen parameters, buffers that are no statistics | after every micro-batch |
    | error memory, anchor | before the lane begins a round |
    """
    job = parallel.job
    compute, comm, sharded = job.compute, job.comm, job.sharded

    def before_round(*_: Any) -> None:
        injector.offer("masters", sharded.masters)
        injector.offer("optimizer state", list(_state_tensors(sharded)))
        injector.offer("error memory", job.exchange.residuals)
        injector.offer("anchor", [anchor for _, anchor in job.replica.anchors(waits=False)])

    def before_counting(*_: Any) -> None:
        injector.offer("gradient", compute.accumulation.buffer.flats)
        injector.offer("shown parameters", [p.detach() for p in job.model.parameters])
        model = job.model.model
        frozen = [shard_of(p)[0].detach() for p in model.parameters() if not p.requires_grad]
        injector.offer("frozen parameters", frozen)
        injector.offer("buffers", list(_constant_buffers(model)))

    def after_publishing(_: None, flats: Sequence[Tensor]) -> None:
        injector.offer(
            "published values",
            [
                flats[bucket.set_index][low:high]
                for bucket, (low, high) in zip(sharded.layout.buckets, sharded.ranges, strict=True)
            ],
        )

    def committed(site: Site) -> int:
        return compute.rounds.steps if site in ON_COMPUTE_LANE else comm.progress.step

    injector.committed = committed
    _before(comm, "advance", before_round)
    _after(comm, "advance", lambda landing, *_: injector.offer("values to be shown", landing.buffer.flats))
    _before(compute, "count", before_counting)
    comm.strategy = cast(Strategy, _Struck(comm.strategy, injector))
    _after(sharded, "step", lambda *_: injector.offer("step", sharded.masters))
    _after(sharded, "publish", after_publishing)
    _after(sharded, "preview", lambda _, *call: after_publishing(None, call[-1]))
    exchange: Any = job.exchange
    if hasattr(exchange, "add_up"):
        _after(exchange, "add_up", lambda _, contributions, total: injector.offer("sum", [total]))


class _Struck:
    """A strategy whose reduced gradients are damaged on arrival, after the guards have read them."""

    def __init__(self, strategy: Strategy, injector: Injector) -> None:
        self._strategy = strategy
        self._injector = injector

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def update(self) -> Script:
        script, reply = self._strategy.update(), None
        while True:
            try:
                effect = script.send(reply)
            except StopIteration:
                return
            reply = yield effect
            if isinstance(effect, ACCUMULATIONS):
                self._injector.offer("reduced gradient", reply.sums)


def _state_tensors(sharded: ShardedOptimizer) -> Iterator[Tensor]:
    for segment in sharded.segments:
        for value in sharded.optimizer.state.get(segment.master, {}).values():
            if isinstance(value, Tensor):
                yield value


def _constant_buffers(model: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers that forward passes are not known to write: all except statistics."""
    for module in model.modules():
        if not isinstance(module, _NormBase):
            yield from (buffer.detach() for buffer in module.buffers(recurse=False))


def _before(holder: Any, name: str, hook: Callable[..., None]) -> None:
    called = getattr(holder, name)

    @functools.wraps(called)
    def with_hook(*args: Any, **named: Any) -> Any:
        hook(*args)
        return called(*args, **named)

    setattr(holder, name, with_hook)


def _after(holder: Any, name: str, hook: Callable[..., None]) -> None:
    called = getattr(holder, name)

    @functools.wraps(called)
    def with_hook(*args: Any, **named: Any) -> Any:
        result = called(*args, **named)
        hook(result, *args)
        return result

    setattr(holder, name, with_hook)
