"""Steps per second of every echo plan over loaders that wait, against a cached batch and the bare loader.

    python benchmarks/echo.py --out benchmarks/results/DATE-echo-speed

Three parts, one file echo.json:

    overhead   microseconds per use that EchoLoader adds to a bare loop over batches that are there already
    one rank   a step of fixed work, a loader that takes `ratio` times as long, steady or irregular
    two ranks  `stretto train digits-resnet` on two local workers that exchange gradients after every step

The loader sleeps, as one that waits for a store does, so that it takes no processor from the step. Arms run in turns.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from stretto import Auto, Bernoulli, EchoLoader, EchoOptions, Even, Ready
from stretto.recipes import DigitsResNet
from stretto.train.configuration import RunConfig
from stretto.train.environment import describe_environment
from stretto.train.launch import LocalRanks
from stretto.train.slow_loader import SlowStore

RATIOS = (0.5, 1.0, 1.5, 2.5, 5.0)
"""L / C; below one there is nothing to gain, and nothing should be lost."""
REACTIVE = Ready(pool=8, max_uses=64)
"""Without a bound that matters: at a ratio of 5 the default bound of 4 would rightly make the device wait."""


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


def steps_per_second(batches: Iterable[Any], work: Work, seconds: float, skip: int = 40) -> float:
    """Return the rate of a loop that works once per batch."""
    iterator = iter(batches)
    for _ in islice(iterator, skip):
        work()
    steps, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds:
        next(iterator)
        work()
        steps += 1
    return steps / passed


def arms(ratio: float) -> dict[str, Callable[[Sleeper], Iterable[Any]]]:
    """Return what is compared at L / C = `ratio`."""
    uses = max(1.0, ratio)

    def echo(plan: Any) -> Callable[[Sleeper], Iterable[Any]]:
        return lambda loader: EchoLoader(loader, plan)

    return {
        "cached": lambda loader: iter(lambda: 0, None),
        "bare": lambda loader: loader,
        "read ahead": echo(Even(1)),
        "even": echo(Even(uses)),
        "bernoulli": echo(Bernoulli(1 / uses)),
        "ready": echo(REACTIVE),
        "auto": echo(Auto(max_uses=8, window=24)),
    }


def one_rank(milliseconds: float, seconds: float, repeats: int) -> list[dict[str, Any]]:
    """Measure all arms at all ratios, steady and irregular."""
    work = Work(milliseconds)
    found = []
    for repeat in range(repeats):
        for ratio in RATIOS:
            for jitter in (0.0, 1.0):
                store = SlowStore(milliseconds=1000 * ratio * work.seconds, jitter=jitter)
                rates = {
                    name: steps_per_second(arm(Sleeper(store, seed=repeat)), work, seconds)
                    for name, arm in arms(ratio).items()
                }
                found.append({"ratio": ratio, "jitter": jitter, "repeat": repeat, "step_seconds": work.seconds,
                              "steps_per_second": rates})  # fmt: skip
                shares = "  ".join(f"{name} {rate / rates['cached']:.1%}" for name, rate in rates.items())
                print(f"L/C {ratio:3} jitter {jitter}: {shares}", flush=True)
    return found


def overhead(uses: int = 20_000, repeats: int = 7) -> dict[str, float]:
    """Return the microseconds per use of a loop over batches that are there; the bare loop's are in the result."""
    batch = {"inputs": torch.zeros(4), "targets": torch.zeros(4)}
    fresh = [batch] * uses
    arms: dict[str, Callable[[], Iterable[Any]]] = {
        "bare": lambda: fresh,
        "even 1, ahead 0": lambda: EchoLoader(fresh, Even(1), options=EchoOptions(ahead=0)),
        "even 1": lambda: EchoLoader(fresh, Even(1)),
        "even 4": lambda: EchoLoader(fresh[: uses // 4], Even(4)),
        "bernoulli 0.25": lambda: islice(EchoLoader(fresh, Bernoulli(0.25)), uses),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, arm in arms.items():
            started = time.perf_counter()
            count = sum(1 for _ in arm())
            times[name].append((time.perf_counter() - started) / count * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def two_ranks(seconds: float, repeats: int) -> list[dict[str, Any]]:
    """Measure runs of two workers whose loaders are irregular, each for itself."""
    ranks = LocalRanks(2)
    task = DigitsResNet()

    def rate(echo: str, slow_loader: str) -> dict[str, Any]:
        run = RunConfig(task=task, strategy="zero1", micro_batches=1, seconds=seconds, evaluate_every=None,
                        checkpoint_every=None, echo=echo, slow_loader=slow_loader)  # fmt: skip
        outcome = ranks.train(run, shows_progress=False)
        return {"echo": echo, "slow_loader": slow_loader, "samples_per_second": outcome.samples_per_second,
                "fresh": outcome.fresh_batches, "echoed": outcome.echoed_batches,
                "wait_seconds": outcome.wait_seconds}  # fmt: skip

    found = []
    for repeat in range(repeats):
        fast = rate("none", "none")
        step = 2 * task.batch / fast["samples_per_second"]
        found.append({**fast, "ratio": 0.0, "repeat": repeat})
        for ratio in (1.5, 2.5, 5.0):
            slow = f"{1000 * ratio * step:.2f},jitter=1"
            for echo in ("none", f"even:uses={ratio}", "ready:pool=8:max_uses=64"):
                measured = rate(echo, slow)
                found.append({**measured, "ratio": ratio, "repeat": repeat})
                share = measured["samples_per_second"] / fast["samples_per_second"]
                print(f"two ranks, L/C {ratio}: echo {echo:26} {share:.1%} of a fast loader", flush=True)
    return found


def main() -> None:
    """Measure, and write echo.json after every part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for echo.json")
    parser.add_argument("--milliseconds", type=float, default=10.0, help="duration of a step")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of a measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=["overhead", "one", "two"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise Gloo looks the machine's own name up
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"environment": describe_environment(), "options": vars(options) | {"out": ""}}
    parts: dict[str, Callable[[], Any]] = {
        "overhead": overhead,
        "one": lambda: one_rank(options.milliseconds, options.seconds, options.repeats),
        "two": lambda: two_ranks(2 * options.seconds, options.repeats),
    }
    for name in options.parts:
        report[name] = parts[name]()
        (options.out / "echo.json").write_text(json.dumps(report, indent=1) + "\n")
    for name, microseconds in report.get("overhead", {}).items():
        print(f"{name:16} {microseconds:7.2f} us per use")


if __name__ == "__main__":
    main()
