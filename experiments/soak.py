"""A job on real workers loses a rank every 30 seconds for an hour: does it end, and with the loss of a calm run?

Three nodes train as in `lost_ranks.py`. Every 30 seconds something drawn from a seed happens to one of them: its rank
is killed, the node is lost with its memory and returns, its link goes down and comes up, or its rank is stopped and
wakes. The store's host is left alone, because a job ends with the loss after that. All that makes a trial there fail
makes the run fail here. Its loss, on points that nobody has trained on, stands beside those of five calm runs, each
with other samples, on one rank.

    python experiments/soak.py --strategies zero1 acco --out benchmarks/results/DATE-soak

Needs Linux, root and iproute2. Strategies run side by side.
"""

import argparse
import dataclasses
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lost_ranks import STRATEGIES, Built, Event, Job, Running, Trial, in_a_process, judged, lines_of, points
from torch import nn

from benchmarks.namespaces import Namespaces
from stretto.machine import describe_environment
from stretto_lab.observe import replace_json

RANKS = 3
EVERY_SECONDS = 30.0
KINDS = ("kill", "kill", "node", "link", "stop")
LASTS_SECONDS = (1.0, 12.0)
"""Of links, stops and lost nodes; all are back before the next event."""
MICRO_BATCH_SECONDS = 0.2
UPDATES_PER_HOUR = 3600
"""Four micro-batches each, and a fifth of the time for what is lost."""
CALM_RUNS = 5
TEST_POINTS, TEST_SEED = 4096, 10**12


def drawn(strategy: str, seconds: float, seed: int) -> Trial:
    """Draw a run."""
    rng = random.Random(seed)
    events = [
        Event(
            kind=rng.choice(KINDS),
            node=rng.randrange(RANKS),
            after=20,
            seconds=round(number * EVERY_SECONDS + rng.uniform(0, 3), 3),
            lasts=round(rng.uniform(*LASTS_SECONDS), 1),
        )
        for number in range(int(seconds / EVERY_SECONDS))
    ]
    return Trial(
        seed=seed,
        ranks=RANKS,
        strategy=strategy,
        every=9,
        rate="100mbit",
        events=tuple(events),
        updates=round(UPDATES_PER_HOUR * seconds / 3600),
        micro_batch_seconds=MICRO_BATCH_SECONDS,
        starts=len(events) + 1,
    )


def test_loss(parameters: Sequence[float]) -> float:
    """Return the loss of a trained model on points that no run has seen."""
    model = Built().model
    nn.utils.vector_to_parameters(torch.tensor(parameters), model.parameters())
    inputs, targets = points(TEST_POINTS, TEST_SEED)
    with torch.no_grad():
        return float((model(inputs) - targets).square().mean())


def soak(trial: Trial, folder: Path) -> dict[str, Any]:
    """Run one job through all that happens to it, and judge it."""
    folder.mkdir(parents=True)
    began = time.monotonic()
    with Namespaces(trial.ranks + 1, trial.rate) as network:
        running = Running(trial, network.spaces, folder)
        running.run()
    verdict = judged(running, None)
    lives = [lines_of(path) for paths in running.said for path in paths]
    models = [line["model"] for lines in lives for line in lines if "model" in line]
    events = list(followed(running, lives))
    (folder.parent / f"{trial.strategy}.txt").write_text("".join(f"{said(event)}\n" for event in events))
    return {
        "strategy": trial.strategy,
        **dataclasses.asdict(verdict),
        "seconds": round(time.monotonic() - began, 1),
        "losses_of_ranks": len(events),
        "terms": 1 + max(line["term"] for lines in lives for line in lines if "term" in line),
        "test_loss": test_loss(models[0]) if models else None,
        "events": events,
    }


def followed(running: Running, lives: Sequence[Sequence[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield what happened, with what became of it until the next thing happened."""
    lines = sorted(itertools.chain(*lives), key=lambda line: line.get("at", 0.0))
    begins = [at for _, at in running.struck]
    for (event, at), until in zip(running.struck, [*begins[1:], float("inf")], strict=True):
        mine = [line for line in lines if at <= line.get("at", 0) < until]
        terms = {line["term"]: len(line["seats"]) for line in mine if "term" in line}
        updates = [at, *(line["at"] for line in mine if "update" in line)]
        still = max((later - earlier for earlier, later in itertools.pairwise(updates)), default=0.0)
        yield {
            "at": round(at - begins[0], 1),
            "kind": event.kind,
            "node": event.node,
            "lasts": event.lasts,
            "ranks_of_terms": list(terms.values()),
            "longest_still_seconds": round(still, 2),
        }


def said(event: dict[str, Any]) -> str:
    """Return a line about what happened."""
    what = {"kill": "killed", "node": "lost", "link": "cut off", "stop": "stopped"}[event["kind"]]
    long = "" if event["kind"] == "kill" else f" for {event['lasts']} s"
    then = ", ".join(f"{ranks} ranks" for ranks in event["ranks_of_terms"]) or "all wait"
    still = event["longest_still_seconds"]
    return (
        f"{event['at']:7.1f} s: {event['node']} is {what}{long}: {then}; at most {still} s without an update"
    )


def calm_loss(trial: Trial, order: int) -> Callable[[], float]:
    """Return a run on one rank to which nothing happens, whose samples have another order."""
    calm = dataclasses.replace(trial, order=order, micro_batch_seconds=0.0)
    return lambda: test_loss(Job(calm, None, Built()).train(lambda _: None))


def main(words: Sequence[str] | None = None) -> int:
    """Run the jobs; return 1 if one has failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=["zero1"])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    trials = [drawn(strategy, options.seconds, options.seed) for strategy in options.strategies]
    apart = [lambda trial=trial: soak(trial, options.out / trial.strategy) for trial in trials]
    with ThreadPoolExecutor(len(trials)) as pool:
        rows = list(pool.map(in_a_process, apart))
    for trial, row in zip(trials, rows, strict=True):
        row["calm_test_losses"] = [in_a_process(calm_loss(trial, order)) for order in range(1, CALM_RUNS + 1)]
    replace_json(options.out / "results.json", {"environment": describe_environment(), "runs": rows})
    for row in rows:
        print(summary(row))
    return int(any(row["faults"] for row in rows))


def summary(row: dict[str, Any]) -> str:
    """Return what became of a run."""
    still = [event["longest_still_seconds"] for event in row["events"]]
    calm = row["calm_test_losses"]
    return (
        f"{row['strategy']}: {row['outcome']} in {row['seconds']:.0f} s, {row['terms']} terms, "
        f"{'; '.join(row['faults']) or 'right'}; {len(still)} events, longest without an update: median "
        f"{statistics.median(still):.1f} s, worst {max(still):.1f} s; at most {row['redone']} updates again; test loss "
        f"{row['test_loss']:.5f}, calm {min(calm):.5f} to {max(calm):.5f}"
    )


if __name__ == "__main__":
    sys.exit(main())
