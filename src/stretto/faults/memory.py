"""Faults in memory: between the steps of a job, what its tensors hold is damaged.

Opportunities lie where the job's own code does not run: a hook before or after one of its calls, put there from
outside, so that the job needs no door for it.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from stretto.faults.injector import Injector
from stretto.faults.plan import Site
from stretto.optimizer import ReducedGradient, ShardedOptimizer
from stretto.parallel import DataParallel


def strike_memory(parallel: DataParallel, injector: Injector) -> None:
    """Let the injector's faults strike the memory of a job from now on.

    | site | opportunity |
    |---|---|
    | gradient | after every micro-batch, in the accumulated gradient |
    | sum | after every sum of contributions |
    | reduced gradient | after every exchange of gradients, once guards have taken note of it |
    | masters, optimizer state | before the lane takes up a round |
    | step | after every optimizer step |
    | published values | after masters have been written into the outgoing buffer |
    | shown parameters | after every micro-batch |
    """
    compute = parallel.compute
    lane, owner = compute.lane, compute.lane.owner
    exchange: Any = lane.exchange

    def before_round(*_: Any) -> None:
        injector.offer("masters", owner.masters)
        injector.offer("optimizer state", list(_state(owner)))

    def before_counting(*_: Any) -> None:
        injector.offer("gradient", compute.accumulation.buffer.flats)
        injector.offer("shown parameters", [p.detach() for p in compute.guarded.parameters])

    def after_reduction(_: None, gradient: ReducedGradient, *__: Any) -> None:
        injector.offer("reduced gradient", gradient.sums)

    def after_publishing(_: None, flats: Sequence[Tensor]) -> None:
        injector.offer(
            "published values",
            [
                flats[bucket.set_index][low:high]
                for bucket, (low, high) in zip(owner.layout.buckets, owner.ranges, strict=True)
            ],
        )

    def committed(site: Site) -> int:
        return compute.steps if site in ("gradient", "shown parameters") else lane.watch.step

    injector.committed = committed
    _before(lane, "advance", before_round)
    _before(compute, "contribute", before_counting)
    _after(lane.sentry, "reduced", after_reduction)
    _after(owner, "step", lambda *_: injector.offer("step", owner.masters))
    _after(owner, "publish", after_publishing)
    _after(owner, "preview", lambda _, *call: after_publishing(None, call[-1]))
    if hasattr(exchange, "add_up"):
        _after(exchange, "add_up", lambda _, contributions, total: injector.offer("sum", [total]))


def _state(owner: ShardedOptimizer) -> Iterator[Tensor]:
    for segment in owner.segments:
        for value in owner.optimizer.state.get(segment.master, {}).values():
            if isinstance(value, Tensor):
                yield value


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
