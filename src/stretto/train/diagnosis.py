"""Measures one rank's loader and steps, beside those of the other ranks."""

from functools import partial

import torch

from stretto.echo import Diagnosis, diagnose
from stretto.groups import Link
from stretto.recipes.task import Batch
from stretto.records import Update
from stretto.train.arms import parse_arm
from stretto.train.configuration import DiagnoseConfig, TaskT
from stretto.train.data import slowed
from stretto.train.handle import open_handle
from stretto.train.seat import Seat, choose_device, seated


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
