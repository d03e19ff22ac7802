"""One rank's whole run: join the others, build the task, begin or continue, train, look at the result."""

import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import distributed as dist

from stretto.groups import Link
from stretto.observe import Header, Observer, Progress, Recorder, TensorBoard
from stretto.recipes import Task
from stretto.train.arms import parse_arm
from stretto.train.configuration import RunConfig, TaskT
from stretto.train.handle import Handle, Rehearsal, open_handle
from stretto.train.loop import Loop, Plan, Stopwatch, seconds_to_loss
from stretto.train.outcome import Outcome, Tally, peak_resident_bytes
from stretto.train.past import Past, loader_of
from stretto.train.workers import Seat, choose_device, seated


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Post:
    """Where a rank trains that has joined the others."""

    rank: int
    """From 0."""
    world_size: int
    """How many ranks there are."""
    device: torch.device
    """Where its model lives."""
    group: dist.ProcessGroup | None = None
    """Whose ranks train; None is torch's default group."""
    now: Callable[[], float] = time.perf_counter
    """The clock of the training time, in seconds."""


def train_rank(seat: Seat, run: RunConfig[TaskT], warmup_updates: int, shows_progress: bool) -> Outcome:
    """Train on this rank; every rank of the job calls this with equal settings.

    Args:
        seat: Which rank this is.
        run: What to do.
        warmup_updates: First updates that the outcome's rate leaves out.
        shows_progress: Whether rank 0 shows the run as it goes.

    Raises:
        StrettoError: A setting, the training or a rank failed; see the tree in `stretto.errors`.
    """
    torch.set_num_threads(run.threads)
    device = choose_device(run.device, seat)
    with seated(seat, Link.parse(run.link), device, run.timeout_seconds):
        post = Post(rank=seat.rank, world_size=seat.world_size, device=device)
        return train_at(post, run, warmup_updates, shows_progress)


def train_at(post: Post, run: RunConfig[TaskT], warmup_updates: int, shows_progress: bool) -> Outcome:
    """Train on a rank that has joined the others; arguments and errors are those of `train_rank`."""
    progress = None
    if shows_progress and post.rank == 0:
        title = title_of(run, post.world_size)
        progress = Progress(Header(title=title, updates=run.planned_updates, seconds=run.planned_seconds))
        progress.doing("reading the data and building the model")
    task = run.task.build(post.rank, post.world_size, run.seed, run.planned_updates)
    task.model.to(post.device)
    task = dataclasses.replace(task, loader=loader_of(run, task.loader, post.rank, post.group))
    tally = Tally(warmup_updates, baseline_bytes=peak_resident_bytes())
    rehearsal = Rehearsal(run, post.rank)
    with open_handle(run, task, rehearsal.wrap(post.group)) as handle:
        rehearsal.begin(handle)
        _seed(run.seed, post.rank)
        past = Past.restore(run, task, handle)
        tally.evaluations.extend(past.evaluations)
        stopwatch = Stopwatch(past.training_seconds, post.now)
        observers = _observers(run, past, post, progress)
        for observer, incident in itertools.product(observers, past.incidents):
            observer.noticed(incident)
        try:
            return _train(run, task, handle, past, tally, stopwatch, observers)
        finally:
            for observer in observers:
                observer.close()


def _train(
    run: RunConfig[TaskT],
    task: Task,
    handle: Handle,
    past: Past,
    tally: Tally,
    stopwatch: Stopwatch,
    observers: Sequence[Observer],
) -> Outcome:
    """Train with what is ready, from the first look at the held-out samples to the last."""

    def save(loop: Loop) -> None:
        now = Past(
            step=handle.steps,
            updates_fed=past.updates_fed + loop.batches_handed_out / run.micro_batches,
            training_seconds=loop.stopwatch.seconds,
            evaluations=tuple(tally.evaluations),
        )
        now.save(run, task, handle)

    loop = Loop(
        task,
        handle,
        _plan(run, past),
        observers=observers,
        save=save,
        stopwatch=stopwatch,
        tally=tally,
    )
    if not tally.evaluations:
        loop.evaluate()
    loop.run()
    training_seconds, cpu_seconds = loop.stopwatch.seconds, loop.stopwatch.cpu_seconds
    loop.evaluate()
    if loop.plan.checkpoint_every is not None:
        save(loop)
    if handle.rank == 0 and run.run_dir is not None:
        torch.save(task.model.state_dict(), Path(run.run_dir, "model.pt"))
    return _outcome(run, task, handle, tally, training_seconds, cpu_seconds)


def _outcome(
    run: RunConfig[TaskT],
    task: Task,
    handle: Handle,
    tally: Tally,
    training_seconds: float,
    cpu_seconds: float,
) -> Outcome:
    """Look at the trained model, and say what the run came to."""
    with handle.settled():
        accuracy = None if task.accuracy is None else task.accuracy(task.model)
        sample = None if task.sample is None else task.sample(task.model)
    return Outcome(
        updates=handle.steps,
        samples=tally.samples,
        training_seconds=training_seconds,
        cpu_seconds=cpu_seconds,
        samples_per_second=tally.samples_per_second,
        exposed_seconds=_known(tally.exposed_seconds),
        lane_seconds=_known(tally.lane_seconds),
        sent_bytes=tally.sent_bytes,
        fresh_batches=tally.fresh_batches,
        echoed_batches=tally.echoed_batches,
        wait_seconds=tally.wait_seconds,
        baseline_bytes=tally.baseline_bytes,
        peak_bytes=peak_resident_bytes(),
        heldout_before=tally.evaluations[0].heldout_loss,
        heldout_loss=tally.evaluations[-1].heldout_loss,
        seconds_to_loss=None if run.to_loss is None else seconds_to_loss(tally.evaluations, run.to_loss),
        evaluations=tuple(tally.evaluations),
        accuracy=accuracy,
        sample=sample,
    )


def _plan(run: RunConfig[TaskT], past: Past) -> Plan:
    updates = run.planned_updates
    batches = last_step = None
    if updates is not None and run.clock is None:
        batches = max(0, round((updates - past.updates_fed) * run.micro_batches))
    elif updates is not None:
        # With a clock, an overlapping strategy commits its last update while it drains.
        last_step = updates - 1 if parse_arm(run.strategy).overlaps else updates
    return Plan(
        batches=batches,
        last_step=last_step,
        seconds=run.planned_seconds,
        to_loss=run.to_loss,
        evaluate_every=run.evaluate_every,
        checkpoint_every=run.checkpoint_every if run.run_dir is not None else None,
    )


def title_of(run: RunConfig[TaskT], world_size: int) -> str:
    """Return what is trained where, in one line."""
    workers = "1 worker" if world_size == 1 else f"{world_size} workers"
    title = f"{run.strategy} on {workers}, link {run.link}"
    if run.echo != "none":
        title += f", echo {run.echo}"
    if run.run_dir:
        title += f", {run.run_dir}"
    return title


def _observers(run: RunConfig[TaskT], past: Past, post: Post, progress: Progress | None) -> list[Observer]:
    """Return who hears of the run on this rank: nobody but on rank 0."""
    observers: list[Observer] = []
    if post.rank == 0 and run.run_dir is not None:
        observers.append(Recorder(Path(run.run_dir), past.step))
        if run.tensorboard:
            observers.append(TensorBoard(Path(run.run_dir, "tensorboard"), past.step))
    if progress is not None:
        observers.append(progress)
    return observers


def _seed(seed: int, rank: int) -> None:
    """Give every rank random draws of its own: models may drop out, data may be augmented."""
    torch_seed, numpy_seed, python_seed = np.random.SeedSequence([seed, rank]).generate_state(3)
    torch.manual_seed(int(torch_seed))
    np.random.seed(int(numpy_seed))
    random.seed(int(python_seed))


def _known(value: float) -> float | None:
    """Return None for a number that nobody could measure."""
    return value if math.isfinite(value) else None
