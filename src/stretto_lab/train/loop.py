"""The training loop, the same for every strategy and every stock method.

    feed -> micro-batch -> on an update: scheduler, observers, evaluation, checkpoint

Evaluations, observers and checkpoints do not change a run: they happen right after an update, while the stopwatch is
held, and random states are put back. A run is the same to the bit with and without them.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from stretto.random_states import kept_random_states
from stretto.records import Update
from stretto_lab.observe import Observer
from stretto_lab.recipes import Task
from stretto_lab.train.budget import Budget
from stretto_lab.train.handle import Handle
from stretto_lab.train.outcome import Evaluation, Totals
from stretto_lab.train.state import Saves


def seconds_to_loss(evaluations: Sequence[Evaluation], target: float) -> float | None:
    """Return the training time at which `target` was reached, or None.

    A single evaluation at or below the target may be luck, so the next one has to confirm it. The time is taken
    between evaluations, on the straight line from the last one above the target, if that is finite, to the first of
    the two below:

        t = t0 + (t1 - t0) (l0 - target) / (l0 - l1),      l0 > target >= l1

    Args:
        evaluations: In the order of time.
        target: Held-out loss.
    """
    for index in range(len(evaluations) - 1):
        first, confirming = evaluations[index], evaluations[index + 1]
        if first.heldout_loss <= target and confirming.heldout_loss <= target:
            return _crossing(evaluations[index - 1], first, target) if index else first.training_seconds
    return None


def _crossing(above: Evaluation, below: Evaluation, target: float) -> float:
    if not math.isfinite(above.heldout_loss):
        return below.training_seconds  # no line leads there
    # The evaluation before a confirmed pair is above the target, or it would have been the pair's first.
    share = (above.heldout_loss - target) / (above.heldout_loss - below.heldout_loss)
    return above.training_seconds + share * (below.training_seconds - above.training_seconds)


class Stopwatch:
    """Measures training time: it runs from the start, but not in blocks in which it is held.

    Args:
        before: Seconds of training before the checkpoint that the run continues from.
        now: The clock, in seconds; a virtual cluster has its own.
    """

    def __init__(self, before: float = 0.0, now: Callable[[], float] = time.perf_counter) -> None:
        self._wall = _Clock(now, before)
        self._cpu = _Clock(time.process_time, 0.0)

    @property
    def seconds(self) -> float:
        """Training time so far."""
        return self._wall.seconds

    @property
    def cpu_seconds(self) -> float:
        """Processor time of all threads of the process, in this part of the run."""
        return self._cpu.seconds

    @contextmanager
    def held(self) -> Iterator[None]:
        """Do not count the time of the block; blocks do not nest."""
        with self._wall.held(), self._cpu.held():
            yield


class _Clock:
    """One clock that can be held."""

    def __init__(self, clock: Callable[[], float], before: float) -> None:
        self._clock = clock
        self._started = clock() - before
        self._held_at: float | None = None

    @property
    def seconds(self) -> float:
        now = self._clock() if self._held_at is None else self._held_at
        return now - self._started

    @contextmanager
    def held(self) -> Iterator[None]:
        self._held_at = self._clock()
        try:
            yield
        finally:
            self._started += self._clock() - self._held_at
            self._held_at = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoopPlan:
    """When the loop evaluates, saves and ends."""

    budget: Budget | None
    """Updates or samples, those before a resume included, at which the loop ends; None for no limit."""
    seconds: float | None
    """Training time after which rank 0 asks all ranks to stop; None for no limit."""
    to_loss: float | None
    """Held-out loss at which rank 0 asks all ranks to stop; None for none."""
    evaluate_every: int | None
    """Updates between evaluations."""
    checkpoint_every: int | None
    """Updates between checkpoints."""


class Loop:
    """Trains a task on one rank.

    Args:
        task: What to train.
        handle: What its model is wrapped in.
        plan: When to evaluate, save and end.
        observers: Rank 0 tells them of every update, evaluation and incident; the others have none.
        saves: Writes the checkpoints.
        stopwatch: The training time.
        totals: Adds up the updates.
        losses: Held-out losses by update, as far as they are known.
    """

    def __init__(
        self,
        task: Task,
        handle: Handle,
        plan: LoopPlan,
        *,
        observers: Sequence[Observer],
        saves: Saves[Any],
        stopwatch: Stopwatch,
        totals: Totals,
        losses: dict[int, float],
    ) -> None:
        self.task = task
        self.handle = handle
        self.plan = plan
        self.stopwatch = stopwatch
        self.totals = totals
        self._device = next(task.model.parameters()).device
        self._observers = observers
        self._saves = saves
        self._losses = losses

    def run(self) -> None:
        """Train to the end of the plan, and commit what is left."""
        loss_function = partial(self.task.loss, self.handle.model)
        budget = self.plan.budget
        last = None if budget is None else budget.last_update(self.handle.steps)
        for batch in self.handle.feed(self.task.loader, last, on_update=self._committed):
            self.handle.micro_batch(loss_function, batch)
        for update in self.handle.finish():
            self._count(update)
        for incident, observer in itertools.product(self.handle.late_incidents, self._observers):
            observer.noticed(incident)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop signal has come to this rank, which the run answers by landing and saving."""
        return self._saves.is_stopped

    @property
    def can_land(self) -> bool:
        """Whether a stop signal lets the run land and save; the same on all ranks."""
        return self._saves.can_land

    def evaluate(self) -> None:
        """Measure the held-out loss of the committed parameters, once per update.

        All ranks must call: before training, right after an update, or at the end.
        """
        step = self.handle.steps
        if self.totals.evaluations and self.totals.evaluations[-1].step == step:
            return
        with self.stopwatch.held(), kept_random_states(self._device), self.handle.settled():
            if step not in self._losses:
                self._losses[step] = self.task.evaluate(self.task.model)
            evaluation = Evaluation(
                step=step,
                training_seconds=self.stopwatch.seconds,
                heldout_loss=self._losses[step],
            )
            self.totals.evaluations.append(evaluation)
            for observer in self._observers:
                observer.evaluated(step, evaluation.heldout_loss, evaluation.training_seconds)

    def save(self) -> None:
        """Write a checkpoint; all ranks must call, right after an update or at the end."""
        with self.stopwatch.held():
            budget = self.plan.budget
            self._saves.write(self.stopwatch.seconds, None if budget is None else budget.samples)

    def _committed(self, update: Update) -> None:
        """Do everything that happens between an update and the next micro-batch."""
        self.totals.arrived(update, self.stopwatch.seconds)
        self._count(update)
        if _is_due(update.step, self.plan.evaluate_every):
            self.evaluate()
        if _is_due(update.step, self.plan.checkpoint_every):
            self.save()
        self._saves.keep(
            self.stopwatch.seconds, None if self.plan.budget is None else self.plan.budget.samples
        )
        if self.plan.budget is not None and self.plan.budget.is_spent:
            self.handle.end()
        # Rank 0's clock and losses alone decide, or a stop signal to any rank; others hear of it at the next round.
        if self.is_stopped or (self.handle.rank == 0 and self._has_enough()):
            self.handle.stop()

    def _count(self, update: Update) -> None:
        self.totals.add(update)
        if self.plan.budget is not None:
            self.plan.budget.count(update)
        with self.stopwatch.held():
            for observer in self._observers:
                observer.updated(update, self.stopwatch.seconds)

    def _has_enough(self) -> bool:
        if self.plan.seconds is not None and self.stopwatch.seconds >= self.plan.seconds:
            return True
        target = -math.inf if self.plan.to_loss is None else self.plan.to_loss
        return seconds_to_loss(self.totals.evaluations, target) is not None


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
