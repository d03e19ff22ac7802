"""`StrettoStrategy`: Lightning's Trainer on a job of this library.

Note [What stays Lightning's]
    Its loop, data, callbacks, logs and files; and ranks, devices and precision, as its DDP strategy has them. The
    backward pass of a batch runs through the job. A micro-batch counts where Lightning leaves its closure, so also
    one whose `training_step` returned None. With the last micro-batch Lightning steps: the job reduces, clips, and
    steps optimizer and schedule, or has these in flight.

Note [Where every update is complete]
    A strategy that overlaps commits an update after Lightning has counted it. Before a validation or a checkpoint
    that follows a whole accumulation, and after an accumulation that is shorter than the others, the job completes
    every update first. An accumulation that Lightning leaves before its step is dropped, as Lightning zeroes its
    gradients.

Note [Before other callbacks]
    A strategy hears of the end and of exceptions after all callbacks. But a callback may put an average into the model
    at the end, or save a file after an exception. So the job ends in a callback that stands before the others.

Note [Two parts of a checkpoint]
    Lightning's own file has no state of the optimizer, of which every rank has a share. Stretto writes that state to
    a folder next to the file.
"""

import dataclasses
import functools
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from stretto import checkpoint as checkpoints
from stretto.engine import Options
from stretto.engine.method_patch import MethodPatch
from stretto.errors import CheckpointError, ConfigError, MissingExtra, UsageError
from stretto.feed import num_samples
from stretto.guards import Guard
from stretto.integrations.accumulation import TrainerAccumulation
from stretto.integrations.meeting import by_rank, check_alike
from stretto.integrations.refused import check_unchanged
from stretto.integrations.zero_grad import arm, disarm
from stretto.parallel import DataParallel
from stretto.strategies import Strategy

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch import callbacks as known
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.model_helpers import is_overridden

    from stretto.integrations.lightning_settings import (
        ALIKE,
        callbacks_of,
        check_arguments,
        check_callbacks,
        check_settings,
        taken_over,
    )
    from stretto.integrations.stopped_by_any import StoppedByAny
except ImportError as error:
    raise MissingExtra("lightning", "lightning", "StrettoStrategy") from error

SUFFIX = ".stretto"
"""Suffix of the folder next to Lightning's file, in which ranks keep the state of the job."""
_log = logging.getLogger("stretto")


class StrettoStrategy(DDPStrategy):
    """A strategy for `lightning.Trainer(strategy=...)`; by default the same numbers as `DDPStrategy`.

    the page integrations says what differs.

    Args:
        strategy: As in `DataParallel`, like the next three arguments.
        wire: Short for `Options(wire=...)`.
        guards: The guards of the job's values.
        options: All other options except `clip_norm`, which is the Trainer's `gradient_clip_val`.
        kwargs: Arguments of `DDPStrategy`, except those for PyTorch's wrapper.

    Raises:
        ConfigError: From `fit`: a setting of the Trainer or a hook of the model cannot work here.
    """

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        wire: str | None = None,
        guards: Sequence[Guard] | Literal["standard"] = (),
        options: Options | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_arguments(kwargs)
        self.parallel: DataParallel | None = None
        """The job of the running or last `fit`."""
        self._overlaps = strategy is not None and strategy.overlaps
        self._start_job = functools.partial(DataParallel, strategy=strategy, wire=wire, guards=guards)
        self._options = Options() if options is None else options
        self._micro_batches = 1
        """Micro-batches of a complete accumulation."""
        self._taken: dict[str, object] = {}
        """Settings of the Trainer with which the job was started."""
        self._accumulation: TrainerAccumulation | None = None
        self._is_running = False
        """Whether the job has neither finished nor failed."""
        self._num_samples = 1
        self._lands_each = False
        """Whether every update is complete at its step, because a callback averages parameters."""
        self._exception: BaseException | None = None
        """The exception that callbacks are receiving."""
        self._stopped_by_any: StoppedByAny | None = None
        """Set while several ranks fit, as is the next field."""
        self._stand_ins: list[MethodPatch] = []
        """Whether loops would wait for other ranks without the job, or at different places."""
        self._validation = ExitStack()
        """Shows the committed parameters during a validation."""
        self._loaded_from = Path()

    # The job

    def setup(self, trainer: Trainer) -> None:
        """Set up device and optimizer as DDP does, and start the job."""
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        check_settings(trainer, self._options)
        super().setup(trainer)
        optimizer, *others = self.optimizers
        if others:
            raise ConfigError(f"StrettoStrategy: expected one optimizer, found {1 + len(others)}")
        if type(optimizer).__name__ == "_MockOptimizer":
            raise ConfigError(
                "StrettoStrategy: expected an optimizer from configure_optimizers, found none: return one, "
                "or use another strategy"
            )
        schedules = [config.scheduler for config in self.lr_scheduler_configs]
        check_callbacks(trainer, schedules, overlaps=self._overlaps)
        self._micro_batches = trainer.accumulate_grad_batches
        self._taken = taken_over(trainer)
        self.parallel = self._start_job(
            self._module,
            optimizer,
            micro_batches=self._micro_batches,
            scheduler=self._take_schedule(),
            options=dataclasses.replace(self._options, clip_norm=trainer.gradient_clip_val or None),
        )
        self._accumulation, self._is_running = TrainerAccumulation(self.parallel), True
        callbacks = callbacks_of(trainer)
        self._lands_each = any(isinstance(one, known.WeightAveraging) for one in callbacks)
        if not any(isinstance(one, _EndsJobFirst) for one in callbacks):
            callbacks.insert(0, _EndsJobFirst())
        disarm([self._module, optimizer])
        if trainer.world_size > 1:
            check_alike(self.parallel, {name: getattr(trainer, name) for name in ALIKE})
            self._stopped_by_any = StoppedByAny(trainer, callbacks, self.by_rank)
            self._stand_in(trainer)

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:  # type: ignore[override]  # DDP returns its wrapper
        """Return the model itself; DDP would wrap it."""
        return model

    def _register_ddp_hooks(self) -> None:
        """Do nothing: there is no wrapper to hook."""

    def _take_schedule(self) -> Any:
        """Return the schedule that the job steps per update, and keep Lightning from stepping it."""
        if not self._overlaps or is_overridden("lr_scheduler_step", self._module):
            return None
        for config in self.lr_scheduler_configs:
            if config.interval == "step" and config.frequency == 1 and not config.reduce_on_plateau:
                config.frequency = sys.maxsize  # in steps; it stays listed, for monitors and files
                return config.scheduler
        return None

    def end_job(self) -> None:
        """End the job, before other callbacks receive the end; the model shows committed parameters."""
        self._is_running = False
        self._present.drop()
        self._job.finish()

    def drop_accumulation(self) -> None:
        """Drop an accumulation that ends before its step; all ranks call it."""
        self._present.drop()

    def interrupt_job(self, exception: BaseException) -> None:
        """End the job before other callbacks see `exception`, and inform the other ranks."""
        self._validation.close()
        self._is_running, self._exception = False, exception
        if self._accumulation is not None:
            self._accumulation.end_job(exception)

    def on_exception(self, exception: BaseException) -> None:
        """Restore normal behaviour, once all callbacks have received the exception."""
        self._exception = None
        super().on_exception(exception)

    @property
    def _is_alone(self) -> bool:
        """Whether other ranks may be at another place, because an exception has ended the job here."""
        is_parted = self._exception is not None and self.parallel is not None
        return is_parted and not self._job.job.compute.lifetime.has_finished

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, unless an exception has separated them."""
        if self._exception is None:
            self._meet()
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s object, or this rank's own if an exception has separated them."""
        if self._exception is not None:
            return obj
        self._meet()
        return super().broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return the decision of all or any ranks, or this rank's own if an exception has separated them."""
        if self._exception is not None:
            return decision
        self._meet()
        return super().reduce_boolean_decision(decision, all)

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Reduce a logged value over ranks."""
        self._meet()
        return super().reduce(*args, **kwargs)

    def all_gather(self, *args: Any, **kwargs: Any) -> Tensor:
        """Gather the module's values over ranks."""
        self._meet()
        return super().all_gather(*args, **kwargs)

    def by_rank(self, number: int) -> list[int]:
        """Return every rank's number; all ranks call it, and raise if one has failed."""
        purpose = "agreement on what any rank asks of the Trainer"
        return [found for (found,) in by_rank(self._job, [number], purpose)]

    def _meet(self) -> None:
        """Meet the other ranks before a collective of Lightning's; see Note [A trainer's own collectives]."""
        if self._is_running:
            by_rank(self._job, [0], "a collective of the Trainer")

    def _stand_in(self, trainer: Trainer) -> None:
        loop = trainer.fit_loop
        for one, what in ((loop, "training"), (loop.epoch_loop.val_loop, "validation")):
            counted = functools.partial(self._set_up_data, one, one.setup_data, what)
            self._stand_ins.append(MethodPatch(one, "setup_data", counted))
        self._stand_ins.append(MethodPatch(loop.epoch_loop, "_broadcast_sigterm_tensor", self._hear_signal))

    def _set_up_data(self, loop: Any, set_up: Callable[[], None], what: str) -> None:
        """Set up a loop's data, and compare between ranks how many batches there are."""
        set_up()
        check_alike(self._job, {f"the number of batches of {what}": loop.max_batches})

    def _hear_signal(self) -> None:
        """End if rank 0 has received SIGTERM, as Lightning does before each batch."""
        if self.by_rank(int(self._module.trainer.received_sigterm))[0]:
            with suppress(Exception):
                dist.barrier()
            raise SIGTERMException

    def teardown(self) -> None:
        """Undo the job's changes to Lightning's objects."""
        self._validation.close()
        while self._stand_ins:
            self._stand_ins.pop().remove()
        if self._stopped_by_any is not None:
            self._stopped_by_any.end()
            self._stopped_by_any = None
        if self._is_running:  # there was nothing to train
            self.end_job()
        arm([self._module, *self.optimizers])
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        """Omit the job, its optimizers and its schedules from copies."""
        of_job = {"parallel": None, "_accumulation": None, "_stopped_by_any": None}
        return {
            **vars(self),
            **of_job,
            "_stand_ins": [],
            "_optimizers": [],
            "_lightning_optimizers": [],
            "lr_scheduler_configs": [],
        }

    @property
    def _present(self) -> TrainerAccumulation:
        if self._accumulation is None:
            raise UsageError("StrettoStrategy: expected a call inside fit(), found no job")
        return self._accumulation

    @property
    def _job(self) -> DataParallel:
        if self.parallel is None:
            raise UsageError("StrettoStrategy: expected a call inside fit(), found no job")
        return self.parallel

    @property
    def _module(self) -> LightningModule:
        if self.lightning_module is None:
            raise UsageError("StrettoStrategy: expected a call by a Trainer that has a model")
        return self.lightning_module

    # One micro-batch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step as a forward pass of the module; the round begins before it."""
        if self._present.has_open_micro_batch:
            raise UsageError(
                f"{type(self._module).__name__}.optimizer_step ran the closure of the previous batch and did "
                "not step: expected optimizer.step(closure=closure) for each batch; set "
                "accumulate_grad_batches to step less often"
            )
        self._num_samples = num_samples(args[0])
        with self.precision_plugin.train_step_context():
            return self._forward_redirection(self._module, self._module, "training_step", *args, **kwargs)

    def backward(self, closure_loss: Tensor, *_: Any, **__: Any) -> Tensor:
        """Run one micro-batch's backward pass through the job.

        Args:
            closure_loss: Its loss, divided by the micro-batches of a whole accumulation; also in a shorter
                accumulation, whose last micro-batch therefore takes the weight of the missing micro-batches.
        """
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self._module)
        self._present.backward(closure_loss)
        return self.precision_plugin.post_backward(closure_loss, self._module)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Count a micro-batch that is not the last of its accumulation; Lightning runs it in the block."""
        yield
        self._present.end_micro_batch(self._micro_batches, self._num_samples, is_last=False)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *_: Any, **__: Any) -> Any:
        """Run the last micro-batch of an accumulation, with which the job steps."""
        result = closure()
        is_short = self._present.num_counted < self._micro_batches - 1
        self._present.end_micro_batch(self._micro_batches, self._num_samples, is_last=True)
        if is_short or self._lands_each:
            self._job.commit()
        return result

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Drop an accumulation that did not reach its step, as when the loader gave None for the last batch."""
        check_unchanged(self._taken, taken_over(self._module.trainer), "fit()")
        if batch_idx % self._micro_batches == 0:
            self._present.drop()

    # Validation and files

    def on_validation_start(self) -> None:
        """Show the committed parameters for the validation."""
        if self.parallel is not None:
            self._land()
            self._validation.enter_context(self.parallel.settled())

    def on_validation_end(self) -> None:
        """Show the parameters from before the validation again."""
        self._validation.close()

    def _land(self) -> None:
        if self._present.num_counted == 0:
            self._job.commit()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the committed parameters and the buffers; all ranks must call it."""
        if self.parallel is None or self._is_alone:
            return super().lightning_module_state_dict()
        self._land()
        with self.parallel.settled():  # after which the tensors may show something else
            state = super().lightning_module_state_dict()
            return {
                name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()
            }

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return an empty dictionary: see Note [Two parts of a checkpoint]."""
        return {} if self.parallel is not None else super().optimizer_state(optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write Lightning's file, and the state of the job next to it; all ranks must call it."""
        if self._is_alone:
            _log.warning(
                "%s is not written: after %s ranks are apart", filepath, type(self._exception).__name__
            )
            return
        if self.parallel is not None and "optimizer_states" in checkpoint:
            with self._present.without_it():
                checkpoints.save(self.parallel, _folder_of(filepath), keep=1)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove both, unless the new checkpoint could not be written."""
        if self._is_alone:
            return
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_folder_of(filepath), ignore_errors=True)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read Lightning's file, and remember its path."""
        self._loaded_from = Path(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Resume the job that was saved next to the file."""
        folder = _folder_of(self._loaded_from)
        if not folder.is_dir():
            raise CheckpointError(
                f"{self._loaded_from}: expected the folder {folder.name!r} next to it with the state of a job, found "
                "none: resume from a checkpoint of a StrettoStrategy, or begin a new fit from its weights"
            )
        for note in checkpoints.load(self._job, folder).notes:
            _log.warning("%s: %s", self._loaded_from, note)


def _folder_of(filepath: str | Path) -> Path:
    if "://" in str(filepath):
        raise ConfigError(f"{filepath}: expected a path on a file system that all ranks share")
    path = Path(filepath).resolve()  # `last.ckpt` may be a link
    return path.with_name(path.name + SUFFIX)


class _EndsJobFirst(known.Callback):
    """Ends the job before the other callbacks; see Note [Before other callbacks]."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the rest of an accumulation at the epoch's end."""
        _strategy_of(trainer).drop_accumulation()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the job."""
        _strategy_of(trainer).end_job()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the job because of `exception`."""
        _strategy_of(trainer).interrupt_job(exception)


def _strategy_of(trainer: Trainer) -> StrettoStrategy:
    strategy = trainer.strategy
    if not isinstance(strategy, StrettoStrategy):
        raise UsageError(
            f"StrettoStrategy: expected to be the Trainer's strategy, found {type(strategy).__name__}"
        )
    return strategy
