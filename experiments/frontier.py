"""Loss against bytes: what fewer bits, rarer exchanges and delays cost in held-out loss after equal samples.

    python experiments/frontier.py run --out benchmarks/results/DATE-frontier
    python experiments/frontier.py summarise --out benchmarks/results/DATE-frontier

All arms of a setting train a small language model on the same micro-batches in the same order, on the ranks of a
virtual cluster; seeds are paired. The learning rate is tuned, on a seed that serves for nothing else, for some
arms; the others take the rate of one of these (`Setting.tuned`).

How many seconds an update takes on a slow link does not change what is learnt from it, because counts are fixed. So
seconds are computed afterwards, by the prices of `stretto plan`: on links that are as slow, against computing, as real
ones were for two million parameters on one core (`CALIBRATED`).
"""

import argparse
import dataclasses
import functools
import itertools
import math
import runpy
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from frontier_arms import (
    CLIP_NORM,
    MICRO_BATCHES,
    POINTS,
    POWER_SGD,
    SAME_WIRE,
    SETTINGS,
    SYNCHRONOUS,
    TUNING_SEED,
    UPDATES,
    WARM_UP,
    Setting,
)
from papers.book import Book, Interval, difference, interval
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from stretto import DataParallel, Options
from stretto.groups import Link
from stretto.machine import describe_environment
from stretto_lab.observe import replace_json
from stretto_lab.plan import Machine, price
from stretto_lab.recipes import StdlibGPT
from stretto_lab.recipes.optimizers import Schedule
from stretto_lab.recipes.task import Task
from stretto_lab.train.arms import Arm, parse_arm
from stretto_lab.virtual import VirtualCluster

CALIBRATED = Machine(
    ranks=2, parameters=2_007_600, forward_seconds=0.0636, backward_seconds=0.1191, load_seconds=0.0,
    step_seconds=0.0015, link=Link(), cores=1.0,
    exchange_seconds={
        "fp32": 0.0060, "bf16": 0.0064, "int8": 0.0208, "int4": 0.0294, "int2": 0.0294, "largest": 0.0294,
        **{f"rotated{bits}": 0.0060 + 3.6 * (0.0294 - 0.0060) for bits in (4, 3, 2, 1)},
    },
)  # fmt: skip
"""What was measured of `stdlib-gpt` on a core of an AMD EPYC, benchmarks/results/2026-11-23-plan. Others as int4;
rotated ones take 3.6 times as long to pack and unpack, on a core that others were using too."""
PRICED_MICRO_BATCHES = 4
LINKS = {"1 Mbit/s": 1e6, "10 Mbit/s": 1e7, "37 Mbit/s": 3.7e7, "100 Mbit/s": 1e8, "1 Gbit/s": 1e9}
TARGET_SHARE = 2 / 3
"""Of all updates: the loss that `ddp` has then is the one that all arms are timed to."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What decides a run; the fields by which its record is found."""

    setting: str
    arm: str
    lr: float
    seed: int


def train(run: Run) -> dict[str, Any]:
    """Train once; return the curve of the held-out loss, and the bytes that rank 0 sent per update.

    Updates are counted in those of `MICRO_BATCHES`, so that all arms have as many samples after as many.
    """
    torch.set_num_threads(1)
    setting = SETTINGS[run.setting]
    program = _train_peer if run.arm == POWER_SGD else _train
    results = VirtualCluster(setting.ranks, seed=run.seed).run(
        lambda rank, group: program(run, setting, rank, group)
    )
    return results.values[0]


def _task(run: Run, setting: Setting, rank: int, times: int = 1) -> Task:
    config = StdlibGPT(
        size=setting.size,
        context=64,
        batch=setting.batch,
        lr=run.lr,
        schedule=Schedule(warmup=WARM_UP // times),
        evaluation_windows=512,
    )
    return config.build(rank, setting.ranks, run.seed, UPDATES // times)


def _is_point(step: int, updates: int) -> bool:
    """Return whether the model is evaluated after this update; after the last one it is when the job has ended."""
    return step < updates and step * POINTS // updates > (step - 1) * POINTS // updates


def times_batch(arm: Arm) -> int:
    """Return how many times as large the batch of an arm is as that of most."""
    return int(arm.settings.get("micro_batches", MICRO_BATCHES)) // MICRO_BATCHES


def _train(run: Run, setting: Setting, rank: int, group: Any) -> dict[str, Any]:
    arm = parse_arm(run.arm)
    times = times_batch(arm)
    updates = UPDATES // times
    task = _task(dataclasses.replace(run, lr=arm.settings.get("lr", run.lr)), setting, rank, times)
    options = Options(
        clip_norm=CLIP_NORM, wire=arm.wire, changes=arm.settings.get("changes"), bucket_bytes=2**17,
        ranks_per_node=arm.settings.get("ranks_per_node"),
    )  # fmt: skip
    parallel = DataParallel(
        task.model, task.optimizer, arm.strategy(), micro_batches=times * MICRO_BATCHES,
        scheduler=task.scheduler, group=group, options=options,
    )  # fmt: skip
    curve: list[tuple[int, float]] = []
    shown = 0
    for batch in parallel.feed(task.loader, updates):
        loss = task.loss(task.model, batch)
        update = parallel.backward(loss.value, loss.weight, loss.samples)
        if update is not None and _is_point(update.step, updates):
            before = sent_bytes(parallel)
            with parallel.settled():
                curve.append((times * update.step, task.evaluate(task.model) if rank == 0 else math.nan))
            shown += sent_bytes(parallel) - before  # replicas that drift are averaged to be looked at
    parallel.finish()
    curve.append((times * parallel.steps, task.evaluate(task.model) if rank == 0 else math.nan))
    return {"curve": curve, "sent_bytes": (sent_bytes(parallel) - shown) / UPDATES}


def sent_bytes(parallel: DataParallel) -> int:
    """Return the bytes that a rank has sent, or where there are nodes to other nodes."""
    by_node = parallel.options.ranks_per_node is not None
    return parallel.job.exchange.crossed_bytes if by_node else parallel.sent_bytes


def _train_peer(run: Run, setting: Setting, rank: int, group: Any) -> dict[str, Any]:
    task = _task(run, setting, rank)
    model = DistributedDataParallel(task.model, process_group=group, gradient_as_bucket_view=True)
    state = PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=WARM_UP)
    model.register_comm_hook(state, powerSGD_hook)
    curve: list[tuple[int, float]] = []
    batches = iter(task.loader)
    for step in range(1, UPDATES + 1):
        for micro_batch in range(MICRO_BATCHES):
            model.require_backward_grad_sync = micro_batch == MICRO_BATCHES - 1
            loss = task.loss(model, next(batches))
            (loss.value / MICRO_BATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        task.optimizer.step()
        task.optimizer.zero_grad()
        task.scheduler.step()
        if _is_point(step, UPDATES):
            curve.append((step, task.evaluate(task.model) if rank == 0 else math.nan))
    curve.append((UPDATES, task.evaluate(task.model) if rank == 0 else math.nan))
    factor = state.compression_stats()[0]
    whole = sum(parameter.numel() for parameter in model.parameters())
    sent = 4 * whole * (WARM_UP + (UPDATES - WARM_UP) / factor) / UPDATES
    return {"curve": curve, "sent_bytes": sent * 2 * (setting.ranks - 1) / setting.ranks}


def final(run: dict[str, Any]) -> float:
    """Return the held-out loss at the end, in nats."""
    return float(run["curve"][-1][1])


def planned(name: str, book: Book, seeds: int, arms: Sequence[str]) -> Iterator[Run]:
    """Yield the runs of a setting that are missing: first those that tune, then the arms, seed after seed."""
    setting = SETTINGS[name]
    leaders = {leader_of(name, arm) for arm in arms or setting.arms}
    tuning = [
        Run(name, arm, rate, TUNING_SEED) for arm in setting.tuned if arm in leaders for rate in setting.rates
    ]
    if missing := [run for run in tuning if not book.find(dataclasses.asdict(run))]:
        yield from missing
        return
    for seed in range(seeds):
        for arm in (arm for arm in setting.arms if not arms or arm in arms):
            run = Run(name, arm, rate_of(name, arm, book), seed)
            if not book.find(dataclasses.asdict(run)):
                yield run


def rate_of(name: str, arm: str, book: Book) -> float:
    """Return the learning rate of an arm: its own best one, that of the arm it goes with, or that of `ddp`."""
    setting, leader = SETTINGS[name], leader_of(name, arm)
    if leader not in setting.tuned:
        return rate_of("2-ranks", arm, book)
    losses = {
        rate: final(book.find({"setting": name, "arm": leader, "lr": rate, "seed": TUNING_SEED}) or {})
        for rate in setting.rates
    }
    return min(losses, key=losses.__getitem__)


def leader_of(name: str, arm: str) -> str:
    """Return the arm whose rate an arm takes."""
    tuned = SETTINGS[name].tuned
    return next((one for one, others in tuned.items() if arm in (one, *others)), SYNCHRONOUS)


def run_all(names: list[str], book: Book, seeds: int, arms: Sequence[str], processes: int) -> None:
    """Make the runs that are missing, some at a time; those of a setting whose tuning is done."""
    with ProcessPoolExecutor(processes, get_context("spawn"), register_sparse_wire) as pool:
        for name in names:
            while todo := list(planned(name, book, seeds, arms)):
                pending = {pool.submit(train, run): run for run in todo}
                for future, run in pending.items():
                    keep(book, run, future)


def keep(book: Book, run: Run, future: "Future[dict[str, Any]]") -> None:
    """Wait for a run, and write it down."""
    made = future.result()
    book.add({**dataclasses.asdict(run), **made})
    print(
        f"{run.setting} {run.arm} lr {run.lr:g} seed {run.seed}: {final(made):.4f}, "
        f"{made['sent_bytes']:,.0f} bytes",
        flush=True,
    )


def reached(curve: list[list[float]], target: float) -> float | None:
    """Return the updates at which the line between two evaluations crosses a loss; None where it never does."""
    for (step, loss), (following, below) in itertools.pairwise(curve):
        if below <= target:
            return step + (following - step) * max(0.0, loss - target) / (loss - below)
    return None


@functools.cache
def seconds(arm: str, ranks: int, link: Link, share_sent: float) -> float:
    """Return the price of an update's samples.

    That of PowerSGD is the price of `ddp` on a link that is as much faster as it sends less.
    """
    if arm == POWER_SGD:
        rate = link.bits_per_second
        arm, link = SYNCHRONOUS, Link(bits_per_second=None if rate is None else rate / share_sent)
    parsed = parse_arm(arm)
    each = parsed.settings.get("ranks_per_node", 1)
    machine = dataclasses.replace(CALIBRATED, ranks=ranks, ranks_per_node=each, link=link)
    times, settings = times_batch(parsed), {**parsed.settings}
    settings.pop("micro_batches", None)
    alone = dataclasses.replace(parsed, settings=settings)
    count = times * PRICED_MICRO_BATCHES
    return price(alone, machine, micro_batches=count, bucket_bytes=2**20).seconds / times


def compared(name: str, book: Book) -> dict[str, Any]:
    """Compare the arms of a setting, each at its rate, with synchronous ones on the seeds that they share."""
    setting = SETTINGS[name]
    begun = {run["arm"] for run in book.runs if run["setting"] == name and run["seed"] != TUNING_SEED}
    rates = {arm: rate_of(name, arm, book) for arm in setting.arms if arm in begun}
    runs: dict[str, dict[int, dict[str, Any]]] = {arm: {} for arm in rates}
    for run in book.runs:
        if run["setting"] == name and run["seed"] != TUNING_SEED and run["lr"] == rates.get(run["arm"]):
            runs[run["arm"]][run["seed"]] = run
    base = runs[SYNCHRONOUS]
    return {
        arm: {
            "lr": parse_arm(arm).settings.get("lr", rates[arm]),
            "seeds": sorted(found),
            "sent_bytes": statistics.fmean(run["sent_bytes"] for run in found.values()),
            "heldout_loss": interval([final(run) for run in found.values()]),
            "against_ddp": over(found, base),
            "against_same_wire": over(found, runs[SAME_WIRE[arm]]) if SAME_WIRE.get(arm) in runs else None,
            "multiples_of_free": multiples(arm, setting.ranks, found, base),
        }
        for arm, found in runs.items()
        if found
    }


def over(found: dict[int, dict[str, Any]], other: dict[int, dict[str, Any]]) -> Interval:
    """Return by how much the runs of an arm end above those of another one, on the seeds of both."""
    seeds = sorted(found.keys() & other.keys())
    return difference([final(found[seed]) for seed in seeds], [final(other[seed]) for seed in seeds])


def multiples(
    arm: str, ranks: int, found: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]
) -> dict[str, list[float]]:
    """Return by link the time to the loss that `ddp` has after `TARGET_SHARE`, over that of `ddp` on a free wire.

    One number for each seed whose run reaches that loss.
    """
    point = round(TARGET_SHARE * POINTS) - 1
    updates = {
        seed: reached(found[seed]["curve"], base[seed]["curve"][point][1])
        for seed in found.keys() & base.keys()
    }
    share_sent = found[0]["sent_bytes"] / base[0]["sent_bytes"]
    free_seconds = base[0]["curve"][point][0] * seconds(SYNCHRONOUS, ranks, Link(), 1.0)
    return {
        title: [
            taken * seconds(arm, ranks, Link(bits_per_second=rate), share_sent) / free_seconds
            for taken in updates.values()
            if taken is not None
        ]
        for title, rate in LINKS.items()
    }


def table(rows: dict[str, Any]) -> str:
    """Return a setting's table, in Markdown."""
    head = ["arm", "rate", "seeds", "bytes", "loss", "against `ddp`", "against `ddp` on its wire", *LINKS]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for arm, row in rows.items():
        times = [f"{statistics.median(m):.2f}" if m else "" for m in row["multiples_of_free"].values()]
        cells = [
            f"`{arm}`", f"{row['lr']:g}", f"{len(row['seeds'])}", f"{row['sent_bytes']:,.0f}",
            f"{row['heldout_loss']['mean']:.4f}", _signed(row["against_ddp"]), _signed(row["against_same_wire"]),
            *times,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _signed(found: Interval | None) -> str:
    if found is None:
        return ""
    around = f" ({found['low']:+.4f} to {found['high']:+.4f})" if "low" in found else ""
    return f"{found['mean']:+.4f}{around}"


def summarise(names: list[str], book: Book, folder: Path) -> None:
    """Write the comparison of settings that have been run, and print their tables."""
    begun = {run["setting"] for run in book.runs}
    found = {name: compared(name, book) for name in names if name in begun}
    replace_json(folder / "frontier.json", {"settings": found, "environment": describe_environment()})
    for name, rows in found.items():
        print(f"\n## {name}\n\n{table(rows)}")


def register_sparse_wire() -> None:
    """Make `wire=largest` known in this process."""
    runpy.run_path(str(Path(__file__).parents[1] / "examples/extend/wire.py"))


def main() -> None:
    """Make the runs, or compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("run", "summarise"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--arms", nargs="+", help="out of those of the settings")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    register_sparse_wire()
    book = Book(options.out)
    if options.action == "run":
        run_all(options.settings, book, options.seeds, options.arms or (), options.processes)
    else:
        summarise(options.settings, book, options.out)


if __name__ == "__main__":
    main()
