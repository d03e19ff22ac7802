"""What is left of the time where ranks are lost: going on from memory against a restart from disk, in virtual time.

A job of N ranks loses one at random updates, one in a hundred on average. Either the others go on from the state in
their memories, and a new process comes in 30 s later; or all processes are started again, and go on from a checkpoint.
The second is the first with other numbers: everybody stands still for the time of a start, and nobody is missing after
that. Goodput is the time that the updates would take undisturbed, as a part of the time that the run takes.

The law beside it has three terms per loss: half of the updates between two states, the time in which nobody trains, and
the time in which the ranks that are left share the micro-batches of all.

    PYTHONPATH=. python experiments/goodput.py --out benchmarks/results/DATE-goodput
"""

import argparse
import dataclasses
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import stretto as st
from stretto.machine import describe_environment
from stretto_lab.observe import replace_json
from stretto_lab.virtual import Compute, VirtualCluster
from tests.survive.virtually import Died, survive

SECOND = 10**9
MICRO_BATCHES = 4
"""Per rank, where none is missing."""
UPDATE_SECONDS = 1.0
COMES_IN_SECONDS = 2.0
"""From when a process asks to come in until it is in: two messages among members, one a second."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """How a job goes on."""

    name: str
    every: int
    """Updates between two states."""
    still_seconds: float
    """In which nobody trains after a loss."""
    missing_seconds: float
    """After the loss, until a new process asks to come in."""


WAYS = (
    Way(name="memory", every=10, still_seconds=1.5, missing_seconds=30.0),
    Way(name="disk", every=50, still_seconds=30.0, missing_seconds=0.0),
)


def run(way: Way, ranks: int, updates: int, losses: Sequence[int], seed: int) -> float:
    """Return the virtual seconds of a run that loses a rank, drawn from the seed, after each of some updates."""
    rng, ahead = random.Random(seed), list(losses)
    total = st.Total(MICRO_BATCHES * ranks)
    lost: dict[int, int] = {}

    def train(term: st.Term) -> None:
        model = nn.Linear(32, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        parallel = st.DataParallel(model, optimizer, st.ZeRO1(), micro_batches=total, group=term.group)
        term.go_on(parallel)
        inputs = torch.full((1, 32), 1 + term.rank / ranks)  # equal losses would be taken for equal batches

        def on_update(update: st.Update) -> None:
            if ahead and update.step == ahead[0]:
                lost.setdefault(ahead[0], rng.choice(term.seats))
            if lost.get(update.step) == term.seats[term.rank] and update.step in ahead:
                ahead.remove(update.step)
                raise Died
            term.keep(parallel)

        with parallel:
            while parallel.steps < updates:
                if (update := parallel.backward(model(inputs).sum())) is not None:
                    on_update(update)
            parallel.finish()

    compute = Compute(micro_batch_ns=round(UPDATE_SECONDS * SECOND / MICRO_BATCHES))
    found = survive(
        VirtualCluster(ranks, compute=compute, seed=seed),
        train,
        every=way.every,
        agree_ns=round(way.still_seconds * SECOND),
        again_ns=round(way.missing_seconds * SECOND),
    )
    return found.elapsed_ns / SECOND


def law(way: Way, ranks: int, updates: int, losses: int) -> float:
    """Return the goodput to expect."""
    most = st.Total(MICRO_BATCHES * ranks).of(0, ranks - 1)
    slower = most / MICRO_BATCHES - 1
    comes_in = min(way.every * UPDATE_SECONDS / 2, COMES_IN_SECONDS)
    missing = (way.missing_seconds + comes_in) if way.missing_seconds else 0.0
    per_loss = (way.every + 1) / 2 * UPDATE_SECONDS + way.still_seconds + missing * slower / (1 + slower)
    calm = updates * UPDATE_SECONDS
    return calm / (calm + losses * per_loss)


def main(words: Sequence[str] | None = None) -> int:
    """Run every size both ways."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument(
        "--ways", nargs="+", choices=[way.name for way in WAYS], default=[way.name for way in WAYS]
    )
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for ranks in options.ranks:
        for way in (way for way in WAYS if way.name in options.ways):
            found = []
            for seed in range(options.seeds):
                count = max(1, options.updates // 100)
                losses = sorted(random.Random(seed).sample(range(1, options.updates), count))
                seconds = run(way, ranks, options.updates, losses, seed)
                found.append(options.updates * UPDATE_SECONDS / seconds)
            expected = law(way, ranks, options.updates, count)
            rows.append({**dataclasses.asdict(way), "ranks": ranks, "goodput": found, "law": expected})
            spread = f"{min(found):.3f} to {max(found):.3f}"
            print(
                f"{ranks} ranks, {way.name}: {statistics.fmean(found):.3f} ({spread}), law {expected:.3f}",
                flush=True,
            )
            settings = {"updates": options.updates, "seeds": options.seeds, "update_seconds": UPDATE_SECONDS}
            replace_json(
                options.out / "results.json",
                {"environment": describe_environment(), **settings, "rows": rows},
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
