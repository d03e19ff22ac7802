"""Steps per second of every echo plan over loaders that wait, against a cached batch and the bare loader.

    python benchmarks/echo.py --out benchmarks/results/DATE-echo-speed

Four parts, each with a file PART.json:

    overhead   microseconds per use that EchoLoader adds to a loop over batches that are there already
    one        a step of fixed work, and a loader that takes `ratio` times as long, steady or irregular
    virtual    1 to 8 ranks of the virtual cluster that exchange gradients after every step, each over a store of its
               own; all times are modelled, so it may run on a busy machine, for about ten minutes
    two        `stretto train digits-resnet` on two local workers that exchange gradients after every step

The loader sleeps, like one that waits for a store, and so takes no processor time from the step. On one rank every arm
takes turns with a cached batch, in blocks of steps. Where MONAI can be imported (`pip install monai --no-deps`), the
overhead of its ThreadDataLoader is measured too. All parts but `virtual` take about twenty minutes of an idle machine.
"""

import argparse
import importlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from stretto import Auto, Bernoulli, DataParallel, EchoLoader, EchoOptions, Even, Ready, ZeRO1
from stretto.machine import describe_environment
from stretto_lab.observe import replace_json
from stretto_lab.recipes import DigitsResNet
from stretto_lab.train.configuration import RunConfig
from stretto_lab.train.launch import Ranks, train
from stretto_lab.train.slow_loader import SlowStore
from stretto_lab.virtual import Compute, VirtualCluster, VirtualGroup, VirtualStore, parse_network

RATIOS = (0.5, 1.0, 1.5, 2.5, 5.0)
"""L / C, the time of a load over that of a step; below one there is nothing to gain, and nothing should be lost."""
READY = Ready(max_uses=64)
"""With a bound that is never reached: at a ratio of 5 the default bound of 4 would make the device wait."""


class Sleeper:
    """Gives one batch without end, each after a pause."""

    def __init__(self, store: SlowStore, seed: int) -> None:
        self.store = store
        self.seed = seed

    def __iter__(self) -> Iterator[torch.Tensor]:
        batch = torch.zeros(1)
        for seconds in self.store.durations(self.seed):
            time.sleep(seconds)
            yield batch


class Work:
    """A step of fixed work: as many products of matrices as fill about `milliseconds`."""

    def __init__(self, milliseconds: float) -> None:
        self.matrix = torch.eye(192)
        self.products = 1
        single = min(self._timed() for _ in range(200))
        self.products = max(1, round(milliseconds / 1000 / single))
        self.seconds = statistics.median(self._timed() for _ in range(50))

    def __call__(self) -> None:
        for _ in range(self.products):
            torch.mm(self.matrix, self.matrix, out=self.matrix)

    def _timed(self) -> float:
        started = time.perf_counter()
        self()
        return time.perf_counter() - started


def block_seconds(batches: Iterator[Any], work: Work, steps: int) -> float:
    """Return the seconds of `steps` rounds of a loop that works once per batch."""
    started = time.perf_counter()
    for _ in range(steps):
        next(batches)
        work()
    return time.perf_counter() - started


def against_cached(
    batches: Iterator[Any], work: Work, settle: int, steps: int, blocks: int
) -> dict[str, Any]:
    """Return the speed of an arm as shares of that with a cached batch, block by block.

    Blocks of both take turns. An arm's block is compared with the mean of the cached ones before and after it, because
    the machine's own speed drifts by more than what is to be measured. During a cached block the arm's reader reads as
    far ahead as it may; `settle` steps use that up before a block of the arm begins.
    """
    cached = iter(lambda: 0, None)
    before = block_seconds(cached, work, steps)
    shares = []
    for _ in range(blocks):
        block_seconds(batches, work, settle)
        own = block_seconds(batches, work, steps)
        after = block_seconds(cached, work, steps)
        shares.append((before + after) / 2 / own)
        before = after
    return {"median": statistics.median(shares), "low": min(shares), "high": max(shares), "shares": shares}


def arms(ratio: float) -> dict[str, Callable[[Sleeper], Iterable[Any]]]:
    """Return what is compared at L / C = `ratio`."""
    uses = max(1.0, ratio)

    def echo(plan: Any) -> Callable[[Sleeper], Iterable[Any]]:
        return lambda loader: EchoLoader(loader, plan)

    return {
        "bare": lambda loader: loader,
        "read ahead": echo(Even(1)),
        "even": echo(Even(uses)),
        "bernoulli": echo(Bernoulli(1 / uses)),
        "ready": echo(READY),
        "auto": echo(Auto(max_uses=8, window=24)),
    }


WAITING = ("bare", "read ahead")
"""Arms that wait for every batch: their blocks take long, and two of them tell enough."""


def one_rank(milliseconds: float, steps: int, blocks: int) -> list[dict[str, Any]]:
    """Measure all arms at all ratios, steady and irregular."""
    work = Work(milliseconds)
    found = []
    for ratio in RATIOS:
        for jitter in (0.0, 1.0):
            store = SlowStore(milliseconds=1000 * ratio * work.seconds, jitter=jitter)
            shares = {}
            for name, arm in arms(ratio).items():
                batches = iter(arm(Sleeper(store, seed=0)))
                if name == "auto":
                    block_seconds(batches, work, 3 * 24)  # its measurements, without echo
                settle = 2 + round(2 * ratio)
                shares[name] = against_cached(
                    batches, work, settle, steps, min(blocks, 2) if name in WAITING else blocks
                )
            found.append({"ratio": ratio, "jitter": jitter, "step_seconds": work.seconds, "shares": shares})
            medians = "  ".join(f"{name} {share['median']:.1%}" for name, share in shares.items())
            print(f"L/C {ratio:3} jitter {jitter}: {medians}", flush=True)
    return found


def overhead(uses: int = 20_000, repeats: int = 7) -> dict[str, float]:
    """Return the microseconds per use of a loop over batches that are there, also for the bare loop."""
    batch = {"inputs": torch.zeros(4), "targets": torch.zeros(4)}
    fresh = [batch] * uses
    quarter = fresh[: uses // 4]
    arms: dict[str, Callable[[], Iterable[Any]]] = {
        "bare": lambda: fresh,
        "even 1, ahead 0": lambda: EchoLoader(fresh, Even(1), options=EchoOptions(ahead=0)),
        "even 1": lambda: EchoLoader(fresh, Even(1)),
        "even 4": lambda: EchoLoader(quarter, Even(4)),
        "bernoulli 0.25": lambda: islice(EchoLoader(fresh, Bernoulli(0.25)), uses),
        "DataLoader": lambda: DataLoader(quarter, batch_size=1, collate_fn=_only),
        "DataLoader, even 4": lambda: EchoLoader(
            DataLoader(quarter, batch_size=1, collate_fn=_only), Even(4)
        ),
    }
    if threaded := _threaded_loader():
        arms["MONAI, repeats 4"] = lambda: threaded(
            quarter, batch_size=1, collate_fn=_only, num_workers=0, repeats=4
        )
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, arm in arms.items():
            started = time.perf_counter()
            count = sum(1 for _ in arm())
            times[name].append((time.perf_counter() - started) / count * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def _only(samples: list[Any]) -> Any:
    return samples[0]


def _threaded_loader() -> Callable[..., Iterable[Any]] | None:
    """Return MONAI's loader that repeats batches, where MONAI is installed."""
    try:
        return importlib.import_module("monai.data").ThreadDataLoader
    except ModuleNotFoundError as error:
        if error.name != "monai":
            raise
        return None


def virtual_ranks(steps: int, settle: int = 40) -> list[dict[str, Any]]:
    """Return the modelled speed of every arm as a share of that with a cached batch, on 1 to 8 ranks."""
    found = []
    for ranks in (1, 2, 4, 8):
        cached = virtual_seconds(ranks, steps, settle, lambda store: store, store=None)["seconds"]
        for ratio in RATIOS:
            for jitter in (0.0, 1.0):
                store = SlowStore(milliseconds=1000 * ratio * cached, jitter=jitter)
                shares = {}
                for name, arm in virtual_arms(ratio).items():
                    measured = virtual_seconds(ranks, steps, settle, arm, store)
                    shares[name] = {"share": cached / measured["seconds"], **measured}
                found.append(
                    {
                        "ranks": ranks,
                        "ratio": ratio,
                        "jitter": jitter,
                        "step_seconds": cached,
                        "shares": shares,
                    }
                )
                told = "  ".join(f"{name} {share['share']:.1%}" for name, share in shares.items())
                print(f"{ranks} ranks L/C {ratio:3} jitter {jitter}: {told}", flush=True)
    return found


def virtual_arms(ratio: float) -> dict[str, Callable[[Any], Iterable[Any]]]:
    """Return what is compared on the virtual cluster."""
    chosen = {name: arms(ratio)[name] for name in ("bare", "read ahead", "even", "ready")}
    deep = EchoOptions(ahead=8)
    return {
        **chosen,
        "even, 8 ahead": lambda loader: EchoLoader(loader, Even(max(1.0, ratio)), options=deep),
        "ready, 4 uses": lambda loader: EchoLoader(loader, Ready()),
    }


def virtual_seconds(
    ranks: int, steps: int, settle: int, arm: Callable[[Any], Iterable[Any]], store: SlowStore | None
) -> dict[str, Any]:
    """Return the modelled seconds per step, the most uses of a batch, and fresh batches per step.

    Args:
        ranks: Number of ranks.
        steps: Steps that are timed.
        settle: Steps before them, which are not.
        arm: Wraps the loader.
        store: Where batches come from, for each rank with other irregularities; None gives a batch that is there.
    """

    def program(rank: int, group: VirtualGroup) -> tuple[int, int, int]:
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batches: Any = itertools.repeat(torch.ones(1, 64))
        if store is not None:
            batches = VirtualStore(batches, group, store.durations(rank))
        loader = arm(batches)
        begun, most = 0, 0
        with DataParallel(model, optimizer, ZeRO1(), micro_batches=1, group=group) as parallel:
            for step, batch in enumerate(islice(parallel.feed(loader), settle + steps)):
                begun = group.now_ns if step == settle else begun
                most = max(most, getattr(loader, "use_index", 1))
                parallel.backward(model(batch).square().mean())
            parallel.finish()
        return group.now_ns - begun, most, getattr(loader, "fresh_batches", settle + steps)

    compute = Compute(micro_batch_ns=10_000_000)
    values = VirtualCluster(ranks, parse_network("1gbit,50us"), compute).run(program).values
    return {
        "seconds": max(elapsed for elapsed, _, _ in values) / 1e9 / steps,
        "most_uses": max(most for _, most, _ in values),
        "fresh_per_step": sum(fresh for _, _, fresh in values) / ranks / (settle + steps),
    }


def two_ranks(
    seconds: float, repeats: int, ratios: Sequence[float], jitters: Sequence[float]
) -> list[dict[str, Any]]:
    """Measure runs of two workers, each with a slow loader of its own, between two runs with a fast loader.

    A run is compared with the mean of the fast ones before and after, because the machine's own speed drifts.
    """
    ranks = Ranks.local(2)
    task = DigitsResNet()

    def measured(echo: str, slow_loader: str) -> dict[str, Any]:
        run = RunConfig(task=task, strategy="zero1", micro_batches=1, seconds=seconds, evaluate_every=None,
                        checkpoint_every=None, echo=echo, slow_loader=slow_loader)  # fmt: skip
        outcome = train(ranks, run, shows_progress=False)
        return {"echo": echo, "slow_loader": slow_loader, "samples_per_second": outcome.samples_per_second,
                "fresh": outcome.fresh_batches, "echoed": outcome.echoed_batches,
                "wait_seconds": outcome.wait_seconds}  # fmt: skip

    found = []
    before = measured("none", "none")["samples_per_second"]
    for ratio, jitter, turn in itertools.product(ratios, jitters, range(repeats)):
        slow = f"{1000 * ratio * 2 * task.batch / before:.2f},jitter={jitter}"
        plans = ("none", f"even:uses={max(1.0, ratio)}", "ready:max_uses=64")
        runs = [measured(echo, slow) for echo in plans]
        after = measured("none", "none")["samples_per_second"]
        fast = (before + after) / 2
        for run in runs:
            share = run["samples_per_second"] / fast
            found.append({**run, "ratio": ratio, "jitter": jitter, "repeat": turn, "share": share})
            print(f"two ranks, L/C {ratio} jitter {jitter}: echo {run['echo']:26} {share:.1%}", flush=True)
        before = after
    return found


def main() -> None:
    """Measure the parts, and write a file after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument("--milliseconds", type=float, default=10.0, help="duration of a step")
    parser.add_argument("--steps", type=int, default=50, help="in a block, on one rank")
    parser.add_argument("--blocks", type=int, default=5, help="of every arm, in turns with a cached batch")
    parser.add_argument("--virtual-steps", type=int, default=400, help="of every arm, on virtual ranks")
    parser.add_argument("--seconds", type=float, default=8.0, help="duration of a measurement on two ranks")
    parser.add_argument("--repeats", type=int, default=2, help="of all measurements on two ranks")
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=[0.5, 1.5, 2.5, 5.0], help="L / C, of two ranks"
    )
    parser.add_argument(
        "--jitters", type=float, nargs="+", default=[0, 1], help="of the loaders of two ranks"
    )
    parser.add_argument("--parts", nargs="+", default=["overhead", "one", "virtual", "two"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise Gloo looks up the machine's own name
    about = {"environment": describe_environment(), "options": vars(options) | {"out": ""}}
    parts: dict[str, Callable[[], Any]] = {
        "overhead": overhead,
        "one": lambda: one_rank(options.milliseconds, options.steps, options.blocks),
        "virtual": lambda: virtual_ranks(options.virtual_steps),
        "two": lambda: two_ranks(options.seconds, options.repeats, options.ratios, options.jitters),
    }
    for name in options.parts:
        found = parts[name]()
        replace_json(options.out / f"{name}.json", {**about, name: found})
        if name == "overhead":
            for loop, microseconds in found.items():
                print(f"{loop:16} {microseconds:7.2f} us per use")


if __name__ == "__main__":
    main()
