"""`DataParallel`: what a user holds."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from stretto.echo.statistics import Intake
from stretto.engine import Clock, Options, start_lanes
from stretto.engine.accumulation import run_backward
from stretto.engine.kept_round import Weighed, weighed
from stretto.engine.roll_call import Vote
from stretto.engine.state import JobState, State
from stretto.engine.watch import Watch
from stretto.errors import ConfigError, LossNotScalar, OutOfTurn, UsageError
from stretto.groups.private import private_group
from stretto.guards import Guard
from stretto.records import Incident, Update
from stretto.strategies import ACCO, Strategy

Batch = TypeVar("Batch")

_BACKEND_MARGIN_SECONDS = 5.0
"""The backend's timeout comes after the library's, which names the silent rank, and not long after: a process
cannot end while the backend waits."""


class DataParallel:
    """Trains `model` on all ranks of a group, with the communication where the strategy puts it.

        parallel = DataParallel(model, optimizer, strategy=ACCO(), micro_batches=4)
        for batch in parallel.feed(loader):
            loss = loss_function(model(batch))
            if update := parallel.backward(loss):
                scheduler.step()
        parallel.finish()

    Use it as a context manager, so that an exception that leaves the block ends the job on all ranks with its
    cause named. Parameters change only inside `backward`, `step` and `finish`.
    """

    def __init__(  # noqa: PLR0913  # what the whole job is made of, each by its own name
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy | None = None,
        *,
        micro_batches: int | Clock = 2,
        group: dist.ProcessGroup | None = None,
        ranks: Sequence[int] | None = None,
        guards: Sequence[Guard] = (),
        options: Options | None = None,
    ) -> None:
        """Wrap `model`; all ranks of the group must call, with equal settings.

        Args:
            model: On its device, complete, with its starting weights: every rank takes rank 0's.
            optimizer: Over the model's trainable parameters, in any groups. Its class and settings are read;
                it stays the face that schedulers turn, and must not be stepped by hand.
            strategy: How gradients become updates; None is `ACCO()`.
            micro_batches: Per rank and update, or a `Clock` per round.
            group: Whose ranks train; None is the default group, or this process alone without one. The job
                makes a group of its own over these ranks.
            ranks: Ranks of the default group, instead of `group`.
            guards: What watches over the job's values, in the order in which they are asked; see docs/guards.md.
            options: Everything else.

        Raises:
            ConfigError: Something cannot work, or differs between ranks.
        """
        self.model = model
        self.optimizer = optimizer
        self.strategy = ACCO() if strategy is None else strategy
        self.guards = tuple(guards)
        self.options = Options() if options is None else options
        self._group = private_group(
            group, ranks, timeout_seconds=self.options.timeout_seconds + _BACKEND_MARGIN_SECONDS
        )
        self.late_incidents: tuple[Incident, ...] = ()
        """What guards and the verified exchange found behind the last update; known once `finish` has
        returned."""
        self._until: Literal["any", "all"] = "any"
        self._samples_fed: int | None = None
        self._exhausted = False
        watch = Watch(self._group, self.options.timeout_seconds)
        try:
            self.compute = start_lanes(
                model, optimizer, self.strategy, micro_batches, self.guards, self.options, watch
            )
        except BaseException as error:
            watch.tell(error)
            raise
        self._intake = Intake(self.compute.runtime.now)

    @property
    def rank(self) -> int:
        """This process's position among the job's ranks."""
        return self._group.rank()

    @property
    def world_size(self) -> int:
        """How many ranks train."""
        return self._group.size()

    @property
    def steps(self) -> int:
        """Committed updates so far."""
        return self.compute.steps

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank has handed to collectives for other ranks so far."""
        return self.compute.lane.exchange.sent_bytes

    def feed(self, loader: Iterable[Batch], until: Literal["any", "all"] = "any") -> Iterator[Batch]:
        """Yield the loader's batches until all ranks agree to end, at the same round on every rank.

        A rank whose loader has ended goes on with its last batch at weight zero, so that every rank passes
        through the same rounds and turns its schedule alike, until the agreed end.

        Args:
            loader: This rank's batches.
            until: End when any rank's data have ended, or when all ranks' have.

        Raises:
            ConfigError: The loader has not a single batch, or `until` is neither.
            OutOfTurn: The loop over the batches does not call `backward` or `step`.
            Finished: The job has ended.
        """
        with self.compute.running():
            self._begin_feed(until)
            self._intake.begin(loader)
            batches = iter(loader)
        nothing = object()
        batch: Any = nothing
        counted = -1
        while not self._should_end():
            following = nothing if self._exhausted else self._intake.take(batches, nothing)
            with self.compute.running():
                if following is nothing:
                    was_idle = self._exhausted and self.compute.num_contributions == counted
                    self._check_exhausted(has_batch=batch is not nothing, was_idle=was_idle)
                    self._exhausted = True
                    self.compute.vote = max(self.compute.vote, Vote.EXHAUSTED)
                else:
                    batch = following
                    self._samples_fed = _num_samples(batch)
                counted = self.compute.num_contributions
            yield batch

    def backward(self, loss: Tensor, weight: float = 1.0, samples: int | None = None) -> Update | None:
        """Run one micro-batch's backward pass and count it.

        Args:
            loss: Scalar mean over whatever `weight` counts.
            weight: What the micro-batch counts for, for example its number of tokens; at least 0.
            samples: For the records; None takes the size of the batch that `feed` gave last, or 1.

        Returns:
            The update that was committed, if one was: parameters are now its outcome.

        Raises:
            UsageError: The loss is not a scalar, or state was touched that must not be.
            NonFinite: Some rank's loss or gradient is not finite, and the policy is to raise.
            CommunicationError: A rank died, raised or fell silent.
        """
        with self.compute.running():
            return self._backward(loss, weight, samples)

    def step(
        self, weight: float = 1.0, loss: Tensor | None = None, samples: int | None = None
    ) -> Update | None:
        """Count one micro-batch whose backward pass the caller has run, on a loss multiplied by `weight`.

        Args and errors are as for `backward`; without a `loss` the records hold nan.
        """
        with self.compute.running():
            return self._count(self._effective_weight(weight), loss, samples)

    def micro_batch(
        self,
        loss_function: Callable[[Batch], Tensor | Weighed],
        batch: Batch,
        weight: float = 1.0,
        samples: int | None = None,
    ) -> Update | None:
        """Run the forward and backward pass of one micro-batch: `backward(loss_function(batch))`.

        Guards can run it again, which `backward` and `step` do not let them: until the round has ended they hold on
        to the batch.

        Args:
            loss_function: Returns the loss, or (loss, weight, samples) where only the forward pass tells these. What it
                returns depends on the batch, the model and random draws alone, and the batch stays as it is.
            batch: What it is given.
            weight: See `backward`.
            samples: See `backward`; None takes the batch's length.

        Returns and errors are those of `backward`.
        """
        with self.compute.running():
            self.compute.begin_micro_batch(loss_function, batch)
            samples = _num_samples(batch) if samples is None else samples
            return self._backward(*weighed(loss_function(batch), weight, samples))

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Show the committed parameters and the agreed buffers inside the block, then what was shown before.

        All ranks must enter, right after an `Update`, before training, or after `finish`.

        Raises:
            OutOfTurn: A round is in flight.
            Finished: An error has ended the job.
        """
        if self.compute.has_finished:
            yield
            return
        with self.compute.running():
            held = self.compute.show_committed()
        try:
            yield
        finally:
            self.compute.show_again(held)

    @contextmanager
    def between_updates(self, what: str) -> Iterator[None]:
        """Refuse `what` unless the last update has ended and nothing was counted since; errors end the job.

        Raises:
            OutOfTurn: An update is under way.
            Finished: An error has ended the job.
        """
        if self.compute.has_finished:
            yield
            return
        with self.compute.running():
            self.compute.check_between_updates(what)
            yield

    def state_dict(self) -> State:
        """Return parameters, buffers, optimizer state and counts for `torch.distributed.checkpoint.save`.

        Portable: any world size, any strategy and plain PyTorch can read it; `stretto.engine.state` lists the
        names. What only a bit-identical continuation needs is left to `stretto.checkpoint.save`: gradients
        accumulated ahead, a shown prediction, random states. All ranks must call, between updates; the state
        refers to the job's own tensors, so save it before training goes on.

        Raises:
            OutOfTurn: An update is under way.
            Finished: An error has ended the job.
        """
        with self.between_updates("state_dict()"):
            return JobState(self.compute).write()

    def load_state_dict(self, state: State) -> None:
        """Go on from `state`, a `state_dict()` that `torch.distributed.checkpoint.load` has read into.

        All ranks must call, between updates. Gradients that were accumulated since are forgotten.

        Raises:
            OutOfTurn: An update is under way.
            CheckpointError: The state is of another model or optimizer.
            Finished: The job has ended.
        """
        with self.compute.running():
            self.compute.check_between_updates("load_state_dict()")
            JobState(self.compute).load(state)

    def stop(self) -> None:
        """Ask all ranks to end `feed` at the same round, soon."""
        self.compute.vote = max(self.compute.vote, Vote.STOP)

    def finish(self) -> list[Update]:
        """Drain: hand over what is left, commit it, and end the job with the committed parameters shown.

        All ranks must call. The communication lane is joined; the model is an ordinary one again.

        Returns:
            The updates that were committed on the way; schedules cannot turn between them.
        """
        updates: list[Update] = []
        with self.compute.running():
            self.compute.vote = Vote.DRAIN
            while not (self.compute.is_at_rest and self.compute.votes == [Vote.DRAIN] * self.world_size):
                update = self.compute.hand_over()
                if update is not None:
                    updates.append(self._intake.fill(update))
            self.compute.show_committed()
            self.late_incidents = self.compute.lane.conclude()
            self.compute.close()
        return updates

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one ends because of `error`, and end the job here."""
        self.compute.fail(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)

    def _backward(self, loss: Tensor, weight: float, samples: int | None) -> Update | None:
        self._check_loss(loss)
        weight = self._effective_weight(weight)
        self.compute.before_micro_batch()
        run_backward(loss, weight)
        return self._count(weight, loss.reshape(()), samples)

    def _count(self, weight: float, loss: Tensor | None, samples: int | None) -> Update | None:
        if samples is None:
            samples = 1 if self._samples_fed is None else self._samples_fed
        if loss is not None:
            self._intake.note_loss(loss, weight)
        update = self.compute.contribute(weight, loss, samples)
        return None if update is None else self._intake.fill(update)

    def _effective_weight(self, weight: float) -> float:
        if not 0 <= weight < float("inf"):
            raise ConfigError(
                f"{self.compute.where}: weight {weight}: expected a finite number of at least 0"
            )
        return 0.0 if self._exhausted else float(weight)

    def _check_loss(self, loss: object) -> None:
        if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.numel() != 1:
            found = (
                f"shape {tuple(loss.shape)} and dtype {loss.dtype}"
                if isinstance(loss, Tensor)
                else f"a {type(loss).__name__}"
            )
            raise LossNotScalar(
                f"{self.compute.where}: expected a loss of one floating-point element, found {found}: reduce it "
                "with .mean()"
            )
        if not loss.requires_grad:
            raise UsageError(
                f"{self.compute.where}: the loss depends on no parameter that requires a gradient: expected one "
                "computed by the model outside torch.no_grad(), and not detached"
            )

    def _begin_feed(self, until: str) -> None:
        """Start anew after an agreed end of data, which a loop over epochs passes many times; a stop stays."""
        if until not in ("any", "all"):
            raise ConfigError(f"feed(until={until!r}): expected 'any' or 'all'")
        self._until = "any" if until == "any" else "all"
        self._exhausted = False
        if self.compute.vote == Vote.EXHAUSTED:
            self.compute.vote = Vote.GO_ON
        self.compute.votes = [vote if vote >= Vote.STOP else Vote.GO_ON for vote in self.compute.votes]

    def _check_exhausted(self, *, has_batch: bool, was_idle: bool) -> None:
        """Raise unless the loop can come to an agreed end: only contributions bring it nearer."""
        if not has_batch:
            raise ConfigError(
                f"{self.compute.where}: the loader has no batch; expected at least one per rank"
            )
        if was_idle:
            raise OutOfTurn(
                f"{self.compute.where}: the data have ended and the loop skips the batch that feed repeats: expected "
                "one backward or step for each, because only rounds bring all ranks to an agreed end"
            )

    def _should_end(self) -> bool:
        votes = self.compute.votes
        if not votes:
            return False
        decisive = max(votes) if self._until == "any" else min(votes)
        return max(votes) >= Vote.STOP or decisive >= Vote.EXHAUSTED


def _num_samples(batch: object) -> int:
    """Return the length of the first tensor found in a batch, or 1."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)) and batch:
        return _num_samples(batch[0])
    return 1
