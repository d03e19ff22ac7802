"""Strategies side by side on the same link, and whether the input holds a run back.

Strategies side by side: every arm once, then all again, on the same link.

Measures one rank's loader and steps, beside those of the other ranks.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stretto.echo import Diagnosis, diagnose
from stretto.groups import Link
from stretto.observe import replace_json
from stretto.recipes.task import Batch
from stretto.records import Update
from stretto.train.arms import Arm, parse_arm, parse_arms
from stretto.train.configuration import CompareConfig, DiagnoseConfig, RunConfig, TaskT
from stretto.train.handle import open_handle
from stretto.train.launch import Ranks
from stretto.train.outcome import Outcome, describe_environment
from stretto.train.past import slowed
from stretto.train.workers import Seat, choose_device, seated

RESULTS = "compare.json"


def compare(
    comparison: CompareConfig[TaskT], ranks: Ranks, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Run all arms in turns and return one record per run, which also stand in compare.json.

    Args:
        comparison: Arms, repeats, and what all have in common.
        ranks: Who trains. The first of them writes the results, anew after every run, so that a comparison that
            is broken off keeps what it has.
        tell: Told what happens, one line at a time.

    Raises:
        ConfigError: An arm cannot be read.
        WorkerFailed: A rank failed.
    """
    arms = parse_arms(comparison.strategies, comparison.learning_rates)
    environment = {**describe_environment(), "workers": ranks.world_size, "link": comparison.link}
    if ranks.is_first:
        Path(comparison.out).mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = []
    for repeat in range(comparison.repeats):
        for arm in arms:
            run = _run_of(arm, comparison, repeat)
            tell(f"repeat {repeat + 1} of {comparison.repeats}: {arm.text}")
            outcome = ranks.train(run, comparison.warmup_updates, shows_progress=False)
            runs.append(_record(arm, run, repeat, outcome))
            tell(_summary(runs[-1]))
            if ranks.is_first:
                content = {
                    "runs": runs,
                    "environment": environment,
                    "comparison": dataclasses.asdict(comparison),
                }
                replace_json(Path(comparison.out, RESULTS), content)
    return runs


def _run_of(arm: Arm, comparison: CompareConfig[TaskT], repeat: int) -> RunConfig[TaskT]:
    """Return the run of an arm; the arms of a repeat have one seed, so that they can be compared in pairs."""
    job = dataclasses.replace(comparison, seed=comparison.seed + repeat)
    return arm.configure(job)


def _record(arm: Arm, run: RunConfig[TaskT], repeat: int, outcome: Outcome) -> dict[str, Any]:
    measured = dataclasses.asdict(outcome)
    return {
        "strategy": arm.text,
        "repeat": repeat,
        "seed": run.seed,
        "wire": run.wire,
        "micro_batches": run.micro_batches if run.clock is None else None,
        "clock": None if run.clock is None else dataclasses.asdict(run.clock),
        "learning_rate": getattr(run.task, "lr", None),
        "seconds": measured.pop("training_seconds"),
        **measured,
    }


def _summary(record: dict[str, Any]) -> str:
    rate, reached = record["samples_per_second"], record["seconds_to_loss"]
    return (
        f"  {record['updates']} updates in {record['seconds']:.1f} s, "
        f"{'no steady rate' if rate is None else f'{rate:,.0f} samples/s'}, "
        f"held-out loss {record['heldout_loss']:.4f}"
        + ("" if reached is None else f", target reached after {reached:.1f} s")
    )


def diagnose_rank(seat: Seat, job: DiagnoseConfig[TaskT]) -> Diagnosis:
    """Measure on this rank; every rank of the job calls this with equal settings.

    Args:
        seat: Which rank this is.
        job: What to measure.

    Raises:
        StrettoError: A setting, a step or a rank failed.
    """
    torch.set_num_threads(job.threads)
    run = parse_arm(job.strategy).configure(job)
    device = choose_device(run.device, seat)
    with seated(seat, Link.parse(run.link), device, run.timeout_seconds):
        task = run.task.build(seat.rank, seat.world_size, run.seed, run.planned_updates)
        task.model.to(device)
        with open_handle(run, task) as handle:

            def step(batch: Batch) -> Update | None:
                return handle.micro_batch(partial(task.loss, handle.model), batch)

            found = diagnose(slowed(run, task.loader, seat.rank), step, batches=job.batches)
            handle.finish()
    return found
