"""Under ACCO, is a batch used again in the same update, or in the next one?

    nice python experiments/echo_rounds.py --out benchmarks/results/DATE-echo-groups

An update of ACCO has two rounds: A at the estimate, B at the committed parameters. Both orders read the same batches
and use each twice, with two micro-batches in a round:

    round    A takes fresh batches, B takes those of A again
    update   A and B take fresh batches, A and B of the next update take them again

Two ranks of a virtual cluster; a GPT on the bytes of Python's standard library. Every rate runs with every seed. The
rate of an order is the best of the first two seeds, which are not compared.
"""

import argparse
import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from papers.book import difference

from stretto import ACCO, DataParallel
from stretto_lab.observe import replace_json
from stretto_lab.recipes import StdlibGPT
from stretto_lab.virtual import VirtualCluster, VirtualGroup

RANKS, MICRO_BATCHES, LOADS, USES = 2, 4, 64, 2
ORDERS = {"round": MICRO_BATCHES // 2, "update": MICRO_BATCHES}
"""Batches after which an order begins again with the first of them."""
RATES = (0.002, 0.004, 0.008)
TUNING, COMPARED = (100, 101), (0, 1, 2, 3, 4)


def again(batches: Iterator[Any], block: int) -> Iterator[Any]:
    """Yield the batches in blocks, each block `USES` times."""
    for first in batches:
        held = [first, *itertools.islice(batches, block - 1)]
        for _ in range(USES):
            yield from held


def heldout_loss(order: str, rate: float, seed: int) -> float:
    """Train once and return rank 0's held-out loss, in nats."""
    config = StdlibGPT(size="2x64x4", context=64, batch=8, lr=rate)

    def program(rank: int, group: VirtualGroup) -> float:
        task = config.build(rank, RANKS, seed, LOADS * USES // MICRO_BATCHES)
        parallel = DataParallel(
            task.model,
            task.optimizer,
            ACCO(),
            micro_batches=MICRO_BATCHES,
            scheduler=task.scheduler,
            group=group,
        )
        for batch in parallel.feed(again(itertools.islice(task.loader, LOADS), ORDERS[order])):
            loss = task.loss(task.model, batch)
            parallel.backward(loss.value, loss.weight, loss.samples)
        parallel.finish()
        return task.evaluate(task.model) if rank == 0 else 0.0

    return VirtualCluster(RANKS, seed=seed).run(program).values[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for rounds.json")
    folder = parser.parse_args().out
    torch.set_num_threads(1)
    losses: dict[str, dict[float, dict[int, float]]] = {
        order: {rate: {} for rate in RATES} for order in ORDERS
    }
    for seed, rate, order in itertools.product((*TUNING, *COMPARED), RATES, ORDERS):
        losses[order][rate][seed] = heldout_loss(order, rate, seed)
        print(f"{order} lr {rate:g} seed {seed}: {losses[order][rate][seed]:.4f}", flush=True)
    best = {
        order: min(RATES, key=lambda rate: statistics.mean(losses[order][rate][seed] for seed in TUNING))
        for order in ORDERS
    }
    ends = {order: [losses[order][best[order]][seed] for seed in COMPARED] for order in ORDERS}
    found = {"losses": losses, "rates": best, "update_minus_round": difference(ends["update"], ends["round"])}
    replace_json(folder / "rounds.json", found)
    print(best, found["update_minus_round"])


if __name__ == "__main__":
    main()
