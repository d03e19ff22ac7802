"""Which intervals does PAFT-Dyn choose, from a thousand parameters to a billion, and are they ‖g‖ / σ?

What ranks learn of their gradients is drawn from its exact distribution: no vector of the model's size is made. The
library's own code concludes from it (`stretto.averaging.probe`) and chooses (`PAFTDyn.interval_after`), average after
average. "before" is the rule that the library had up to commit 9b81026, on draws of what it looked at.

grid       d × σ² × ‖g‖ × ranks (64 ranks with ‖g‖ = 1), and "before" and the paper's estimate beside it
anywhere   all of these drawn log-uniformly, also between the points of the grid
real       10.8 million parameters on four virtual ranks, with noise on every rank's mean gradient

Ranks' own gradients have the squared norm M·‖g‖² (they are mostly their own, the worse case) in grid and anywhere.
Each setting is a line of runs.jsonl; one that is there is not made again. interval.json has the summary.

    python experiments/paft_interval.py --out benchmarks/results/DATE-paft-interval
"""

import argparse
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from papers.book import Book
from torch import distributed as dist
from torch import nn

import stretto as st
from stretto.averaging.probe import Conclusion, spread_of, whole
from stretto.engine.round import Round
from stretto.machine import describe_environment
from stretto.strategies.contract import Divergence
from stretto_lab.observe import replace_json
from stretto_lab.virtual import VirtualCluster

AVERAGES = 10
PROBE = st.PAFTDyn().probe
RATE = 0.1
"""Learning rate."""
MAXIMUM = 10_000
"""Longest interval, so that it hides nothing."""
NUMELS = tuple(10**power for power in range(3, 10))
VARIANCES = tuple(10.0**power for power in range(-6, 0))
NORMS = (0.1, 1.0, 10.0)
RANKS = (2, 4, 16, 64)
REAL = ((1e-1, 36), (1e-2, 36), (1e-3, 8))
"""Variance and updates of the real runs."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is drawn from."""

    part: str
    rule: str
    """now, paper, before (under SGD; with momentum its draws are the same) or before-adam."""
    numel: int
    variance: float
    norm: float
    ranks: int

    @property
    def wanted(self) -> float:
        """The right interval, as far as intervals go."""
        return min(max(self.norm / math.sqrt(self.variance), 1.0), float(MAXIMUM))

    @property
    def places(self) -> int:
        """Coordinates of the probe."""
        return min(PROBE, self.numel)


def settings() -> Iterator[Setting]:
    """Yield the grid, and settings anywhere between its points."""
    for numel, variance, norm, ranks in itertools.product(NUMELS, VARIANCES, NORMS, RANKS):
        if ranks < 64 or norm == 1:
            yield Setting("grid", "now", numel, variance, norm, ranks)
        if ranks == 4:
            yield Setting("grid", "paper", numel, variance, norm, ranks)
            yield Setting("grid", "before", numel, variance, norm, ranks)
            if norm == 1 and numel in NUMELS[::2]:
                yield Setting("grid", "before-adam", numel, variance, norm, ranks)
    rng = np.random.default_rng(0)
    for _ in range(500):
        numel, variance, norm = (10 ** rng.uniform(*span) for span in ((3, 9), (-6, -1), (-1, 1)))
        yield Setting("anywhere", "now", int(numel), variance, norm, int(rng.choice(RANKS)))


# What ranks learn of an interval of `updates` updates


def received(one: Setting, updates: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return the sums of what ranks have received at the probe, `(ranks, p)`: the gradient, and noise of their own."""
    drawn, again = np.unique(places(one, rng), return_inverse=True)
    deviation = math.sqrt(updates * one.variance)
    noise = rng.standard_normal((one.ranks, len(drawn)), np.float32)[:, again] * np.float32(deviation)
    return noise + np.float32(updates * one.norm / math.sqrt(one.numel))


def places(one: Setting, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return the coordinates of the probe, drawn with replacement, or all if there are no more."""
    return rng.integers(one.numel, size=PROBE) if one.numel > PROBE else np.arange(one.numel)


def products(one: Setting, updates: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return Σ <G_r, S + E_r> / W² by rank: <G_r, E_r> is normal, of deviation σ·√M·‖g‖ / M in an update."""
    deviation = math.sqrt(updates * one.variance / one.ranks) * one.norm
    return updates * one.norm**2 / one.ranks + deviation * rng.standard_normal(one.ranks)


def squared_distances(one: Setting, gain: float, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return ‖θ̄ - θ_r‖² at the probe, by rank, where a parameter has the variance `gain` times that of the noise."""
    noise = rng.standard_normal((one.ranks, one.places))
    return ((noise - noise.mean(0)) ** 2).sum(1) * one.variance * gain


# One controller after the other


def now(one: Setting, rng: np.random.Generator) -> list[int]:
    """Return the intervals that the library chooses."""
    dyn, conclusion = st.PAFTDyn(maximum=MAXIMUM), Conclusion()
    chosen = [dyn.first]
    for _ in range(AVERAGES):
        updates = chosen[-1]
        conclusion.add(updates, whole(products(one, updates, rng)), spread_of(received(one, updates, rng)))
        divergence = Divergence(
            are_equal=False,
            distances=(),
            gradient_norms=(),
            signal=conclusion.signal,
            variance=conclusion.variance,
        )
        chosen.append(dyn.interval_after(divergence))
    return chosen[1:]


def paper(one: Setting, rng: np.random.Generator) -> list[int]:
    """Return the intervals that the paper's estimate chooses under SGD."""
    dyn = st.PAFTDyn(maximum=MAXIMUM, estimate="paper")
    chosen = [dyn.first]
    for _ in range(AVERAGES):
        distances = np.sqrt(squared_distances(one, chosen[-1] * RATE**2, rng) * one.numel / one.places)
        norms = [math.sqrt(one.ranks) * one.norm] * one.ranks
        divergence = dataclasses.replace(
            Divergence.none(), are_equal=False, distances=tuple(distances), gradient_norms=tuple(norms)
        )
        chosen.append(dyn.interval_after(divergence))
    return chosen[1:]


def before(one: Setting, rng: np.random.Generator) -> list[int]:
    """Return the intervals of the old rule under SGD: σ² from distances, ‖g‖² from norms of noisy gradients."""
    return _before(one, rng, lambda updates: squared_distances(one, updates * RATE**2, rng))


def before_adam(one: Setting, rng: np.random.Generator) -> list[int]:
    """Return those under Adam, whose steps are made at the probe's coordinates (β 0.9 and 0.999)."""
    shape, mean = (one.ranks, one.places), np.float32(one.norm / math.sqrt(one.numel))
    first, second, step = np.zeros(shape, np.float32), np.zeros(shape, np.float32), 0

    def distances(updates: int) -> np.ndarray[Any, Any]:
        nonlocal step
        moved = np.zeros(shape, np.float32)
        for _ in range(updates):
            step += 1
            gradient = mean + np.float32(math.sqrt(one.variance)) * rng.standard_normal(shape, np.float32)
            first[:] = 0.9 * first + 0.1 * gradient
            second[:] = 0.999 * second + 0.001 * gradient**2
            moved += RATE * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
        return np.asarray(((moved - moved.mean(0)) ** 2).sum(1))

    return _before(one, rng, distances, maximum=100)


def _before(
    one: Setting,
    rng: np.random.Generator,
    distances: Callable[[int], np.ndarray[Any, Any]],
    maximum: int = MAXIMUM,
) -> list[int]:
    chosen = [st.PAFTDyn().first]
    for _ in range(AVERAGES):
        updates = chosen[-1]
        squares = distances(updates)
        variance = squares.mean() * one.ranks / ((one.ranks - 1) * one.places * updates * RATE**2)
        along = one.norm + math.sqrt(one.variance) * rng.standard_normal(one.ranks)
        norms = along**2 + one.variance * rng.chisquare(one.numel - 1, one.ranks)
        wanted = math.sqrt(max(0.0, norms.mean() - one.numel * variance) / variance)
        chosen.append(maximum if wanted >= maximum else max(1, round(wanted)))
    return chosen[1:]


RULES = {"now": now, "paper": paper, "before": before, "before-adam": before_adam}


def draw(one: Setting, draws: int) -> dict[str, Any]:
    """Return the record of a setting: the interval after ten averages in every draw."""
    rng = np.random.default_rng(list(repr(one).encode()))
    last = [RULES[one.rule](one, rng)[-1] for _ in range(1 if one.part == "anywhere" else draws)]
    wanted = min(one.wanted, 100.0) if one.rule == "before-adam" else one.wanted
    right = [1 / 1.5 <= chosen / wanted <= 1.5 for chosen in last]
    return {**dataclasses.asdict(one), "wanted": wanted, "intervals": last, "right": sum(right) / len(right)}


# The real run


def real(variance: float, updates: int) -> dict[str, Any]:
    """Train 10.8 million parameters on four virtual ranks, and return what is chosen and what it was to be."""
    ranks, started = 4, time.process_time()
    norms: list[float] = []
    """Of the mean gradient as it is summed, before the noise."""

    def program(rank: int, group: dist.ProcessGroup) -> list[st.Update]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 2560), nn.ReLU(), nn.Linear(2560, 10)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        options = st.Options(noise=st.Noise(variance))
        parallel = st.DataParallel(
            model, optimizer, st.PAFTDyn(first=4), micro_batches=1, group=group, options=options
        )
        replica = parallel.job.replica
        reduce = replica.reduce

        def noting(round: Round) -> None:
            reduce(round)
            if rank == 0:
                report = round.report
                norms.append(math.sqrt(report.norm_squared(replicated=True)) / report.weight)

        replica.reduce = noting  # type: ignore[method-assign]  # the norm is noisy later
        data = torch.Generator().manual_seed(1 + rank)
        directions = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
        seen = []
        for _ in range(updates):
            inputs = torch.randn(8, 64, generator=data)
            loss = nn.functional.cross_entropy(model(inputs), (inputs @ directions).argmax(1))
            update = parallel.backward(loss)
            if update is not None:
                seen.append(update)
        return seen

    seen = VirtualCluster(ranks).run(program).values[0]
    numel = 64 * 4096 + 4096 + 4096 * 2560 + 2560 + 2560 * 10 + 10
    averages, begin = [], 0
    for end, update in enumerate(seen, start=1):
        if update.noise is not None:
            norm = math.sqrt(statistics.mean(one**2 for one in norms[begin:end]))
            averages.append({
                "update": end, "gradient_norm": norm, "noise": update.noise, "divergence": update.divergence,
                "wanted": norm / math.sqrt(variance), "interval": update.interval,
            })  # fmt: skip
            begin = end
    return {
        "part": "real", "variance": variance, "numel": numel, "ranks": ranks, "updates": updates,
        "averages": averages, "cpu_seconds": time.process_time() - started,
    }  # fmt: skip


def summarise(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return shares of draws that are within a factor of 1.5, by rule, and the worst settings."""
    grid = [record for record in records if record["part"] == "grid"]
    shares = {}
    for rule in RULES:
        own = [record["right"] for record in grid if record["rule"] == rule]
        if own:
            shares[rule] = {
                "settings": len(own),
                "mean": statistics.mean(own),
                "least": min(own),
                "settings_with_nine_of_ten": sum(right >= 0.9 for right in own),
            }
    anywhere = [record for record in records if record["part"] == "anywhere"]
    spans = {}
    for low, high in ((0.0, 1.0), (1.0, 1.5), (1.5, 2.0), (2.0, 4.0), (4.0, math.inf)):
        own = [one["right"] for one in anywhere if low < one["norm"] / math.sqrt(one["variance"]) <= high]
        spans[f"{low:g} to {high:g}"] = {"draws": len(own), "right": statistics.mean(own) if own else None}
    return {
        "grid": shares,
        "below_nine_of_ten": [one for one in grid if one["rule"] == "now" and one["right"] < 0.9],
        "anywhere": {"right": statistics.mean(one["right"] for one in anywhere), "by_wanted": spans},
    }


def main() -> None:
    """Make what is missing, and summarise all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for runs.jsonl and interval.json")
    parser.add_argument("--draws", type=int, default=20, help="of every setting of the grid")
    parser.add_argument("--parts", default="real,drawn", help="what to make: the real runs, or what is drawn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    book = Book(options.out)
    for one in settings() if "drawn" in options.parts else ():
        if book.find(dataclasses.asdict(one)) is None:
            book.add(draw(one, options.draws))
    for variance, updates in REAL if "real" in options.parts else ():
        if book.find({"part": "real", "variance": variance}) is None:
            book.add(real(variance, updates))
            print(book.runs[-1], flush=True)
    if options.parts != "real,drawn":
        return
    report = {"draws": options.draws, **summarise(book.runs), "environment": describe_environment()}
    replace_json(options.out / "interval.json", report)


if __name__ == "__main__":
    main()
