"""Time to a fixed held-out loss over slow sockets and a free wire, the learning rate tuned for every way of updating.

    python benchmarks/time_to_loss.py learn --out benchmarks/results/DATE-time-to-loss
    python benchmarks/time_to_loss.py time --out benchmarks/results/DATE-time-to-loss
    python benchmarks/time_to_loss.py report --out benchmarks/results/DATE-time-to-loss

Needs root for the namespaces. With fixed counts the updates do not depend on time. So `learn` counts, on a free wire,
after how many updates each arm reaches the loss; and `time` measures an update on every link, in turns and without
evaluations, which would hold the clock while transfers arrive. `report` multiplies:

    seconds to the loss = updates to the loss * seconds per update

The measure of all is the fastest synchronous arm on the free wire. A timed run has the seed of a learning run: that
both have the same loss after the same updates is the test of the first sentence. All synchronous fp32 arms, ours and
the stock ones, make the same updates and share one learning run.
"""

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from namespaces import compare_behind

from stretto_lab.observe import replace_json
from stretto_lab.train.outcome import Evaluation, seconds_to_loss

AVERAGE = "diloco:outer_lr=1:outer_momentum=0:keep_progress=on:wire=int4"
"""Averages of replicas in 4 bits, beside the next updates."""
EVERY_2 = f"{AVERAGE}:interval=2:delay=1"
EVERY_4 = f"{AVERAGE}:interval=4:fragments=2:delay=1"
SYNCHRONOUS = "zero1"
LOCAL_SGD, POWER_SGD, ACCELERATE = "torch-local-sgd", "torch-ddp-powersgd", "accelerate-local-sgd"
TORCHFT = "torchft-diloco:outer_lr=1:outer_momentum=0:mix=0.5"
"""Averages as ours, in fp32; of what a rank has changed meanwhile torchft can keep a share."""
TUNED = {
    SYNCHRONOUS: SYNCHRONOUS,
    "acco": "acco:wire=int4",
    "local": "local:rate=0.1:wire=bf16",
    "diloco": EVERY_4,
    LOCAL_SGD: LOCAL_SGD,
    POWER_SGD: POWER_SGD,
    ACCELERATE: ACCELERATE,
    "torchft-diloco": f"{TORCHFT}:interval=4:fragments=2:delay=1",
    "hivemind": "hivemind:interval=4:delay=1",
}
"""One arm per way of updating; arms that differ in wire or interval take its rate."""
ARMS = {
    "none": (SYNCHRONOUS, "torch-ddp"),
    "1gbit": (SYNCHRONOUS, "torch-ddp", "torch-ddp-bf16", LOCAL_SGD, EVERY_2),
    "100mbit": (
        "torch-ddp-bf16",
        POWER_SGD,
        LOCAL_SGD,
        "zero1:wire=int4",
        "acco:wire=int4",
        "local:rate=0.1:wire=int8",
        EVERY_2,
        ACCELERATE,
        f"{TORCHFT}:interval=4:fragments=2:delay=1",
        "hivemind:interval=4:delay=1",
    ),
    "37mbit": ("torch-ddp-bf16", LOCAL_SGD, "zero1:wire=int4", "local:rate=0.1:wire=int8", EVERY_2),
    "10mbit": (
        "torch-ddp-bf16",
        POWER_SGD,
        LOCAL_SGD,
        "local:rate=0.1:wire=int4",
        "zero1:wire=int4",
        "zero1:wire=rotated2",
        "acco:wire=rotated2",
        EVERY_4,
        f"{ACCELERATE}:interval=15",
        f"{TORCHFT}:interval=16:fragments=4:delay=2",
        "hivemind:interval=8:delay=4",
    ),
    "10mbit/100mbit": ("torch-ddp-bf16", LOCAL_SGD, "zero1:wire=int4", "local:rate=0.1:wire=int4", EVERY_4),
    "1mbit": (
        LOCAL_SGD,
        f"{AVERAGE}:interval=20:fragments=4:delay=4",
        f"{ACCELERATE}:interval=30",
        f"{TORCHFT}:interval=64:fragments=8:delay=7",
        "hivemind:interval=30:delay=28",
    ),
}
"""By link, as of `Namespaces`. Intervals and delays of the other libraries are about the shortest that hide what they
send, or, where nothing hides, that an average or two fall into the run."""
NODE = ":ranks_per_node=2"
ON_NODES = {
    "none": (SYNCHRONOUS, "torch-ddp"),
    "100mbit": ("torch-ddp-bf16", LOCAL_SGD, f"zero1:wire=int4{NODE}", f"{EVERY_2}:worker=node{NODE}"),
    "10mbit": (LOCAL_SGD, EVERY_4, f"zero1:wire=int4{NODE}", f"{EVERY_4}:worker=node{NODE}"),
    "1mbit": (f"{AVERAGE}:interval=20:fragments=4:delay=4:worker=node{NODE}",),
}
"""By link of a node of two workers."""
LONG = {
    "none": (SYNCHRONOUS, "torch-ddp"),
    "1mbit": (
        f"{AVERAGE}:interval=12:fragments=4:delay=2",
        f"{AVERAGE}:interval=30:fragments=10:delay=2",
        f"{TORCHFT}:interval=64:fragments=8:delay=7",
        "hivemind:interval=30:delay=28",
    ),
}
"""By link, of two workers: a race to a lower loss, so that averages land before its end also on the slowest link."""
OTHERS = {
    name: f"{Path(__file__).resolve().parent / 'peers' / 'other_libraries.py'}:{kind}"
    for name, kind in {
        ACCELERATE: "AccelerateLocalSGD", "torchft-diloco": "TorchftDiLoCo", "hivemind": "HivemindAverages"
    }.items()
}  # fmt: skip
"""What is typed for a method of another library, by its name in results."""
EXACT = ("torch-ddp",)
"""Arms whose updates are those of `SYNCHRONOUS`."""
EVALUATE = ["--task.evaluation-windows", "32", "--evaluate-every"]
EVERY = 4
TIMED_SEED = 0
MICRO_BATCHES = 4
"""Of each of two workers."""
# A run that only time ends keeps its learning rate. Those that a count may end must keep theirs too.
# A warm-up is cut to a tenth of a known number of updates.
SCHEDULE = ["--task.schedule.warmup", "3", "--task.schedule.floor", "1"]


def method_of(arm: str) -> str:
    """Return the key of an arm's tuned rate."""
    name = arm.partition(":")[0]
    return name if name in TUNED else SYNCHRONOUS


def arms_of(options: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Return the arms by link."""
    arms = LONG if options.long else ARMS if options.per_node == 1 else ON_NODES
    return {link: tuple(arm for arm in found if arm.startswith(options.arms)) for link, found in arms.items()}


def tuned_by(options: argparse.Namespace) -> dict[str, str]:
    """Return by way of updating the arm whose rates are tried; in the long race the first one that is raced."""
    if not options.long:
        return TUNED
    return {method_of(arm): arm for arms in arms_of(options).values() for arm in reversed(arms)}


def typed(arm: str) -> str:
    """Return what is typed for an arm."""
    name, colon, settings = arm.partition(":")
    return OTHERS.get(name, name) + colon + settings


def named(text: str) -> str:
    """Return the name in results of an arm that was typed."""
    return next((name + text[len(one) :] for name, one in OTHERS.items() if text.startswith(one)), text)


def learns_as(arm: str) -> str:
    """Return the arm whose learning runs tell after how many updates this one reaches the loss."""
    return SYNCHRONOUS if arm in EXACT else arm


def with_rate(arm: str, rates: dict[str, float]) -> str:
    """Return the arm with its tuned rate."""
    return f"{arm}:lr={rates[method_of(arm)]:g}"


def updates_to(run: dict[str, Any], target: float) -> float | None:
    """Return the updates at which the line between two evaluations crosses the target, a second one confirming it."""
    counted = [
        Evaluation(step=one["step"], training_seconds=one["step"], heldout_loss=one["heldout_loss"])
        for one in run["evaluations"]
    ]
    return seconds_to_loss(counted, target)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the runs of a comparison and of those that were added to it; none where it was not made."""
    files = [path / "compare.json", *sorted(path.parent.glob(f"{path.name}-more*/compare.json"))]
    found = [run for file in files if file.exists() for run in json.loads(file.read_text())["runs"]]
    return [{**run, "strategy": named(run["strategy"])} for run in found]


def added_to(path: Path) -> Path:
    """Return the folder for more runs of a comparison."""
    before = len(read(path))
    return path.with_name(f"{path.name}-more{before}") if before else path


def timed_in(out: Path, link: str, turn: int) -> Path:
    """Return the folder of the updates that were timed on a link."""
    return out / f"{link.replace('/', '-by-')}-turn{turn}"


def tune(options: argparse.Namespace) -> dict[str, float]:
    """Return by way of updating the rate with which it needs the fewest updates; ties go to the lower final loss."""
    file = options.out / "tuned.json"
    best: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    missing = {method: arm for method, arm in tuned_by(options).items() if method not in best}
    if missing:
        arms = [f"{arm}:lr={rate:g}" for arm in missing.values() for rate in options.learning_rates]
        runs = learnt("tuning", arms, 1000, options)
        for method, arm in missing.items():
            tried = [run for run in runs if run["strategy"].startswith(f"{arm}:lr=")]
            best[method] = min(tried, key=lambda run: _merit(run, options.target))["learning_rate"]
        replace_json(file, best)
    return best


def _merit(run: dict[str, Any], target: float) -> tuple[float, float]:
    updates = updates_to(run, target)
    return float("inf") if updates is None else updates, run["heldout_loss"]


def learnt(name: str, arms: list[str], seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train arms on a free wire, to the loss or until they give up; return these runs and those made before."""
    before = read(options.out / name)
    arms = [arm for arm in arms if arm not in {run["strategy"] for run in before}]
    if not arms:
        return before
    limits = ["--updates", str(options.most_updates), "--to-loss", str(options.target), "--seed", str(seed)]
    words = [*limits, *work(options), *EVALUATE, str(EVERY), *SCHEDULE]
    folder = added_to(options.out / name)
    compare_behind("none", [*map(typed, arms)], folder, *words, ranks_per_node=options.per_node)
    return read(options.out / name)


def work(options: argparse.Namespace) -> list[str]:
    """Return how many micro-batches a rank makes: an update has as many samples with any number of workers."""
    return ["--micro-batches", str(MICRO_BATCHES // options.per_node)]


def learn(options: argparse.Namespace) -> None:
    """Count updates to the loss with every seed, after tuning; what has been counted before is left out."""
    rates = tune(options)
    links = arms_of(options).values()
    arms = dict.fromkeys(with_rate(learns_as(arm), rates) for of_link in links for arm in of_link)
    for seed in options.seeds:
        learnt(f"learn-seed{seed}", list(arms), seed, options)


def measure(options: argparse.Namespace) -> None:
    """Time updates on every link; every turn takes all arms on all links."""
    rates = tune(options)
    for turn in options.turns:
        for link in options.links:
            limits = ["--updates", str(options.timed_updates), "--seconds", str(options.cap)]
            limits += ["--seed", str(TIMED_SEED)]
            arms = [with_rate(arm, rates) for arm in arms_of(options)[link]]
            if not arms:
                continue
            words = [*limits, *work(options), *EVALUATE, str(10 * options.timed_updates), *SCHEDULE]
            folder = added_to(timed_in(options.out, link, turn))
            compare_behind(link, [*map(typed, arms)], folder, *words, ranks_per_node=options.per_node)


def report(options: argparse.Namespace) -> None:
    """Write and print every arm's time to the loss, as multiples of a free wire's: all seeds times all turns."""
    rates = tune(options)
    learning = {
        (run["strategy"], seed): run
        for seed in options.seeds
        for run in read(options.out / f"learn-seed{seed}")
    }
    timed = {
        (link, run["strategy"], turn): run
        for link, turn in itertools.product(options.links, options.turns)
        for run in read(timed_in(options.out, link, turn))
    }
    base = with_rate(SYNCHRONOUS, rates)
    needed = {seed: updates_to(learning[base, seed], options.target) for seed in options.seeds}
    free = {
        turn: min(pace(timed["none", with_rate(arm, rates), turn]) for arm in arms_of(options)["none"])
        for turn in options.turns
    }
    rows = []
    for link, arm in ((one, arm) for one in options.links for arm in arms_of(options)[one]):
        found = {turn: run for turn in free if (run := timed.get((link, with_rate(arm, rates), turn)))}
        if not found:
            continue  # this link was not timed
        learnt_by = {seed: learning[with_rate(learns_as(arm), rates), seed] for seed in options.seeds}
        updates = {seed: updates_to(run, options.target) for seed, run in learnt_by.items()}
        multiples = [
            taken / needed[seed] * pace(run) / free[turn]
            for (seed, taken), (turn, run) in itertools.product(updates.items(), found.items())
            if taken is not None
        ]
        row = {
            "link": link,
            "arm": arm,
            "learning_rate": rates[method_of(arm)],
            "updates": updates,
            "seconds_per_update": [pace(run) for run in found.values()],
            "sent_bytes_per_update": [run["sent_bytes"] / run["updates"] for run in found.values()],
            "multiples": multiples,
            "same_loss_as_learnt": [same_loss(run, learnt_by.get(TIMED_SEED)) for run in found.values()],
        }
        rows.append(row)
        print(
            f"| {link} | `{arm}` | {spread(multiples, '.2f')} | {spread(list(updates.values()), '.0f')} "
            f"| {spread(row['seconds_per_update'], '.3f')} "
            f"| {statistics.median(row['sent_bytes_per_update']) / 1e6:.2f} | {row['same_loss_as_learnt']}"
        )
    replace_json(options.out / "time-to-loss.json", rows)


def pace(run: dict[str, Any]) -> float:
    """Return the seconds per update of a timed run, without its first updates and without what comes at its end."""
    return run["samples"] / run["updates"] / run["samples_per_second"]


def same_loss(timed: dict[str, Any], learnt: dict[str, Any] | None) -> float | None:
    """Return by how much the losses of two runs differ after the timed one's updates; None where nobody looked."""
    evaluations = [] if learnt is None else learnt["evaluations"]
    found = [one["heldout_loss"] for one in evaluations if one["step"] == timed["updates"]]
    return abs(found[0] - timed["heldout_loss"]) if found else None


def spread(values: list[float | None], form: str) -> str:
    """Return the median and the range; and of values that are missing how many there are."""
    found = sorted(value for value in values if value is not None)
    if not found:
        return "not reached"
    of = "" if len(found) == len(values) else f", {len(found)} of {len(values)}"
    return f"{statistics.median(found):{form}} ({found[0]:{form}} to {found[-1]:{form}}{of})"


def main() -> None:
    """Count, time, or multiply."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("learn", "time", "report"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--links", nargs="+", choices=list(ARMS), help="all that there are")
    parser.add_argument("--arms", nargs="+", default=[""], help="how their names begin; all that there are")
    parser.add_argument(
        "--per-node", type=int, choices=(1, 2), default=1, help="workers on each of two nodes"
    )
    parser.add_argument("--long", action="store_true", help="a lower loss, on the free wire and at 1mbit")
    parser.add_argument("--target", type=float, help="held-out loss, nats per byte; default: 2.75, long 2.4")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of learning")
    parser.add_argument(
        "--most-updates", type=int, help="after which a learning run gives up; default: 88, long 200"
    )
    parser.add_argument(
        "--learning-rates", type=float, nargs="+", default=[5e-4, 7e-4, 1e-3], help="that are tried"
    )
    parser.add_argument("--turns", type=int, nargs="+", default=[0, 1, 2], help="of timing")
    parser.add_argument("--timed-updates", type=int, default=44)
    parser.add_argument(
        "--cap",
        type=float,
        default=60.0,
        help="seconds after which a timed run ends; torch-local-sgd takes 420 for some updates at 1mbit",
    )
    options = parser.parse_args()
    options.arms = tuple(options.arms)
    options.target = options.target or (2.4 if options.long else 2.75)
    options.most_updates = options.most_updates or (200 if options.long else 88)
    options.links = options.links or list(arms_of(options))
    {"learn": learn, "time": measure, "report": report}[options.action](options)


if __name__ == "__main__":
    main()
