"""Two measurements: strategies one after another on the same link, and whether a run waits for its data."""

import dataclasses
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stretto.echo import Diagnosis, diagnose
from stretto.groups import Link
from stretto.machine import describe_environment
from stretto.records import Update
from stretto_lab.observe import Stages, replace_json
from stretto_lab.patience import clock
from stretto_lab.recipes.task import Batch, loss_unit
from stretto_lab.train.arms import Arm, parse_arm, parse_arms
from stretto_lab.train.configuration import CompareConfig, DiagnoseConfig, RunConfig, TaskT
from stretto_lab.train.handle import check_run, open_handle
from stretto_lab.train.launch import Ranks, train
from stretto_lab.train.outcome import Outcome
from stretto_lab.train.shards import placed
from stretto_lab.train.slow_rank import slow_down
from stretto_lab.train.state import slowed
from stretto_lab.train.workers import RankInfo, choose_device, device_of, joined_group

RESULTS = "compare.json"


def compare(
    comparison: CompareConfig[TaskT], ranks: Ranks, log: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Run every arm once, then all arms again, and return one record per run.

    The first rank writes the records to compare.json after every run, so that an interrupted comparison keeps them.

    Args:
        comparison: Arms, repeats, and the settings common to all arms.
        ranks: The ranks that train.
        log: Called with one line of text before and after every run.

    Raises:
        ConfigError: The settings of an arm contradict each other; no run has begun.
        WorkerFailed: A rank failed.
    """
    arms = parse_arms(comparison.strategies)
    for arm in arms:
        check_run(_run_of(arm, comparison, 0), ranks.world_size)
    device = device_of(comparison.device, 0, ranks.local_world_size)
    environment = {
        **describe_environment(device),
        "workers": ranks.world_size,
        "link": comparison.link,
    }
    if ranks.is_first:
        Path(comparison.out).mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = []
    started, whole = time.monotonic(), comparison.repeats * len(arms)
    for repeat in range(comparison.repeats):
        for arm in arms:
            run = _run_of(arm, comparison, repeat)
            log(f"repeat {repeat + 1} of {comparison.repeats}: {arm.text}{left(started, len(runs), whole)}")
            outcome = train(ranks, run, shows_progress=True, is_passing=True)
            runs.append(_record(arm, run, repeat, outcome))
            log(_summary(runs[-1]))
            if ranks.is_first:
                content = {
                    "runs": runs,
                    "environment": environment,
                    "comparison": dataclasses.asdict(comparison),
                }
                replace_json(Path(comparison.out, RESULTS), content)
    return runs


def left(started: float, done: int, whole: int) -> str:
    """Return the time of the remaining runs, at the pace of the finished runs."""
    if not done:
        return ""
    return f" (about {clock((time.monotonic() - started) / done * (whole - done))} left for all)"


def _run_of(arm: Arm, comparison: CompareConfig[TaskT], repeat: int) -> RunConfig[TaskT]:
    """Return the run of an arm; all arms of a repeat have the same seed, for comparison in pairs."""
    shared = comparison.fitted_to(arm)
    run = dataclasses.replace(shared, seed=comparison.seed + repeat).run_of(arm)
    return dataclasses.replace(run, faults=comparison.faults)


def _record(arm: Arm, run: RunConfig[TaskT], repeat: int, outcome: Outcome) -> dict[str, Any]:
    measured = dataclasses.asdict(outcome)
    return {
        "strategy": arm.text,
        "resolved_strategy": arm.resolved,
        "loss_unit": loss_unit(run.task).strip(),
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
        f"held-out loss {record['heldout_loss']:.4f} {record['loss_unit']}".rstrip()
        + ("" if reached is None else f", target reached after {reached:.1f} s")
    )


def diagnose_rank(info: RankInfo, job: DiagnoseConfig[TaskT]) -> Diagnosis:
    """Measure this rank's loader and steps; every rank of the job calls this with equal settings.

    Args:
        info: This rank.
        job: The job to measure.

    Raises:
        StrettoError: A setting, a step or a rank failed.
    """
    torch.set_num_threads(1)
    run = job.run_of(parse_arm(job.strategy))
    device = choose_device(run.device, info)
    with (
        Stages(is_shown=info.rank == 0) as stages,
        joined_group(info, Link.parse(run.link), device, run.timeout_seconds),
    ):
        stages.begin("building the model")
        task = run.task.build(info.rank, info.world_size, run.seed, run.planned_updates)
        mesh = placed(task, run, device)
        with open_handle(run, task.model, task.optimizer, mesh=mesh) as handle:
            slow_down(handle, run.slow, device)

            def told(what: str, done: int, total: int) -> None:
                if done == 0:
                    stages.begin(f"measuring {what}", total)
                else:
                    stages.advance()

            def step(batch: Batch) -> Update | None:
                return handle.micro_batch(partial(task.loss, handle.model), batch)

            # Whole updates, because the last micro-batch of one waits for communication.
            whole = math.ceil(job.batches / run.micro_batches) * run.micro_batches
            found = diagnose(slowed(run, task.loader, info.rank), step, batches=whole, told=told)
            handle.finish()
    return found
