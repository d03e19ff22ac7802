"""What a bucket costs the host: launches, calls that wait for the device, and time of the communication lane.

    python benchmarks/launches.py --device cpu

One process, one rank, one thread. Each job is run with few buckets and with many, all of 64 elements, where work itself
takes no time; what a bucket costs is the difference over the number of buckets that it has more. The first line is what
PyTorch itself takes of it: to start and to wait for a bucket's two collectives, on a backend of its own that does
nothing. Launches are PyTorch's operations on the lane that are no views: on a device each is a kernel or a few. Waits
are those of both lanes, counted as `stretto_lab.testing.synchronising` says, and what a round has without any bucket is
shown beside. Time is the processor's, of the lane's thread, in microseconds: the median over updates, and the least of
several runs.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import stretto as st
from stretto.engine.runtime import Pending, Runtime, RuntimeOver, choose_runtime
from stretto.groups import SoloGroup
from stretto.groups.collectives import method_of
from stretto_lab.testing.synchronising import Synchronisations

T = TypeVar("T")
FEW, MANY = 50, 200
"""Buckets."""
WARM_UP, UPDATES = 4, 12
NUMEL = 64
ROWS: dict[str, tuple[st.Strategy, dict[str, Any]]] = {
    "zero1": (st.ZeRO1(), {}),
    "ddp": (st.DDP(), {}),
    "wp": (st.WeightPrediction(), {}),
    "acco": (st.ACCO(), {}),
    "zero1 int8": (st.ZeRO1(), {"wire": "int8"}),
    "zero1 verified": (st.ZeRO1(), {"options": st.Options(bucket_bytes=4 * NUMEL, verified=True)}),
    "zero1 guards": (st.ZeRO1(), {"guards": "standard"}),
    "acco guards": (st.ACCO(), {"guards": "standard"}),
}


class Cost(NamedTuple):
    """Of one update."""

    launches: float
    waits: float
    microseconds: float


class Operations(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        makes_nothing = func.is_view or func.overloadpacket.__name__.startswith(("empty", "detach"))
        self.count += not makes_nothing
        return func(*args, **(kwargs or {}))


class WatchedRuntime(RuntimeOver):
    """A lane's runtime whose work is counted and timed."""

    def __init__(self, runtime: Runtime, group: "WatchedGroup") -> None:
        super().__init__(runtime)
        self._group = group

    def spawn(self, work: Callable[[], T]) -> Pending[T]:
        """Start work, and note what it takes."""

        def watched() -> T:
            with self._group.watching():
                return work()

        return super().spawn(watched)


class WatchedGroup(SoloGroup):
    """One rank, whose lane is watched."""

    def __init__(self, device: torch.device, *, counts: bool) -> None:
        super().__init__()
        self._device = device
        self.operations = Operations()
        self.seconds = 0.0
        self._counts = counts

    def private(self) -> "WatchedGroup":
        """Return this group: nobody else uses it."""
        return self

    def lane_runtime(self, *, overlaps: bool) -> Runtime:
        """Return what the lane of a job runs on."""
        return WatchedRuntime(choose_runtime(SoloGroup(), self._device, overlaps=overlaps), self)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count and time the block."""
        with self.operations if self._counts else nullcontext():
            started = time.thread_time()
            yield
            self.seconds += time.thread_time() - started


def trained(
    strategy: st.Strategy,
    group: Any,
    buckets: int,
    after_update: Callable[[int], None],
    device: torch.device,
    settings: dict[str, Any],
) -> None:
    """Train a model of so many buckets."""
    model = nn.ParameterList([nn.Parameter(torch.randn(NUMEL, device=device)) for _ in range(buckets)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    micro_batches = 2 if strategy.name == "acco" else 1
    parallel = st.DataParallel(
        model, optimizer, strategy, micro_batches=micro_batches, group=group,
        **({"options": st.Options(bucket_bytes=4 * NUMEL)} | settings),
    )  # fmt: skip
    for index in range(WARM_UP + UPDATES):
        for _ in range(micro_batches):
            parallel.backward(torch.stack([parameter.sum() for parameter in model]).sum())
        after_update(index)
    if len(parallel.job.layout.buckets) != buckets:
        raise SystemExit(f"expected {buckets} buckets, found {len(parallel.job.layout.buckets)}")
    parallel.finish()


def per_update(totals: list[float]) -> float:
    """Return the median of what updates after the first ones have added."""
    return statistics.median(after - before for before, after in itertools.pairwise(totals[WARM_UP:]))


def cost_of(strategy: st.Strategy, buckets: int, device: torch.device, settings: dict[str, Any]) -> Cost:
    """Return what an update costs."""
    group, operations = WatchedGroup(device, counts=True), []
    trained(strategy, group, buckets, lambda _: operations.append(group.operations.count), device, settings)
    counted, waits = Synchronisations(device), []
    with counted.watching():
        after_update = lambda _: waits.append(counted.lines.total())  # noqa: E731  # as its neighbours are
        trained(strategy, counted.on(SoloGroup()), buckets, after_update, device, settings)
    timed, seconds = WatchedGroup(device, counts=False), []
    trained(strategy, timed, buckets, lambda _: seconds.append(timed.seconds), device, settings)
    launches, waits_each, lasts = map(per_update, (operations, waits, seconds))
    return Cost(launches, waits_each, 1e6 * lasts)


def bare_microseconds(device: torch.device) -> float:
    """Return what an all-to-all and an all-gather over two ranks take the host, where nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        group, whole, own = (
            dist.group.WORLD,
            torch.zeros(NUMEL, device=device),
            torch.zeros(NUMEL // 2, device=device),
        )
        send, gather = method_of(group, "all_to_all_single"), method_of(group, "all_gather_single")
        found = []
        for _ in range(UPDATES):
            started = time.thread_time()
            for _ in range(MANY):
                send(whole, whole, [], []).wait()
                gather(whole, own).wait()
            found.append((time.thread_time() - started) / MANY)
    finally:
        dist.destroy_process_group()
    return 1e6 * min(found)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="runs of each job; the quickest counts")
    parser.add_argument("--device", default="cpu", type=torch.device, help="cpu or cuda")
    chosen = parser.parse_args()
    device = chosen.device
    if device.type == "cuda" and device.index is None:  # a thread is told which one
        device = torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(1)
    print("per bucket and update     launches  waits  microseconds    waits without buckets")
    print(
        f"{'two collectives alone':24s} {0.0:9.1f} {0.0:6.2f} {bare_microseconds(device):13.0f} {0.0:24.1f}",
        flush=True,
    )
    for name, (strategy, settings) in ROWS.items():
        best: list[Cost] = []
        for buckets in (FEW, MANY):
            found = [cost_of(strategy, buckets, device, settings) for _ in range(chosen.runs)]
            best.append(min(found, key=lambda cost: cost.microseconds))
        each = [(many - few) / (MANY - FEW) for few, many in zip(*best, strict=True)]
        rest = best[0].waits - FEW * each[1]
        print(f"{name:24s} {each[0]:9.1f} {each[1]:6.2f} {each[2]:13.0f} {rest:24.1f}", flush=True)


if __name__ == "__main__":
    main()
