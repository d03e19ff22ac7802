"""One rank's whole run, from top to bottom: join the other ranks, build the task, start or resume, train, evaluate."""

import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from stretto import checkpoint
from stretto.disk import replace_file, replace_folder
from stretto.errors import LeftOut
from stretto.groups import Link, ThrottledLeavable
from stretto.groups.wire import Wire
from stretto.machine import most_bytes, peak_resident_bytes
from stretto.parallel import DataParallel
from stretto.random_states import kept_random_states
from stretto.recorder import Curves, RunFiles
from stretto.records import Update
from stretto.survive import Term, survives
from stretto.terminal import printable
from stretto_lab.faults import FaultPlan, FaultyGroup, Injector, strike_memory
from stretto_lab.observe import (
    Header,
    Observer,
    Progress,
    StrikeRecorder,
    strikes_file,
)
from stretto_lab.patience import waiting
from stretto_lab.recipes import MicroBatches, Task
from stretto_lab.recipes.task import MeanLoss, loss_unit, tokens_per_sample
from stretto_lab.train.arms import parse_arm
from stretto_lab.train.budget import Budget, budget_of
from stretto_lab.train.configuration import RunConfig, TaskT
from stretto_lab.train.handle import Handle, open_handle
from stretto_lab.train.outcome import Evaluation, Outcome, note_parameters, seconds_to_loss
from stretto_lab.train.processes import Stops
from stretto_lab.train.replaced import Left
from stretto_lab.train.shards import placed, whole_state
from stretto_lab.train.slow_rank import Wait, slow_down
from stretto_lab.train.state import KEPT, TrainState, checkpoints_of, loader_of, savable
from stretto_lab.train.workers import (
    RankInfo,
    address_of,
    choose_device,
    joined_group,
    store_of,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """The surroundings of a rank that has joined the others."""

    rank: int
    """This rank, from 0."""
    world_size: int
    """Number of ranks."""
    device: torch.device
    """Device of its model."""
    group: dist.ProcessGroup | None = None
    """The group of all ranks; None is PyTorch's default group."""
    now: Callable[[], float] = time.perf_counter
    """The clock of the training time, in seconds."""
    wait: Wait = time.sleep
    """Waits for a number of seconds of that clock."""
    term: Term | None = None
    """The membership, if the job survives lost ranks."""
    total: int | None = None
    """Micro-batches of all ranks together in an update of such a job, which keeps the batch constant; None under a
    clock."""
    losses: dict[int, float] | None = None
    """Held-out losses by update, if ranks share a process: all would compute the same loss from the same parameters."""

    @property
    def whole(self) -> Any:
        """The group of all ranks. Call its methods: torch.distributed's functions do not accept a virtual group."""
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
        info: This rank.
        run: The run.
        warmup_updates: Number of first updates that the outcome's rate skips.
        shows_progress: Whether rank 0 shows the progress.
        is_passing: Whether it is one of many runs; see `Header`.

    Raises:
        StrettoError: A setting, the training or a rank failed.
    """
    torch.set_num_threads(1)
    device = choose_device(run.device, info)
    context = RankContext(rank=info.rank, world_size=info.world_size, device=device)
    with (
        _progress(context, run, shows_progress, is_passing) as progress,
        joined_group(info, Link.parse(run.link), device, run.timeout_seconds),
    ):
        return train_at(context, run, warmup_updates, progress)


def surviving_rank(
    info: RankInfo, run: RunConfig[TaskT], warmup_updates: int, shows_progress: bool
) -> Outcome | Left | None:
    """Train as `train_rank` does, with workers that may be lost or join; return None if the worker joined after the
    end.
    """
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
        with _progress(context, run, shows_progress) as progress:
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
    context: RankContext, run: RunConfig[TaskT], is_shown: bool, is_passing: bool = False
) -> Iterator[Progress | None]:
    """Yield the display of the run on rank 0, and None on other ranks or if nothing is shown."""
    if context.rank or not is_shown:
        yield None
        return
    with Progress(header_of(run, is_passing=is_passing)).watched() as progress:
        progress.waits("waiting for the other workers")
        yield progress


def header_of(run: RunConfig[TaskT], *, is_virtual: bool = False, is_passing: bool = False) -> Header:
    """Return the facts about a run that do not change while it trains."""
    return Header(
        updates=run.planned_updates,
        seconds=run.planned_seconds,
        samples=run.samples,
        loss_unit=loss_unit(run.task),
        tokens_per_sample=tokens_per_sample(run.task),
        is_virtual=is_virtual,
        is_passing=is_passing,
    )


def train_at(
    context: RankContext,
    run: RunConfig[TaskT],
    warmup_updates: int,
    progress: Progress | None = None,
    task: Task | None = None,
) -> Outcome:
    """Train on a rank that has joined the others, and show `progress`; other arguments are as for `train_rank`.

    A process that built its task before it joined passes the task.
    """
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
    budget = budget_of(run, context.world_size, context.total)
    loader = loader_of(run, task.loader, context.rank, context.group, budget)
    task = dataclasses.replace(task, loader=loader)
    scheduler = task.scheduler if budget is None else budget.paces(task.scheduler)
    baseline_bytes = peak_resident_bytes()
    injector = Injector(FaultPlan(run.faults).drawn_from(run.seed), context.rank)
    group = FaultyGroup(context.whole, injector) if run.faults else context.group
    with open_handle(
        run, task.model, task.optimizer, scheduler, group, budget, mesh, context.total
    ) as handle:
        if run.faults:
            strike_memory(savable(handle), injector)
        slow_down(handle, run.slow, context.device, context.now, context.wait)
        _seed(run.seed, context.rank)
        start = TrainState.restore(run, task, handle, context.term, context.total)
        if budget is not None:
            budget.go_on(start.step or 0, start.samples)
        stops = Stops() if run.saves_every is not None else None
        if progress is not None:
            progress.follows(
                is_stopped=lambda: stops is not None and stops.has_come,
                share=float if budget is None else budget.share,
            )
            if start.step:
                progress.doing(f"resuming after update {start.step}")
            for note in start.notes:
                progress.doing(f"note: {note}")
            progress.waits("waiting for the other ranks, or measuring the held-out loss")
        _begin_together(context)
        stopwatch = Stopwatch(start.training_seconds, context.now)
        with _observers(run, start, context, progress, injector) as observers:
            for observer, incident in itertools.product(observers, start.incidents):
                observer.noticed(incident)
            loop = Loop(
                run=run, context=context, task=task, handle=handle, budget=budget, observers=observers,
                stopwatch=stopwatch, stops=stops, start=start,
            )  # fmt: skip
            outcome = loop.train(warmup_updates, baseline_bytes)
    struck = sum(application.changed for application in injector.applications)
    return dataclasses.replace(outcome, faults_struck=struck)


def _built(run: RunConfig[TaskT], rank: int, world_size: int, total: int | None) -> Task:
    budget = budget_of(run, world_size, total)
    return run.task.build(rank, world_size, run.seed, None if budget is None else budget.length)


def _placed_anew(task: Task, run: RunConfig[TaskT], term: Term, total: int | None) -> Task:
    """Return the task as the task of a member of a term; it was built for any rank."""
    if isinstance(task.loader, MicroBatches):
        return dataclasses.replace(task, loader=task.loader.at(term.rank, term.world_size))
    return _built(run, term.rank, term.world_size, total)  # only it knows how to deal its data out


def _begin_together(context: RankContext) -> None:
    """Wait until all ranks have arrived, before any clock starts.

    The root of a broadcast returns as soon as its sockets have buffered the last megabyte. On a slow link the other
    ranks arrive seconds later. Without this wait, the first exchange would wait for them during the training time: one
    strategy in its first update, which rates skip, and another strategy later.
    """
    here = torch.ones((), device=context.device)
    context.whole.allreduce([here]).wait()
    here.item()  # a device's work has ended only now


class Stopwatch:
    """Measures training time: it runs from the start, except in blocks that pause it.

    Args:
        before: Seconds of training before the checkpoint from which the run resumed.
        now: The clock, in seconds; a virtual cluster has its own.
    """

    def __init__(self, before: float, now: Callable[[], float]) -> None:
        self._clocks = {"wall": now, "processor": time.process_time}
        self._started = {name: clock() for name, clock in self._clocks.items()}
        self._started["wall"] -= before
        self._held_at: dict[str, float] = {}

    def _read(self, name: str) -> float:
        return self._held_at.get(name, self._clocks[name]()) - self._started[name]

    @property
    def seconds(self) -> float:
        """Training time so far."""
        return self._read("wall")

    @property
    def cpu_seconds(self) -> float:
        """Processor time of all threads of the process, during this process's training time."""
        return self._read("processor")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Pause the stopwatch during the block; blocks do not nest."""
        self._held_at = {name: clock() for name, clock in self._clocks.items()}
        try:
            yield
        finally:
            for name, held_at in self._held_at.items():
                self._started[name] += self._clocks[name]() - held_at
            self._held_at = {}


_SUMMED = (
    "samples", "fresh_samples", "sent_bytes", "exposed_seconds", "lane_seconds", "wait_seconds", "fresh", "echoed",
)  # fmt: skip
"""Fields of an update that the outcome sums over this process's updates."""


@dataclasses.dataclass(kw_only=True)
class Loop:
    """The training loop of one rank, the same for every strategy and every stock method.

    Evaluations, observers and checkpoints do not change a run: they come right after an update, the stopwatch is
    paused, and random states are restored. A run is bit-identical with and without them.
    """

    run: RunConfig[Any]
    context: RankContext
    task: Task
    handle: Handle
    budget: Budget | None
    observers: Sequence[Observer]
    """Observers of every update, evaluation and incident; only rank 0 has any."""
    stopwatch: Stopwatch
    stops: Stops | None
    """The received stop signals, if these let the run save and end; None on all ranks or on none."""
    start: TrainState

    def __post_init__(self) -> None:
        self.evaluations = list(self.start.evaluations)
        self.sums: dict[str, Any] = dict.fromkeys(_SUMMED, 0)
        self.arrivals: list[tuple[float, int]] = []

    def train(self, warmup_updates: int, baseline_bytes: int) -> Outcome:
        """Train from the first evaluation to the last update or a stop signal; then finish, save and evaluate."""
        if not self.evaluations:
            self._evaluate()
        last = None if self.budget is None else self.budget.last_update(self.handle.steps)
        loss_function = partial(self.task.loss, self.handle.model)
        for batch in self.handle.feed(self.task.loader, last, on_update=self._committed):
            self.handle.micro_batch(loss_function, batch)
        for update in self.handle.finish():  # these come at another pace: the rate leaves them out
            self._count(update)
        for incident, observer in itertools.product(self.handle.late_incidents, self.observers):
            observer.noticed(incident)
        seconds, cpu_seconds = self.stopwatch.seconds, self.stopwatch.cpu_seconds
        is_stopped = self.stops is not None and self._any_is_stopped(self.stops)
        if not is_stopped:
            self._evaluate()
        if self.run.saves_every is not None:
            self._save()
        accuracy, sample = None, None
        if not is_stopped:
            self._write_model()
            with self.handle.settled():
                model = self.task.model
                accuracy = None if self.task.accuracy is None else self.task.accuracy(model)
                sample = None if self.task.sample is None else printable(self.task.sample(model))
        sums = dict(self.sums)
        target = self.run.to_loss
        return Outcome(
            updates=self.handle.steps,
            fresh_batches=sums.pop("fresh"),
            echoed_batches=sums.pop("echoed"),
            exposed_seconds=_known(sums.pop("exposed_seconds")),
            lane_seconds=_known(sums.pop("lane_seconds")),
            **sums,
            training_seconds=seconds,
            cpu_seconds=cpu_seconds,
            samples_per_second=self._rate(warmup_updates),
            baseline_bytes=baseline_bytes,
            peak_bytes=peak_resident_bytes(),
            heldout_before=self.evaluations[0].heldout_loss,
            heldout_loss=self.evaluations[-1].heldout_loss,
            seconds_to_loss=None if target is None else seconds_to_loss(self.evaluations, target),
            evaluations=tuple(self.evaluations),
            accuracy=accuracy,
            sample=sample,
            resumed_from=self.start.step or 0,
            seconds_before=self.start.training_seconds,
        )

    def _committed(self, update: Update) -> None:
        """Do all work between an update and the next micro-batch."""
        self.arrivals.append((self.stopwatch.seconds, update.samples))
        self._count(update)
        if _is_due(update.step, self.run.evaluate_every):
            self._evaluate()
        if _is_due(update.step, self.run.saves_every):
            self._save()
        if self.context.term is not None:
            self.context.term.keep(
                savable(self.handle), loader=self.task.loader, extra=lambda: self._state().extra()
            )
        if self.budget is not None and self.budget.is_spent:
            self.handle.end()
        # Rank 0's clock and losses alone decide, or a stop signal to any rank; others hear of it at the next round.
        is_stopped = self.stops is not None and self.stops.has_come
        if is_stopped or (self.handle.rank == 0 and self._has_enough()):
            self.handle.stop()

    def _count(self, update: Update) -> None:
        for name in _SUMMED:
            self.sums[name] += getattr(update, name)
        if self.budget is not None:
            self.budget.count(update)
        with self.stopwatch.held():
            for observer in self.observers:
                observer.updated(update, self.stopwatch.seconds)

    def _has_enough(self) -> bool:
        if self.run.planned_seconds is not None and self.stopwatch.seconds >= self.run.planned_seconds:
            return True
        return (
            self.run.to_loss is not None and seconds_to_loss(self.evaluations, self.run.to_loss) is not None
        )

    def _evaluate(self) -> None:
        """Measure the held-out loss of the committed parameters, once per update; all ranks must call it."""
        step, losses = self.handle.steps, self.context.losses
        if self.evaluations and self.evaluations[-1].step == step:
            return
        with self.stopwatch.held(), kept_random_states(self.context.device), self.handle.settled():
            known = None if losses is None else losses.get(step)
            loss = self._heldout_loss() if known is None else known
            if losses is not None:
                losses[step] = loss
            seconds = self.stopwatch.seconds
            self.evaluations.append(Evaluation(step=step, training_seconds=seconds, heldout_loss=loss))
            for observer in self.observers:
                observer.evaluated(step, loss, seconds)

    def _heldout_loss(self) -> float:
        evaluate, job, model = self.task.evaluate, self.handle, self.task.model
        # The ranks of a node run a sharded model together, and a stock method has no job to gather by.
        deals = self.context.losses is None and self.run.shard == 1
        if deals and isinstance(evaluate, MeanLoss) and isinstance(job, DataParallel):
            return evaluate(model, job)
        return evaluate(model)

    def _save(self) -> None:
        """Write a checkpoint; all ranks must call it, right after an update or at the end."""
        with self.stopwatch.held():
            checkpoint.save(
                savable(self.handle),
                checkpoints_of(self.run),
                loader=self.task.loader,
                extra=self._state().extra(),
                keep=KEPT,
            )

    def _state(self) -> TrainState:
        return TrainState(
            step=self.handle.steps,
            training_seconds=self.stopwatch.seconds,
            samples=None if self.budget is None else self.budget.samples,
            evaluations=tuple(self.evaluations),
        )

    def _any_is_stopped(self, stops: Stops) -> bool:
        """Return whether any rank has received a stop signal; all ranks must call it."""
        told = torch.tensor([float(stops.has_come)], device=self.context.device)
        self.context.whole.allreduce([told]).wait()
        return bool(told.item() > 0)

    def _write_model(self) -> None:
        if self.run.run_dir is None:
            return
        folder = Path(self.run.run_dir)
        state = whole_state(self.task.model, keeps=self.context.rank == 0)
        if self.context.rank == 0:
            replace_file(folder / "model.pt", lambda path: torch.save(state, path))
            if self.task.publish is not None:
                replace_folder(folder / "model", partial(self.task.publish, state))

    def _rate(self, warmup_updates: int) -> float | None:
        """Return samples per second, from the last update of the warm-up to the last one that the loop received."""
        steady = self.arrivals[max(0, warmup_updates - 1) :]
        if len(steady) < 2:
            return None
        return sum(samples for _, samples in steady[1:]) / (steady[-1][0] - steady[0][0])


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def title_of(run: RunConfig[TaskT], world_size: int, device: str, *, is_whole: bool = False) -> str:
    """Return recipe, strategy and workers in one line; with `is_whole`, every option of the strategy."""
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


@contextmanager
def _observers(
    run: RunConfig[TaskT],
    start: TrainState,
    context: RankContext,
    progress: Progress | None,
    injector: Injector,
) -> Iterator[Sequence[Observer]]:
    """Yield the observers of this rank; only rank 0 has any, except for the recorder of injected faults."""
    observers: list[Observer] = []
    with ExitStack() as opened:  # one whose file is damaged must not leave the others open

        def add(observer: Any) -> None:
            observers.append(opened.enter_context(closing(observer)))

        if run.run_dir is not None:
            folder = Path(run.run_dir)
            if run.faults:
                add(StrikeRecorder(strikes_file(folder, context.rank), start.step, injector.applications))
            if context.rank == 0:
                add(RunFiles(folder, start.step, partial(most_bytes, context.device)))
                if run.tensorboard:
                    add(Curves(folder / "tensorboard", start.step))
        if progress is not None:
            add(progress)
        yield observers


def _seed(seed: int, rank: int) -> None:
    """Seed the random numbers of dropout and augmentation, differently on every rank."""
    torch_seed, numpy_seed, python_seed = np.random.SeedSequence([seed, rank]).generate_state(3)
    torch.manual_seed(int(torch_seed))
    np.random.seed(int(numpy_seed))
    random.seed(int(python_seed))


def _known(value: float) -> float | None:
    """Return None for NaN and infinity, which mean that the method could not measure the value."""
    return value if math.isfinite(value) else None
