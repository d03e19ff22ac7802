"""A model in shards on two nodes of two workers: jobs beside PyTorch's HSDP in turns, on free links and on slow ones.

    python benchmarks/sharded_turns.py --out benchmarks/results/DATE-sharded-turns

Needs root for the namespaces, one per node; the token bucket is what its two workers share. As in `turns.py`, all jobs
of a launch live side by side in the workers, and ratios are taken within a turn. Links cannot change within a launch:
launches with free and with slow links alternate, and a job on a slow link is compared with itself in the launch before.
"""

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from turns import Training, Updating, begin_worker, launch, measure, ratios, show, write

from stretto_lab.recipes import StdlibGPT
from stretto_lab.train.arms import parse_arm
from stretto_lab.train.configuration import RunConfig
from stretto_lab.train.shards import cut

NODES, SHARDS = 2, 2
HSDP = "torch-hsdp"
ARMS = (
    HSDP,
    HSDP,
    "zero1",
    "diloco:wire=int4",
    "diloco:delay=4:wire=int4",
)
"""DiLoCo with its defaults, and with some updates for an outer step to travel."""
WARM_UP_TURNS_OF_MANY = 1
"""First turns that are left out, of ten updates each."""


class Hsdp:
    """PyTorch's own: sums inside a node at every backward pass, and across nodes at the last one of an update."""

    def __init__(self, run: RunConfig[StdlibGPT]) -> None:
        task = run.task.build(dist.get_rank(), dist.get_world_size(), 0, None)
        mesh = init_device_mesh("cpu", (NODES, SHARDS), mesh_dim_names=("node", "shard"))
        cut(task, mesh, torch.device("cpu"))
        self._task, self._micro_batches = task, run.micro_batches
        self._batches = itertools.chain.from_iterable(itertools.repeat(task.loader))

    def update(self) -> None:
        """Make one update."""
        model: Any = self._task.model  # that of the recipe, and an FSDPModule
        for number in range(1, self._micro_batches + 1):
            model.set_requires_all_reduce(number == self._micro_batches)
            loss = self._task.loss(model, next(self._batches))
            (loss.value / self._micro_batches).backward()
        self._task.optimizer.step()
        self._task.optimizer.zero_grad()

    def finish(self) -> None:
        """End the job, of which nothing is under way."""


def job_of(text: str, run: RunConfig[StdlibGPT]) -> Updating:
    return Hsdp(run) if text == HSDP else Training(run.run_of(parse_arm(text)))


def work(options: argparse.Namespace, rate: str, number: int) -> None:
    """Be one of the workers of a launch."""
    task = StdlibGPT(size=options.size, batch=options.batch, evaluation_windows=1)
    run = RunConfig(task=task, micro_batches=options.micro_batches, shard=SHARDS)
    jobs: dict[str, Updating] = {}
    for text in options.arms:
        jobs[text + ", its twin" * (text in jobs)] = job_of(text, run)
    found = measure(jobs, options.seconds, options.updates, WARM_UP_TURNS_OF_MANY)
    if dist.get_rank() == 0:
        table = ratios(found)
        show(rate, table)
        write(options.out / f"{rate}-{number}.json", rate=rate, ratios=table, seconds=found)
    dist.destroy_process_group()


def on_own_free_link(
    out: Path, rates: list[str], launches: int, arms: list[str]
) -> dict[str, dict[str, Any]]:
    """Return by rate and job: seconds of an update over those in the launch before with the first rate."""
    found: dict[str, dict[str, Any]] = {rate: {} for rate in rates[1:]}
    for rate, name in itertools.product(rates[1:], dict.fromkeys(arms)):
        by_launch = []
        for number in range(launches):
            slow, free = (
                json.loads((out / f"{one}-{number}.json").read_text())["ratios"][name]["seconds"]
                for one in (rate, rates[0])
            )
            by_launch.append(slow / free)
        found[rate][name] = {"median": statistics.median(by_launch), "by_launch": by_launch}
        print(f"{rate:10} {name:28} over its own free link {found[rate][name]['median']:.3f} {by_launch}")
    return found


def main() -> None:
    """Launch the workers, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--arms", nargs="+", default=list(ARMS), help="the first is what others are compared with"
    )
    parser.add_argument("--rates", nargs="+", default=["none", "100mbit"], help="free links first")
    parser.add_argument("--launches", type=int, default=2, help="at each rate")
    parser.add_argument("--size", default="2m")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=2, help="per rank and update")
    parser.add_argument("--seconds", type=float, default=110.0, help="of a launch, without warm-up")
    parser.add_argument(
        "--updates", type=int, default=10, help="of a job in one turn: those between outer steps"
    )
    parser.add_argument("--number", type=int, help="of a launch; for its workers")
    options = parser.parse_args()
    if begin_worker():
        (rate,) = options.rates
        return work(options, rate, options.number)
    torch.set_num_threads(1)
    for number, rate in itertools.product(range(options.launches), options.rates):
        words = [*sys.argv[1:], "--rates", rate, "--number", str(number)]
        launch(NODES, rate, words, SHARDS)
    over = on_own_free_link(options.out, options.rates, options.launches, options.arms)
    write(options.out / "over-free-links.json", ratios=over)


if __name__ == "__main__":
    main()
