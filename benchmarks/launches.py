"""What a bucket costs the host: launches, calls that wait for the device, and time of the communication lane.

    python benchmarks/launches.py --device cpu
    python benchmarks/launches.py --device cpu --before OTHER/src      (code of another commit, in turns with this)

One process after the other, one rank, one thread. Each job is run with few buckets and with many, all of 64 elements,
where work itself takes no time; what a bucket costs is the difference over the number of buckets that it has more. The
first line is what PyTorch itself takes of it: to start and to wait for a bucket's two collectives, on a backend of its
own that does nothing. The second is the same on the group of a lone rank, which is written in Python and which all
jobs here are on. Launches are PyTorch's operations on the lane that are no views: on a device each is a kernel or a
few. Waits are those of both lanes, counted as `synchronising.py` says, and what a round has without
any bucket is shown beside. Time is the processor's, of the lane's thread, in microseconds: in a turn the median over
updates, and of the turns median and range. Launches and waits are counted in the first turn; they are the same in
all.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from synchronising import Synchronisations
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import stretto as st
from stretto.engine.on_device import choose_runtime
from stretto.engine.runtime import Pending, Runtime, RuntimeOver
from stretto.groups import SoloGroup
from stretto.groups.collectives import method_of

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
    """Of a bucket, in one turn."""

    microseconds: float
    launches: float | None = None
    waits: float | None = None
    waits_without: float | None = None
    """Of an update that has no bucket."""


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


def counts_of(
    strategy: st.Strategy, buckets: int, device: torch.device, settings: dict[str, Any]
) -> tuple[float, float]:
    """Return the launches and the waits of an update."""
    group, operations = WatchedGroup(device, counts=True), []
    trained(strategy, group, buckets, lambda _: operations.append(group.operations.count), device, settings)
    counted, waits = Synchronisations(device), []
    with counted.watching():
        after_update = lambda _: waits.append(counted.lines.total())  # noqa: E731  # as its neighbours are
        trained(strategy, counted.on(SoloGroup()), buckets, after_update, device, settings)
    return per_update(operations), per_update(waits)


def microseconds_of(
    strategy: st.Strategy, buckets: int, device: torch.device, settings: dict[str, Any]
) -> float:
    """Return what an update takes of the processor, on the lane."""
    timed, seconds = WatchedGroup(device, counts=False), []
    trained(strategy, timed, buckets, lambda _: seconds.append(timed.seconds), device, settings)
    return 1e6 * per_update(seconds)


def bare_microseconds(device: torch.device) -> float:
    """Return what an all-to-all and an all-gather over two ranks take the host, where nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        return microseconds_of_collectives(dist.group.WORLD, device)
    finally:
        dist.destroy_process_group()


def microseconds_of_collectives(group: Any, device: torch.device) -> float:
    """Return what a bucket's two collectives take the host by themselves: the least of several runs."""
    whole, own = (torch.zeros(NUMEL // parts, device=device) for parts in (1, group.size()))
    send, gather = method_of(group, "all_to_all_single"), method_of(group, "all_gather_single")
    found = []
    for _ in range(UPDATES):
        started = time.thread_time()
        for _ in range(MANY):
            send(whole, whole, [], []).wait()
            gather(whole, own).wait()
        found.append((time.thread_time() - started) / MANY)
    return 1e6 * min(found)


def measure(device: torch.device, *, counts: bool) -> dict[str, Cost]:
    """Return what a bucket costs, by row; launches and waits only where they are to be counted."""
    nothing = [0.0] * 3 if counts else []
    found = {
        "two collectives alone": Cost(bare_microseconds(device), *nothing),
        "those of a lone rank": Cost(microseconds_of_collectives(SoloGroup(), device), *nothing),
    }
    for name, (strategy, settings) in ROWS.items():
        few, many = (microseconds_of(strategy, buckets, device, settings) for buckets in (FEW, MANY))
        counted: list[float] = []
        if counts:
            less, more = (counts_of(strategy, buckets, device, settings) for buckets in (FEW, MANY))
            counted = [(large - small) / (MANY - FEW) for small, large in zip(less, more, strict=True)]
            counted.append(less[1] - FEW * counted[1])
        found[name] = Cost((many - few) / (MANY - FEW), *counted)
    return found


def take_turn(code: Path, device: str, *, counts: bool) -> dict[str, Cost]:
    """Measure the code of a folder in a process of its own."""
    command = [sys.executable, __file__, "--device", device, "--one-turn", "counts" if counts else "times"]
    environment = os.environ | {"PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return {name: Cost(*cost) for name, cost in json.loads(done.stdout).items()}


def show(codes: dict[str, Path], found: dict[str, list[dict[str, Cost]]]) -> None:
    """Print a row for each job and code."""
    print("per bucket and update             launches  waits  waits without   microseconds")
    for name in found[next(iter(codes))][0]:
        for which in codes:
            first, times = found[which][0][name], [turn[name].microseconds for turn in found[which]]
            print(
                f"{name:24s} {which:8s} {first.launches:8.1f} {first.waits:6.2f} {first.waits_without:14.1f}"
                f"   {statistics.median(times):.0f} ({min(times):.0f} to {max(times):.0f})"
            )


def main() -> None:
    """Measure in turns, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3, help="each in a process of its own")
    parser.add_argument(
        "--before", type=Path, help="a folder with other code of the package, to compare with"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--one-turn", choices=["counts", "times"], help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one_turn:
        device = torch.device(chosen.device)
        if device.type == "cuda" and device.index is None:  # a thread is told which one
            device = torch.device("cuda", torch.cuda.current_device())
        torch.set_num_threads(1)
        print(json.dumps(measure(device, counts=chosen.one_turn == "counts")))
        return
    codes = {"before": chosen.before} if chosen.before else {}
    codes["now"] = Path(st.__file__).parents[1]
    found: dict[str, list[dict[str, Cost]]] = {which: [] for which in codes}
    load = [os.getloadavg()[0]]
    for turn in range(chosen.turns):
        for which, code in codes.items():
            found[which].append(take_turn(code, chosen.device, counts=turn == 0))
        load.append(os.getloadavg()[0])
    show(codes, found)
    print(f"{chosen.turns} turns; the machine's load was {min(load):.1f} to {max(load):.1f}")


if __name__ == "__main__":
    main()
