"""One rank's whole run: join the others, build the task, begin or continue, train, look at the result."""

import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from stretto.disk import replace_file, replace_folder
from stretto.errors import LeftOut
from stretto.groups import Link, ThrottledLeavable
from stretto.groups.wire import Wire
from stretto.machine import most_bytes, peak_resident_bytes
from stretto.recorder import Curves, RunFiles
from stretto.survive import Term, survives
from stretto.terminal import printable
from stretto_lab.observe import (
    Header,
    Observer,
    Progress,
    StrikeRecorder,
    strikes_file,
)
from stretto_lab.patience import waiting
from stretto_lab.recipes import MicroBatches, Task
from stretto_lab.recipes.task import loss_unit
from stretto_lab.train.arms import parse_arm
from stretto_lab.train.budget import Budget, budget_of
from stretto_lab.train.configuration import RunConfig, TaskT
from stretto_lab.train.handle import Rehearsal, open_handle
from stretto_lab.train.loop import Loop, LoopPlan, Stopwatch, seconds_to_loss
from stretto_lab.train.outcome import Outcome, Totals, note_parameters
from stretto_lab.train.replaced import Left
from stretto_lab.train.shards import placed, whole_state
from stretto_lab.train.slow_rank import Wait, slow_down
from stretto_lab.train.state import Saves, TrainState, loader_of
from stretto_lab.train.workers import (
    RankInfo,
    address_of,
    choose_device,
    described_device,
    joined_group,
    store_of,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """Where a rank trains, once it has joined the others."""

    rank: int
    """From 0."""
    world_size: int
    """How many ranks there are."""
    device: torch.device
    """Where its model lives."""
    group: dist.ProcessGroup | None = None
    """The group of all ranks; None is torch's default group."""
    now: Callable[[], float] = time.perf_counter
    """The clock of the training time, in seconds."""
    wait: Wait = time.sleep
    """Lets as many seconds of that clock pass."""
    term: Term | None = None
    """Of a job that survives the loss of ranks."""
    total: int | None = None
    """Micro-batches of all ranks together in an update of such a job, so that the batch stays unchanged; None under a
    clock."""
    losses: dict[int, float] | None = None
    """Held-out losses by update, where ranks share a process: all would compute the same of the same parameters."""

    @property
    def whole(self) -> Any:
        """The group of all ranks. Call its methods: the functions of torch.distributed know no virtual one."""
        return self.group or dist.group.WORLD


def train_rank(
    info: RankInfo,
    run: RunConfig[TaskT],
    warmup_updates: int,
    shows_progress: bool,
    is_passing: bool = False,
) -> Outcome:
    """Train on this rank; every rank of the job calls this with equal settings.

    Args:
        info: Which rank this is.
        run: What to train.
        warmup_updates: First updates that the outcome's rate skips.
        shows_progress: Whether rank 0 shows the run as it goes.
        is_passing: Whether it is one of many; see `Header`.

    Raises:
        StrettoError: A setting, the training or a rank failed.
    """
    torch.set_num_threads(1)
    device = choose_device(run.device, info)
    context = RankContext(rank=info.rank, world_size=info.world_size, device=device)
    with (
        _progress(context, info, run, shows_progress, is_passing) as progress,
        joined_group(info, Link.parse(run.link), device, run.timeout_seconds),
    ):
        return train_at(context, run, warmup_updates, progress)


def surviving_rank(
    info: RankInfo, run: RunConfig[TaskT], warmup_updates: int, shows_progress: bool
) -> Outcome | Left | None:
    """As `train_rank`, on workers of which some may be lost or come; None where it came when the others were done."""
    torch.set_num_threads(1)
    device = choose_device(run.device, info)
    wire = Wire(Link.parse(run.link))
    total = run.micro_batches * info.world_size if run.clock is None else None
    # Before the process gives its name: in a term all wait for each other.
    is_told = shows_progress and info.rank == 0
    with waiting("reading data, building the model") if is_told else nullcontext():
        whole = _built(run, info.rank, info.world_size, total)
        if run.shard == 1:
            whole.model.to(device)
    built = [whole]
    del whole

    def train(term: Term) -> Outcome:
        group = term.group if wire.link.is_free else ThrottledLeavable(term.group, wire)
        context = RankContext(
            rank=term.rank, world_size=term.world_size, device=device, group=group, term=term, total=total
        )
        # Who is slow is a place, whatever number its rank has.
        of_term = dataclasses.replace(run, slow={term.rank: run.slow.get(info.rank, 1.0)})
        with _progress(context, info, run, shows_progress) as progress:
            task = _placed_anew(built[0], of_term, term, total) if built else None
            if run.shard > 1:
                built.clear()  # FSDP2 cuts a model once: every later term builds one of its own
            return train_at(context, of_term, warmup_updates, progress, task)

    try:
        return survives(
            train,
            store=store_of(info, timedelta(seconds=run.timeout_seconds)),
            rank=info.rank,
            ranks=info.world_size,
            silent_seconds=run.silent_seconds,
            ranks_per_node=run.ranks_per_node or run.shard,
            seat=info.seat,
            address=address_of(info),
        )
    except LeftOut as error:
        return None if error.is_over else Left(str(error))


@contextmanager
def _progress(
    context: RankContext, info: RankInfo, run: RunConfig[TaskT], is_shown: bool, is_passing: bool = False
) -> Iterator[Progress | None]:
    """Yield what shows the run on rank 0, and None on others or where nothing does."""
    if context.rank or not is_shown:
        yield None
        return
    place = described_device(context.device, run.device, info.local_world_size)
    title = title_of(run, context.world_size, place)
    header = Header(
        title=title,
        updates=run.planned_updates,
        seconds=run.planned_seconds,
        samples=run.samples,
        loss_unit=loss_unit(run.task),
        is_passing=is_passing,
    )
    with Progress(header).watched() as progress:
        progress.waits("waiting for the other workers")
        yield progress


def train_at(
    context: RankContext,
    run: RunConfig[TaskT],
    warmup_updates: int,
    progress: Progress | None = None,
    task: Task | None = None,
) -> Outcome:
    """Train on a rank that has joined the others, and show it as `progress`; the rest is as for `train_rank`.

    A process that has built its task before it joined gives that.
    """
    budget = budget_of(run, context.world_size, context.total)
    task, mesh = _begun(context, run, progress, task)
    loader = loader_of(run, task.loader, context.rank, context.group, budget)
    task = dataclasses.replace(task, loader=loader)
    totals = Totals(warmup_updates, baseline_bytes=peak_resident_bytes())
    rehearsal = Rehearsal(run, context.rank)
    scheduler = task.scheduler if budget is None else budget.paces(task.scheduler)
    group = rehearsal.wrap(context.group)
    with open_handle(
        run, task.model, task.optimizer, scheduler, group, budget, mesh, context.total
    ) as handle:
        rehearsal.begin(handle)
        slow_down(handle, run.slow, context.device, context.now, context.wait)
        _seed(run.seed, context.rank)
        start = TrainState.restore(run, task, handle, context.term, context.total)
        if budget is not None:
            budget.go_on(start.step or 0, start.samples)
        saves = Saves(run, task, handle, totals, context.term)
        if progress is not None:
            _show_start(progress, start, budget, saves)
        totals.evaluations.extend(start.evaluations)
        _begin_together(context)
        stopwatch = Stopwatch(start.training_seconds, context.now)
        observers = _observers(run, start, context, progress, rehearsal)
        loop = Loop(
            task,
            handle,
            _plan(run, budget),
            observers=observers,
            saves=saves,
            stopwatch=stopwatch,
            totals=totals,
            losses={} if context.losses is None else context.losses,
        )
        for observer, incident in itertools.product(observers, start.incidents):
            observer.noticed(incident)
        try:
            outcome = _train(run, loop, context)
        finally:
            for observer in observers:
                observer.close()
    return dataclasses.replace(
        outcome,
        resumed_from=start.step or 0,
        seconds_before=start.training_seconds,
        faults_struck=rehearsal.struck,
    )


def _show_start(progress: Progress, start: TrainState, budget: Budget | None, saves: Saves[Any]) -> None:
    progress.lands_when(lambda: saves.is_stopped)
    if budget is not None:
        progress.lasts(budget.share)
    if start.step:
        progress.doing(f"resuming after update {start.step}")
    for note in start.notes:
        progress.doing(f"note: {note}")
    progress.waits("waiting for the others, or evaluating before the first update")


def _begun(
    context: RankContext, run: RunConfig[TaskT], progress: Progress | None, task: Task | None
) -> tuple[Task, Any]:
    """Return the task on its device, built here unless it has been built before, and the mesh of `placed`."""
    if progress is not None:
        follows = "" if task is not None else ": reading data, building the model"
        progress.doing(f"workers have started on {context.device}{follows}")
    task = task or _built(run, context.rank, context.world_size, context.total)
    mesh = placed(task, run, context.device, context.term)
    size = sum(parameter.numel() for parameter in task.model.parameters())
    if context.rank == 0 and run.run_dir is not None:
        note_parameters(Path(run.run_dir), size)
    if progress is not None:
        progress.doing(f"data and model are ready: {size:,} parameters")
    return task, mesh


def _built(run: RunConfig[TaskT], rank: int, world_size: int, total: int | None) -> Task:
    budget = budget_of(run, world_size, total)
    return run.task.build(rank, world_size, run.seed, None if budget is None else budget.length)


def _placed_anew(task: Task, run: RunConfig[TaskT], term: Term, total: int | None) -> Task:
    """Return a task that was built for any rank as the task of a member of a term."""
    if isinstance(task.loader, MicroBatches):
        return dataclasses.replace(task, loader=task.loader.at(term.rank, term.world_size))
    return _built(run, term.rank, term.world_size, total)  # only it knows how to deal its data out


def _begin_together(context: RankContext) -> None:
    """Wait until all ranks are here: no clock of theirs starts before.

    A broadcast lets its root go as soon as the buffers of its sockets have taken the last megabyte. On a slow link the
    others arrive seconds later. Without this, the first exchange would wait for them within the training time: of one
    strategy in the first update, which rates skip, and of another later.
    """
    here = torch.ones((), device=context.device)
    context.whole.allreduce([here]).wait()
    here.item()  # a device's work has ended only now


def _train(run: RunConfig[TaskT], loop: Loop, context: RankContext) -> Outcome:
    """Train, from the first evaluation to the last, or to a stop signal."""
    if not loop.totals.evaluations:
        loop.evaluate()
    loop.run()
    training_seconds, cpu_seconds = loop.stopwatch.seconds, loop.stopwatch.cpu_seconds
    is_stopped = loop.can_land and _any_is_stopped(loop, context)
    if not is_stopped:
        loop.evaluate()
    if loop.plan.checkpoint_every is not None:
        loop.save()
    if not is_stopped and run.run_dir is not None:
        state = whole_state(loop.task.model, keeps=context.rank == 0)
        if context.rank == 0:
            _write_model(loop.task, state, Path(run.run_dir))
    return _outcome(run, loop, training_seconds, cpu_seconds, looks=not is_stopped)


def _write_model(task: Task, state: Mapping[str, Tensor], folder: Path) -> None:
    replace_file(folder / "model.pt", lambda path: torch.save(state, path))
    if task.publish is not None:
        replace_folder(folder / "model", partial(task.publish, state))


def _any_is_stopped(loop: Loop, context: RankContext) -> bool:
    """Return whether a stop signal has come to any rank; all ranks must call."""
    told = torch.tensor([float(loop.is_stopped)], device=context.device)
    context.whole.allreduce([told]).wait()
    return bool(told.item() > 0)


def _outcome(
    run: RunConfig[TaskT], loop: Loop, training_seconds: float, cpu_seconds: float, *, looks: bool
) -> Outcome:
    """Return the outcome, with a look at the trained model if `looks`."""
    task, handle, totals = loop.task, loop.handle, loop.totals
    accuracy, sample = None, None
    if looks:
        with handle.settled():
            accuracy = None if task.accuracy is None else task.accuracy(task.model)
            sample = None if task.sample is None else printable(task.sample(task.model))
    return Outcome(
        updates=handle.steps,
        samples=totals.samples,
        fresh_samples=totals.fresh_samples,
        training_seconds=training_seconds,
        cpu_seconds=cpu_seconds,
        samples_per_second=totals.samples_per_second,
        exposed_seconds=_known(totals.exposed_seconds),
        lane_seconds=_known(totals.lane_seconds),
        sent_bytes=totals.sent_bytes,
        fresh_batches=totals.fresh_batches,
        echoed_batches=totals.echoed_batches,
        wait_seconds=totals.wait_seconds,
        baseline_bytes=totals.baseline_bytes,
        peak_bytes=peak_resident_bytes(),
        heldout_before=totals.evaluations[0].heldout_loss,
        heldout_loss=totals.evaluations[-1].heldout_loss,
        seconds_to_loss=None if run.to_loss is None else seconds_to_loss(totals.evaluations, run.to_loss),
        evaluations=tuple(totals.evaluations),
        accuracy=accuracy,
        sample=sample,
    )


def _plan(run: RunConfig[TaskT], budget: Budget | None) -> LoopPlan:
    return LoopPlan(
        budget=budget,
        seconds=run.planned_seconds,
        to_loss=run.to_loss,
        evaluate_every=run.evaluate_every,
        checkpoint_every=run.checkpoint_every if run.run_dir is not None else None,
    )


def title_of(run: RunConfig[TaskT], world_size: int, device: str, *, is_whole: bool = False) -> str:
    """Return what is trained where, in one line; `is_whole` with every option of the strategy."""
    workers = "1 worker" if world_size == 1 else f"{world_size} workers"
    arm = parse_arm(run.strategy)
    if run.shard > 1:
        nodes = world_size // run.shard
        workers += f", {nodes} node{'s' * (nodes > 1)} of {run.shard} shards"
    title = f"{arm.resolved if is_whole else arm.text} on {workers} ({device})"
    told = arm.settings  # by the strategy's own text
    formats = {"wire": run.wire, "changes": run.changes}
    for what, chosen in formats.items():
        if what not in told and chosen is not None and (what, chosen) != ("wire", "fp32"):
            title += f", {what} {chosen}"
    if run.link != "none":
        title += f", link {run.link}"
    if run.slow:
        title += ", slow " + ",".join(f"{rank}={factor:g}" for rank, factor in run.slow.items())
    if run.echo != "none":
        title += f", echo {run.echo}"
    if run.run_dir:
        title += f", {run.run_dir}"
    return printable(title)


def _observers(
    run: RunConfig[TaskT],
    start: TrainState,
    context: RankContext,
    progress: Progress | None,
    rehearsal: Rehearsal,
) -> list[Observer]:
    """Return who hears of the run on this rank: but for strikes, nobody but on rank 0."""
    observers: list[Observer] = []
    peak_bytes = partial(most_bytes, context.device)
    with ExitStack() as opened:  # one whose file is damaged must not leave the others open

        def add(observer: Any) -> None:
            observers.append(opened.enter_context(closing(observer)))

        if run.faults and run.run_dir is not None:
            path = strikes_file(Path(run.run_dir), context.rank)
            add(StrikeRecorder(path, start.step, rehearsal.applications))
        if context.rank == 0 and run.run_dir is not None:
            add(RunFiles(Path(run.run_dir), start.step, peak_bytes))
            if run.tensorboard:
                add(Curves(Path(run.run_dir, "tensorboard"), start.step))
        if progress is not None:
            observers.append(progress)
        opened.pop_all()
    return observers


def _seed(seed: int, rank: int) -> None:
    """Seed the random numbers of dropout and augmentation, for every rank differently."""
    torch_seed, numpy_seed, python_seed = np.random.SeedSequence([seed, rank]).generate_state(3)
    torch.manual_seed(int(torch_seed))
    np.random.seed(int(numpy_seed))
    random.seed(int(python_seed))


def _known(value: float) -> float | None:
    """Return None for NaN and infinity: the method could not measure it."""
    return value if math.isfinite(value) else None
