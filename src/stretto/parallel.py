"""`DataParallel`, the main class for users."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, Self, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from stretto.continuation import Continuation
from stretto.engine import Clock, Job, Options, Total, misuse
from stretto.engine.failures import BACKEND_MARGIN_SECONDS
from stretto.engine.round import Weighed, weighed
from stretto.engine.state import JobState, State, load_given
from stretto.errors import ConfigError
from stretto.feed import Batch, feed_of, num_samples
from stretto.fields import check_callable
from stretto.groups.launcher import join_launched_group
from stretto.groups.private import private_group
from stretto.guards import Guard
from stretto.guards.fitting import choose_guards
from stretto.optimizer import SeveralSchedulers, as_one
from stretto.records import Incident, Update
from stretto.start import Parts, sharding_for, start
from stretto.strategies import Strategy, ZeRO1, check_strategy

Result = TypeVar("Result")
_not_traced = torch._disable_dynamo  # type: ignore[attr-defined]  # public ones import the compiler at once
"""Marks functions that `torch.compile` calls without compiling them: a graph cannot send or wait."""


class DataParallel:
    """Trains `model` on all ranks of a group; the strategy decides what they communicate and when.

        parallel = DataParallel(model, optimizer, ACCO(), scheduler=scheduler, micro_batches=4)
        for batch in parallel.feed(loader, updates=1000):
            parallel.backward(loss_function(model(batch)))
        parallel.finish()

    Six methods matter:

        feed         yields a loader's batches, and ends on all ranks at the same update
        backward     runs a micro-batch's backward pass, and returns the update that it completed
        micro_batch  does the same with the forward pass
        settled      shows the committed parameters in a block: evaluate and copy the model there
        stop         asks all ranks to end after the update in progress
        finish       commits the rounds in flight, and ends the job

    Use it as a context manager, so that an exception that leaves the block ends the job on all ranks with its
    cause named. Parameters change only inside `backward`, `micro_batch`, `count_micro_batch`, `commit`, `feed` and
    `finish`.
    """

    def __init__(  # noqa: PLR0913  # what the whole job is made of, each by its own name
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        strategy: Strategy | None = None,
        *,
        micro_batches: int | Total | Clock = 1,
        scheduler: Any = None,
        wire: str | None = None,
        guards: Sequence[Guard] | Literal["standard"] = (),
        group: dist.ProcessGroup | None = None,
        ranks: Sequence[int] | None = None,
        mesh: DeviceMesh | None = None,
        options: Options | None = None,
        **elsewhere: Never,
    ) -> None:
        """Wrap `model`; all ranks of the group must call it, with equal settings.

        Args:
            model: On its device, complete, with initial weights; every rank copies rank 0's weights.
            optimizer: Over the model's trainable parameters, in any groups. Its class and settings are read;
                schedulers still set its rates, and your code must not step it. Several optimizers share the
                parameters between them.
            strategy: How gradients become updates; None is `ZeRO1()`, which is exact.
            micro_batches: Number per rank and update; or a `Total` of all ranks, or a `Clock` per round.
            scheduler: One or several schedulers of `optimizer`; the library steps them at every committed update. None
                if your code steps its own.
            wire: Short for `Options(wire=...)`.
            guards: Checks of the job's values, in this order; see the page guards. "standard" selects those that fit
                the strategy: `AtRest`, `ReplicaGuard` and a verified exchange.
            group: Group of the ranks that train; None is the default group. If there is none, it consists of the ranks
                that a launcher (torchrun, srun) has started; without a launcher, this process trains alone. The job
                makes a private group of the same ranks.
            ranks: Ranks of the default group, instead of `group`.
            mesh: For a model that `fully_shard` has sharded inside nodes: the dimension of its mesh across which the
                job trains, as `mesh["node"]`. It determines the ranks that train; `group` must have the same ranks. See
                the page sharded.
            options: All other settings.

        Raises:
            ConfigError: Settings cannot work together, or differ between ranks.
        """
        if elsewhere:
            name, value = next(iter(dict[str, Any](elsewhere).items()))
            if name not in Options.__dataclass_fields__:
                raise TypeError(f"DataParallel() got an unexpected keyword argument {name!r}")
            raise ConfigError(
                f"DataParallel({name}=...): it is an option; write options=stretto.Options({name}={value!r})"
            )
        self.model = model
        self.optimizer: torch.optim.Optimizer = as_one(optimizer)
        """The given optimizer; several are joined to one, with all their groups in order."""
        self.scheduler = SeveralSchedulers(scheduler) if isinstance(scheduler, list | tuple) else scheduler
        if not isinstance(options, Options | None):
            raise ConfigError(f"options: expected Options(...), as Options(clip_norm=1.0), found {options!r}")
        settings = (Options() if options is None else options).with_wire(wire)

        self.strategy = check_strategy(ZeRO1() if strategy is None else strategy)
        self.guards, self.options = choose_guards(guards, self.strategy, settings)
        parts = Parts(
            model=model,
            optimizer=self.optimizer,
            strategy=self.strategy,
            micro_batches=micro_batches,
            scheduler=self.scheduler,
            guards=self.guards,
            options=self.options,
        )
        if group is None and isinstance(model, nn.Module):
            join_launched_group(next(model.parameters(), torch.empty(0)).device)
        sharding, ranks = sharding_for(parts, mesh, group, ranks)
        seconds = self.options.timeout_seconds + BACKEND_MARGIN_SECONDS
        self._group = private_group(group, ranks, timeout_seconds=seconds)
        self.late_incidents: tuple[Incident, ...] = ()
        """Damage that guards and the verified exchange found after the last update; complete once `finish` has
        returned."""
        self.job: Job = start(parts, self._group, sharding)
        self.feeding = feed_of(self.job)
        """This rank's position in its data, for checkpoints, faults and tests."""
        self._compute = self.job.compute

    @property
    def rank(self) -> int:
        """This process's position among the job's ranks."""
        return self._group.rank()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._group.size()

    @property
    def steps(self) -> int:
        """Committed updates so far."""
        return self._compute.rounds.steps

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank has passed to collectives for other ranks so far."""
        return self.job.exchange.sent_bytes

    def feed(
        self,
        loader: Iterable[Batch],
        updates: int | None = None,
        until: Literal["any", "all"] = "any",
        on_update: Callable[[Update], None] | None = None,
    ) -> Iterator[Batch]:
        """Yield every batch of the loader once, until all ranks agree to end, at the same round on every rank.

        Work after the last batch (completing rounds in flight, rounds with ranks that have more data) happens in here,
        so the loop's body never sees a batch twice. At the end the model shows committed parameters, until training
        continues.

        Args:
            loader: This rank's batches. If it has a length, `feed` looks for one more batch before it yields a copy of
                the last one: then the end needs no extra round to inform other ranks. A wrong length does no harm.
            updates: End when so many updates have been committed since the job began (`steps`), and commit none after
                that; None continues to the end of the data.
            until: End when any rank's data have ended, or when all ranks' have.
            on_update: Called on all ranks with every update that is committed from the first batch to the end,
                except where ranks step alone between averages and have unequal numbers of batches. The loop's body
                does not see updates that are committed in here: evaluate and save in this function where ranks may
                have unequal numbers of batches.

        Raises:
            ConfigError: The loader has no batch, or an argument has a value that is not allowed.
            StepWithoutBackward: The data have ended, and no micro-batch was ever counted.
            GradientsTouched: At the second batch, if the loop called `loss.backward()` and counted nothing.
            Finished: The job has ended.
        """
        return self.feeding.batches(loader, updates, until, on_update)

    @_not_traced
    def backward(self, loss: Tensor, weight: float = 1.0, samples: int | None = None) -> Update | None:
        """Run one micro-batch's backward pass and count it.

        Args:
            loss: Scalar mean over the units that `weight` counts.
            weight: Weight of the micro-batch, for example its number of tokens; at least 0.
            samples: Number of samples for the records; None takes the size of the last batch from `feed`, or 1.

        Returns:
            The update, if one was committed; the parameters are now its result.

        Raises:
            UsageError: The loss is not a scalar, or user code changed gradients or parameters.
            NonFinite: Some rank's loss or gradient is not finite, and the policy is to raise.
            CommunicationError: A rank died, raised or fell silent.
        """
        compute = self._compute
        if compute.lifetime.ended_because is not None:
            raise compute.lifetime.refusal()
        try:
            weight = _check_weight(weight, compute.where)
            compute.backward(loss, weight)
            samples = None if samples is None else misuse.read_samples(samples, compute.where)
            return self.feeding.count(weight, loss.reshape(()), samples)
        except BaseException as error:  # it ends the job on all ranks, as in `Lifetime.running`
            compute.lifetime.end_with(error)
            raise

    def micro_batch(
        self,
        loss_function: Callable[[Batch], Tensor | Weighed],
        batch: Batch,
        weight: float = 1.0,
        samples: int | None = None,
    ) -> Update | None:
        """Run the forward and backward pass of one micro-batch, as `backward(loss_function(batch))` does.

        Guards can run it again: they keep the batch until the round ends. Returns and errors as for `backward`.

        Args:
            loss_function: Returns the loss, or (loss, weight, samples) if only the forward pass knows these. Its result
                may depend only on the batch, the model and random draws, and it must not change the batch.
            batch: The argument for `loss_function`.
            weight: See `backward`.
            samples: See `backward`; None is the batch's length.
        """
        with self._compute.lifetime.running():
            check_callable(loss_function, "micro_batch", "a function of a batch, and then the batch")
            self._compute.before_micro_batch()
            for listener in self._compute.model.listeners:
                listener.micro_batch_begins(loss_function, batch)
            samples = num_samples(batch) if samples is None else samples
            with self._compute.lifetime.running(is_users=True):
                loss = loss_function(batch)
            return self.backward(*weighed(loss, weight, samples))

    @_not_traced
    def count_micro_batch(
        self, weight: float = 1.0, loss: Tensor | None = None, samples: int | None = None
    ) -> Update | None:
        """Count one micro-batch whose backward pass the caller has run, on a loss multiplied by `weight`.

        Gradients from elsewhere count too: first assign them, `p.grad = gradient`. Gradients of earlier micro-batches
        are kept.

        Args and errors are as for `backward`; without a `loss` the records hold nan.
        """
        with self._compute.lifetime.running():
            weight = _check_weight(weight, self._compute.where)
            samples = None if samples is None else misuse.read_samples(samples, self._compute.where)
            loss = None if loss is None else misuse.read_recorded_loss(loss, self._compute.where)
            self._compute.accumulation.set_apart()  # submitting a round makes every other .grad a view
            self._compute.submit_if_ready()
            self._compute.check_untouched()
            self._compute.accumulation.collect()
            return self.feeding.count(weight, loss, samples)

    @_not_traced
    def accumulate(self, loss: Tensor) -> None:
        """Run a backward pass for `end_micro_batch` to count; `loss` is multiplied by the micro-batch's weight."""
        with self._compute.lifetime.running():
            self._compute.backward(loss, 1.0)

    @_not_traced
    def end_micro_batch(self, weight: float, loss: Tensor | None, samples: int) -> Update | None:
        """Count the accumulated gradients, or zero if there are none; otherwise as `count_micro_batch`."""
        with self._compute.lifetime.running():
            return self.feeding.count(weight, loss, samples, lacks=True)

    def commit(self) -> list[Update]:
        """Commit all counted micro-batches, and complete every round; return the updates that were not returned yet.

        For loops without `feed`. It does nothing if no update is in progress, or after `finish`. A strategy that
        overlaps starts again with nothing in flight. All ranks must call it, after the same micro-batch.

        Raises:
            OutOfTurn: A round is in flight under a `Clock`.
        """
        if self._compute.lifetime.has_finished:
            return []
        with self._compute.lifetime.running():
            return self.feeding.commit()

    def discard(self) -> None:
        """Drop gradients of backward passes that this job did not run.

        Another job's backward pass may reach this job's parameters (a generator's pass, through its discriminator), and
        so may a `loss.backward()` that inspects gradients. Gradients of this job's micro-batches are kept.
        """
        with self._compute.lifetime.running():
            self._compute.accumulation.discard()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Show the committed parameters and the agreed buffers inside the block, then the values from before.

        All ranks must enter, after the same micro-batch. Under a `Clock` they may enter only right after an `Update`,
        before training, or after `finish`, because otherwise ranks may be in different rounds.

        Raises:
            OutOfTurn: A round is in flight under a `Clock`.
            Finished: An error has ended the job.
        """
        if self._compute.lifetime.has_finished:
            yield
            return
        with self._compute.lifetime.running():
            self.feeding.rest()
            self._compute.model.check_values(self._compute.where)
            settled = self._compute.settled()
            settled.__enter__()
        try:
            yield
        finally:
            settled.__exit__(None, None, None)

    def evaluate(self, function: Callable[[], Result]) -> Result:
        """Return the result of `function()` with the model settled, in `eval()` mode and without gradients.

        All ranks must call it, as for `settled`, even if only one rank uses the result.
        """
        check_callable(function, "evaluate", "a function without arguments")
        modes = [(module, module.training) for module in self.model.modules()]
        with self.settled(), torch.no_grad():
            self.model.eval()
            try:
                return function()
            finally:
                for module, mode in modes:
                    module.training = mode

    @contextmanager
    def between_updates(self, what: str) -> Iterator[None]:
        """For checkpoints: raise unless no update is in progress; `what` names the call, and errors end the job.

        Raises:
            OutOfTurn: An update is in progress.
            Finished: An error has ended the job.
        """
        if self._compute.lifetime.has_finished:
            yield
            return
        with self._compute.lifetime.running():
            self.feeding.rest()
            self._compute.model.check_values(self._compute.where)
            with self._compute.model.unsettled():
                self._compute.check_between_updates(what)
                yield

    def state_dict(self) -> State:
        """Return parameters, buffers, optimizer state and counts for `torch.distributed.checkpoint.save`.

        It is portable: any world size, any strategy and plain PyTorch can read it; `stretto.engine.state` lists the
        names. `stretto.checkpoint.save` saves everything for a bit-identical continuation. All ranks must call this
        between updates; the state refers to the job's own tensors, so save it before training continues.

        Raises:
            OutOfTurn: An update is in progress.
            Finished: An error has ended the job.
        """
        with self.between_updates("state_dict()"):
            return JobState(self.job).write()

    def load_state_dict(self, state: State) -> None:
        """Continue from `state`, a `state_dict()` that `torch.distributed.checkpoint.load` has read into.

        Its entry "optimizer" may also be the `state_dict()` of a plain optimizer over the same parameters.

        All ranks must call it between updates. Gradients accumulated since the last update are dropped.

        Raises:
            OutOfTurn: An update is in progress.
            CheckpointError: The state belongs to another model or optimizer.
            Finished: The job has ended.
        """
        with self._compute.lifetime.running():
            self.feeding.rest()
            self._compute.check_between_updates("load_state_dict()")
            load_given(self.job, state)
            self._compute.began_again()

    def continuation(self) -> Continuation:
        """For checkpoints: the object that returns the job's whole state, and loads it."""
        return Continuation(self.job, self.feeding, self.options, self.scheduler)

    def stop(self) -> None:
        """Ask all ranks to end `feed` at the same round, soon."""
        self._compute.rounds.stop()

    def end(self) -> None:
        """End `feed` after the last update, and commit the update in progress; all ranks must call it, in
        `on_update`.
        """
        self.feeding.end()

    def finish(self) -> list[Update]:
        """Commit the remaining micro-batches, and end the job with the committed parameters shown; all ranks must
        call it.

        The communication lane is joined; the model is an ordinary one again.

        Returns:
            The updates that were not returned yet: updates committed at the end of `feed`, unless `on_update` got
            them, and updates committed here.
        """
        with self._compute.lifetime.running():
            if not self._compute.num_counted:  # a loop that calls loss.backward() has trained nothing
                self._compute.accumulation.check_own(self._compute.where)
            self._compute.model.check_values(self._compute.where)
            self.feeding.finish()
            self._compute.show_committed(meets=True)
            self.leave()
        return self.feeding.take_committed()

    def leave(self) -> None:
        """For checkpoints: end the job between updates without committing more; all ranks must call it."""
        with self._compute.lifetime.running():
            listeners = self._compute.model.listeners
            self.late_incidents = tuple(incident for one in listeners for incident in one.ended())
            self._compute.lifetime.finish()

    def fail(self, error: BaseException) -> None:
        """Report to all ranks that this rank ends because of `error`, and end the job here."""
        misuse.check_exception(error)
        self._compute.lifetime.fail(error, is_users=True)  # one of the library's has ended the job before

    if not TYPE_CHECKING:  # checkers go on finding typing errors

        def __call__(self, *_: object, **__: object) -> Never:
            raise misuse.of_another_wrapper("forward", self._compute.where)

        def __getattr__(self, name: str) -> Never:
            if name in misuse.DIALECTS:
                raise misuse.of_another_wrapper(name, self._compute.where)
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )

    def __reduce_ex__(self, _: object) -> Any:
        raise misuse.job_copied()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            cause = self._compute.lifetime.cause_of(error)
            self.fail(cause)
            if cause is not error:
                raise cause from error


def _check_weight(weight: object, where: object) -> float:
    """Return a micro-batch's weight, if float32 can hold gradients multiplied by it, and their sums.

    Raises:
        ConfigError: It is not a number, or too small or too large.
    """
    if not isinstance(weight, int | float) or not (weight == 0 or 1e-30 <= weight <= 1e30):
        return misuse.read_weight(weight, where)
    return float(weight)
