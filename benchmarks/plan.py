"""What a plan predicts for an update, beside what an update takes: on the same link, in the same workers.

    python benchmarks/plan.py --rate 100mbit --out benchmarks/results/DATE-plan

Needs root for the namespaces. The workers measure the machine as `stretto plan` does, and rank 0 prices every arm. Then
all arms train in turns (`turns.py`), and beside them `compute`, which sends nothing. A ratio is that of the predicted
seconds to the median of the measured ones. That of `compute` tells how much slower or faster the machine was while it
was measured than in the turns. `priced_again` is the ratio without this: the price where computing takes what it took
in the turns.
"""

import argparse
import dataclasses
import os
import statistics
import sys
from pathlib import Path

import torch
from torch import distributed as dist
from turns import Taken, Training, launch, measure, write

from stretto_lab.cli.environment import find_ranks
from stretto_lab.plan import Machine, PlanConfig, price
from stretto_lab.plan import measure as measure_machine
from stretto_lab.recipes import StdlibGPT
from stretto_lab.train.arms import parse_arm
from stretto_lab.train.configuration import RunConfig

ARMS = tuple(
    f"{strategy}{wire}"
    for strategy in ("ddp", "zero1", "acco", "wp")
    for wire in ("", ":wire=bf16", ":wire=int8", ":wire=int4")
)
COMPUTE = "compute"
TURNS_PORT = "29502"
"""Another one than that at which the workers met to measure."""


def machine_of(task: StdlibGPT, micro_batches: int, workers: int) -> Machine:
    """Return what a plan measures; all workers must call."""
    job: PlanConfig[StdlibGPT] = PlanConfig(task=task, micro_batches=micro_batches, threads=1)
    found = find_ranks(workers).call(measure_machine, job, job.batches)[0]
    # A namespace looks like a machine of its own, but all share the processor.
    return dataclasses.replace(found, cores=(os.cpu_count() or 1) / workers)


def compared(
    machine: Machine, found: dict[str, list[Taken]], micro_batches: int, bucket_bytes: int
) -> dict[str, dict[str, float]]:
    """Return, by arm, predicted and measured seconds of an update, and ratios of them."""

    def predicted(arm: str, machine: Machine) -> float:
        if arm == COMPUTE:
            return micro_batches * machine.micro_batch_seconds + machine.step_seconds
        return price(parse_arm(arm), machine, micro_batches=micro_batches, bucket_bytes=bucket_bytes).seconds

    measured = {arm: statistics.median(one.clock for one in taken) for arm, taken in found.items()}
    drift = measured[COMPUTE] / predicted(COMPUTE, machine)
    in_turns = dataclasses.replace(
        machine,
        forward_seconds=machine.forward_seconds * drift,
        backward_seconds=machine.backward_seconds * drift,
        step_seconds=machine.step_seconds * drift,
        exchange_seconds={wire: seconds * drift for wire, seconds in machine.exchange_seconds.items()},
    )
    return {
        arm: {
            "predicted": (before := predicted(arm, machine)),
            "measured": seconds,
            "ratio": before / seconds,
            "priced_again": predicted(arm, in_turns) / seconds,
            "turns": len(found[arm]),
        }
        for arm, seconds in measured.items()
    }


def main() -> None:
    """Launch the workers, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--rate", default="none", help="of every link, in each direction")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--per-node", type=int, default=1, help="workers that share a node and its link")
    parser.add_argument("--micro-batches", type=int, default=4, help="per rank and update")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the turns, without warm-up")
    parser.add_argument(
        "--updates", type=int, default=3, help="of an arm in one turn: a token bucket fills between turns"
    )
    options = parser.parse_args()
    if "RANK" not in os.environ:
        return launch(options.workers // options.per_node, options.rate, sys.argv[1:], options.per_node)
    torch.set_num_threads(1)
    task = StdlibGPT(evaluation_windows=1)
    machine = machine_of(task, options.micro_batches, options.workers)
    run = RunConfig(task=task, micro_batches=options.micro_batches)
    arms = [parse_arm(text) for text in (*options.arms, COMPUTE)]
    os.environ.update(MASTER_PORT=TURNS_PORT, TORCHELASTIC_USE_AGENT_STORE="False")
    dist.init_process_group("gloo")
    found = measure({arm.text: Training(run.run_of(arm)) for arm in arms}, options.seconds, options.updates)
    if dist.get_rank() == 0:
        table = compared(machine, found, options.micro_batches, run.bucket_bytes)
        for arm, row in table.items():
            print(
                f"{options.rate:8} {arm:16} predicted {row['predicted']:7.3f} s, measured {row['measured']:7.3f} s, "
                f"ratio {row['ratio']:.3f}, priced again {row['priced_again']:.3f}",
                flush=True,
            )
        by = f"-by-{options.per_node}" if options.per_node > 1 else ""
        write(
            options.out / f"{options.rate}-{options.workers}{by}.json",
            options={**vars(options), "out": None},
            machine=dataclasses.asdict(machine),
            table=table,
            seconds=found,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
