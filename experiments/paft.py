"""Gradients arrive with noise: how much of the run does averaging replicas save, and what do guards find?

Four ranks of a virtual cluster train the digits. After every exchange each rank's copy of the mean gradient gets
Gaussian noise of its own, new at every update, of a given variance per coordinate: the expected ‖noise‖² is the
variance times the number of parameters. `clean` has no noise, `noised` is `ddp` with noise, `sync-H` and `dyn-*` are
PAFT. Further parts: AdamW with and without averaged moments; bursts (1e-4, but 0.1 or 1 at every 50th update);
and `ddp` with guards, with noise on all ranks or on one. Every run ends right after its last update, because `finish`
would average once more.

Each run is a line of runs.jsonl. A run that is there is not made again, so the script can be stopped at any time and go
on. `paft.json` has the intervals over seeds.

    python experiments/paft.py --out benchmarks/results/DATE-paft
"""

import argparse
import dataclasses
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from book import Book
from intervals import interval
from torch import Tensor

import stretto as st
from stretto.checksums import digest, hexadecimal
from stretto.errors import StrettoError
from stretto.observe import replace_json
from stretto.recipes import DigitsResNet
from stretto.recipes.task import Task
from stretto.train.outcome import describe_environment
from stretto.virtual import VirtualCluster, VirtualGroup

RANKS = 4
VARIANCES = (1e-4, 1e-3, 1e-2, 1e-1)
ADAM_VARIANCES = (1e-4, 1e-3)
BURST_EVERY = 50
BURSTS = (0.1, 1.0)
STRATEGIES: dict[str, st.Strategy] = {
    "noised": st.DDP(),
    "sync-5": st.PAFTSync(interval=5),
    "sync-10": st.PAFTSync(interval=10),
    "sync-50": st.PAFTSync(interval=50),
    "sync-10-overlap": st.PAFTSync(interval=10, overlap=True),
    "dyn-corrected": st.PAFTDyn(),
    "dyn-paper": st.PAFTDyn(estimate="paper"),
    "sync-10-state": st.PAFTSync(interval=10, state=True),
}
TABLE = ("noised", "sync-5", "sync-10", "sync-10-overlap", "sync-50", "dyn-corrected", "dyn-paper")
GUARDS: dict[str, tuple[st.Guard, ...]] = {
    "none": (),
    "replica": (st.ReplicaGuard(),),
    "rest": (st.AtRest(),),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """What decides a run, without its seed."""

    part: str
    """Of the report: table, adam, bursts or guards."""
    arm: str
    optimizer: str = "sgd"
    variance: float = 0.0
    burst: float = 0.0
    ranks: int = RANKS
    """How many ranks get noise, from rank 0 on."""
    guard: str = "none"

    @property
    def strategy(self) -> st.Strategy:
        return STRATEGIES.get(self.arm, st.DDP())

    @property
    def is_overlapped(self) -> bool:
        """Whether an average is part of the update that follows it."""
        return isinstance(self.strategy, st.PAFTSync) and self.strategy.overlap


def cells() -> Iterator[Cell]:
    """Yield what is run for every seed."""
    yield Cell(part="table", arm="clean")
    for variance in VARIANCES:
        for arm in TABLE:
            yield Cell(part="table", arm=arm, variance=variance)
    yield Cell(part="adam", arm="clean", optimizer="adamw")
    for variance in ADAM_VARIANCES:
        for arm in ("noised", "sync-10", "sync-10-state"):
            yield Cell(part="adam", arm=arm, optimizer="adamw", variance=variance)
    for burst in BURSTS:
        for arm in ("noised", "sync-10", "dyn-corrected"):
            yield Cell(part="bursts", arm=arm, variance=1e-4, burst=burst)
    for ranks, guard in ((RANKS, "replica"), (RANKS, "rest"), (1, "none"), (1, "replica"), (1, "rest")):
        yield Cell(part="guards", arm="noised", variance=1e-2, ranks=ranks, guard=guard)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all runs have in common."""

    updates: int
    width: int
    batch: int


def noise(cell: Cell, seed: int) -> st.Noise | None:
    """Return the noise of a cell's gradients; None where it has none."""
    if not cell.variance:
        return None
    return st.Noise(
        cell.variance,
        every=(BURST_EVERY, cell.burst) if cell.burst else None,
        rank=tuple(range(cell.ranks)),
        seed=seed,
    )


@dataclasses.dataclass
class Seen:
    """What one rank has seen of a run."""

    task: Task
    values: list[Tensor]
    averages: int
    intervals: list[int]
    incidents: int
    update: int


def train(cell: Cell, setting: Setting, seed: int, outcomes: dict[int, Seen], group: VirtualGroup) -> None:
    """Train one rank to the last update, or to the error that ends it, and put into `outcomes` what it has seen."""
    rank = group.rank()
    recipe = DigitsResNet(width=setting.width, batch=setting.batch, optimizer=cell.optimizer)
    task = recipe.build(rank, RANKS, seed, setting.updates)
    parallel = st.DataParallel(
        task.model,
        task.optimizer,
        cell.strategy,
        micro_batches=1,
        group=group,
        guards=GUARDS[cell.guard],
        options=st.Options(noise=noise(cell, seed)),
    )
    seen = Seen(task, [], 0, [], 0, 0)
    try:
        for batch in parallel.feed(task.loader):
            loss = task.loss(task.model, batch)
            update = parallel.backward(loss.value, loss.weight, loss.samples)
            if update is None:
                continue
            task.scheduler.step()
            seen.update = update.step
            seen.incidents += len(update.incidents)
            is_averaged = update.gap == 1 and update.step > 1 if cell.is_overlapped else update.gap == 0
            seen.averages += is_averaged and cell.arm not in ("clean", "noised")
            if update.interval and (not seen.intervals or update.gap == 0):
                seen.intervals.append(update.interval)
            if update.step == setting.updates:
                break
    finally:
        seen.values = [p.detach().clone() for p in task.model.parameters()]
        outcomes[rank] = seen


def run(cell: Cell, setting: Setting, seed: int) -> dict[str, Any]:
    """Make one run and return its record."""
    started = time.process_time()
    outcomes: dict[int, Seen] = {}
    error = None
    try:
        VirtualCluster(RANKS).run(lambda _, group: train(cell, setting, seed, outcomes, group))
    except StrettoError as raised:
        error = f"{type(raised).__name__}: {raised}"
    record = {"seed": seed, **dataclasses.asdict(cell), "error": error, "update": outcomes[0].update}
    record |= {"averages": outcomes[0].averages, "incidents": outcomes[0].incidents}
    record["median_interval"] = statistics.median(outcomes[0].intervals) if outcomes[0].intervals else None
    if error is None:
        record |= judged([outcomes[rank] for rank in range(RANKS)])
    return record | {"cpu_seconds": time.process_time() - started}


def judged(ranks: list[Seen]) -> dict[str, Any]:
    """Return loss and accuracy, as a mean over replicas and of their mean, and how far the replicas are apart."""
    found = [(seen.task.evaluate(seen.task.model), seen.task.accuracy(seen.task.model)) for seen in ranks]
    means = [torch.stack(values).mean(0) for values in zip(*(seen.values for seen in ranks), strict=True)]
    apart = [
        math.sqrt(sum(float((v - m).square().sum()) for v, m in zip(seen.values, means, strict=True)))
        for seen in ranks
    ]
    task = ranks[0].task
    with torch.no_grad():
        for parameter, mean in zip(task.model.parameters(), means, strict=True):
            parameter.copy_(mean)
    losses = [loss for loss, _ in found]
    return {
        "loss": finite(statistics.mean(losses)),
        "accuracy": statistics.mean(accuracy for _, accuracy in found),
        "loss_of_mean": finite(task.evaluate(task.model)),
        "accuracy_of_mean": task.accuracy(task.model),
        "distance_from_mean": finite(max(apart)),
        "digest": [bits(seen.values) for seen in ranks],
    }


def bits(values: list[Tensor]) -> str:
    """Return a digest of all values, to tell whether two runs ended with the same bits."""
    return hexadecimal(digest(torch.cat([value.flatten() for value in values])))


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for every cell, means over seeds with their intervals."""
    rows = []
    for cell in cells():
        fields = dataclasses.asdict(cell)
        own = [record for record in records if fields.items() <= record.items()]
        if not own:
            continue
        row: dict[str, Any] = {
            **fields,
            "seeds": len(own),
            "errors": sum(r["error"] is not None for r in own),
        }
        row["error_updates"] = sorted(r["update"] + 1 for r in own if r["error"])
        whole = [record for record in own if record["error"] is None]
        for key in ("loss", "accuracy", "loss_of_mean", "accuracy_of_mean", "distance_from_mean", "averages"):
            values = [r[key] for r in whole if r[key] is not None]
            row[key] = interval(values) if values else None
        row["median_intervals"] = [r["median_interval"] for r in own]
        row["incidents"] = [r["incidents"] for r in own]
        clean = {r["seed"]: r["digest"] for r in records if r["part"] == "table" and r["arm"] == "clean"}
        row["identical_to_clean"] = sum(r["digest"] == clean.get(r["seed"]) for r in whole)
        rows.append(row)
    return rows


def main() -> None:
    """Make the runs that are missing, seed after seed, and summarise all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for runs.jsonl and paft.json")
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument("--width", type=int, default=8, help="channels of the network's first stage")
    parser.add_argument("--batch", type=int, default=16, help="images per rank and update")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--minutes", type=float, default=40.0, help="CPU time after which no further run begins"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    setting = Setting(options.updates, options.width, options.batch)
    book = Book(options.out)
    for seed in range(options.seeds):
        for cell in cells():
            if book.find({"seed": seed, **dataclasses.asdict(cell)}) is not None:
                continue
            if time.process_time() > 60 * options.minutes:
                break
            book.add(run(cell, setting, seed))
            print(describe(book.runs[-1]), flush=True)
    report = {
        "setting": dataclasses.asdict(setting),
        "ranks": RANKS,
        "burst_every": BURST_EVERY,
        "rows": summarise(book.runs),
        "cpu_seconds": sum(record["cpu_seconds"] for record in book.runs),
        "environment": describe_environment(),
    }
    replace_json(options.out / "paft.json", report)


def describe(record: dict[str, Any]) -> str:
    """Return a run as a line."""
    what = f"{record['part']:7} {record['arm']:14} {record['optimizer']:5} {record['variance']:g}+{record['burst']:g}"
    place = f"seed {record['seed']}, {record['ranks']} ranks, guard {record['guard']}"
    if record["error"]:
        return f"{what} {place}: ended behind update {record['update']}: {record['error'][:80]}"
    loss = math.nan if record["loss"] is None else record["loss"]
    return (
        f"{what} {place}: loss {loss:.3f}, accuracy {record['accuracy']:.3f}, {record['cpu_seconds']:.1f} s"
    )


if __name__ == "__main__":
    main()
