"""The training loop, the same for every strategy and every stock method.

    feed -> micro-batch -> on an update: scheduler, observers, evaluation, checkpoint

What only looks at the run (evaluation, observers, checkpoints) happens right after an update, with the stopwatch
held and random states put back, so that a run is the same to the bit with and without it.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from stretto.observe import Observer
from stretto.recipes import Task
from stretto.records import Update
from stretto.train.handle import Handle
from stretto.train.outcome import Evaluation, Tally
from stretto.train.stopwatch import Stopwatch
from stretto.train.target import seconds_to_loss


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """When the loop looks, saves and ends."""

    batches: int | None
    """Micro-batches that this rank still hands out; None for no limit. With fixed counts it decides the end, so
    that every strategy sees the same samples."""
    last_step: int | None
    """Committed updates after which the loop ends; None for no limit."""
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
        plan: When to look, save and end.
        observers: Who hears of it; none on ranks other than 0.
        save: Writes a checkpoint; called on all ranks alike.
        stopwatch: The training time.
        tally: What the updates add up to.
    """

    def __init__(
        self,
        task: Task,
        handle: Handle,
        plan: Plan,
        *,
        observers: Sequence[Observer],
        save: Callable[["Loop"], None],
        stopwatch: Stopwatch,
        tally: Tally,
    ) -> None:
        self.task = task
        self.handle = handle
        self.plan = plan
        self.stopwatch = stopwatch
        self.tally = tally
        self.batches_handed_out = 0
        self._observers = observers
        self._save = save

    def run(self) -> None:
        """Train until the plan's end, and drain."""
        loss_function = partial(self.task.loss, self.handle.model)
        for batch in itertools.islice(self.handle.feed(self.task.loader), self.plan.batches):
            self.batches_handed_out += 1
            update = self.handle.micro_batch(loss_function, batch)
            if update is not None:
                self._committed(update)
                if self.plan.last_step is not None and update.step >= self.plan.last_step:
                    break
        for update in self.handle.finish():
            self._count(update)
        for verdict, observer in itertools.product(self.handle.late_verdicts, self._observers):
            observer.noticed(verdict)

    def evaluate(self) -> None:
        """Take the held-out loss at the committed parameters, unless these have been looked at already.

        All ranks must call, before training, right after an update, or at the end.
        """
        step = self.handle.steps
        if self.tally.evaluations and self.tally.evaluations[-1].step == step:
            return
        with self.stopwatch.held(), torch.random.fork_rng(devices=[]), self.handle.settled():
            evaluation = Evaluation(
                step=step,
                training_seconds=self.stopwatch.seconds,
                heldout_loss=self.task.evaluate(self.task.model),
            )
            self.tally.evaluations.append(evaluation)
            for observer in self._observers:
                observer.evaluated(step, evaluation.heldout_loss, evaluation.training_seconds)

    def _committed(self, update: Update) -> None:
        """Everything that happens between an update and the next micro-batch."""
        self.tally.arrived(update, self.stopwatch.seconds)
        self._count(update)
        if self.task.scheduler is not None:
            self.task.scheduler.step()
        if _is_due(update.step, self.plan.evaluate_every):
            self.evaluate()
        if _is_due(update.step, self.plan.checkpoint_every):
            with self.stopwatch.held():
                self._save(self)
        # Rank 0's clock and losses alone decide; the others hear of it at the next round.
        if self.handle.rank == 0 and self._has_enough():
            self.handle.stop()

    def _count(self, update: Update) -> None:
        self.tally.add(update)
        with self.stopwatch.held():
            for observer in self._observers:
                observer.updated(update, self.stopwatch.seconds)

    def _has_enough(self) -> bool:
        if self.plan.seconds is not None and self.stopwatch.seconds >= self.plan.seconds:
            return True
        target = -math.inf if self.plan.to_loss is None else self.plan.to_loss
        return seconds_to_loss(self.tally.evaluations, target) is not None


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
