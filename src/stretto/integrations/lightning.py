"""`StrettoStrategy`: how Lightning's Trainer exchanges, on a job of this library.

Note [What stays Lightning's]
    Its loop, data, callbacks, logs and files; and ranks, devices and precision, as its DDP strategy has them. The
    backward pass of a batch runs through the job, which reduces, clips, steps and turns the schedule when an
    accumulation is full. When Lightning steps the optimizer, all that has been done or is under way.

Note [Where everything lands]
    A strategy that overlaps commits an update after Lightning has counted it. Before a validation or a checkpoint that
    follows a whole accumulation, and after an accumulation that is shorter than the others, everything lands first.

Note [Two parts of a checkpoint]
    Lightning's own file has no state of the optimizer, of which every rank has a share. That is in a folder beside it.
"""

import dataclasses
import functools
import logging
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from stretto import checkpoint as checkpoints
from stretto.engine import Options
from stretto.errors import CheckpointError, ConfigError, MissingExtra, UsageError
from stretto.feed import num_samples
from stretto.guards import Guard
from stretto.integrations.zero_grad import arm, disarm
from stretto.parallel import DataParallel
from stretto.strategies import Strategy

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import GradientAccumulationScheduler
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import GradClipAlgorithmType
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise MissingExtra("lightning", "lightning", "StrettoStrategy") from error

SUFFIX = ".stretto"
"""Of the folder beside Lightning's file, in which ranks keep what the job needs to go on."""
_log = logging.getLogger("stretto")


class StrettoStrategy(DDPStrategy):
    """A strategy for `lightning.Trainer(strategy=...)`; by default the same numbers as `DDPStrategy`.

    docs/integrations.md says what differs.

    Args:
        strategy: See `DataParallel`, as for the next three.
        wire: Short for `Options(wire=...)`.
        guards: What watches over the job's values.
        options: Everything else but `clip_norm`, which is the Trainer's `gradient_clip_val`.
        kwargs: Those of `DDPStrategy`, but for those of PyTorch's wrapper.

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
        self.parallel: DataParallel | None = None
        """The job of the running or last `fit`."""
        self._start_job = functools.partial(DataParallel, strategy=strategy, wire=wire, guards=guards)
        self._options = Options() if options is None else options
        self._micro_batches = 1
        """Of a whole accumulation."""
        self._num_counted = 0
        """Micro-batches of the present accumulation."""
        self._num_samples = 1
        self._is_last = False
        """Whether the accumulation ends with the batch at hand."""
        self._validation = ExitStack()
        """Shows the committed parameters for as long as a validation lasts."""
        self._loaded_from = Path()

    # The job

    def setup(self, trainer: Trainer) -> None:
        """Set up device and optimizer as DDP does, and start the job."""
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        _check_settings(trainer, self._options)
        super().setup(trainer)
        optimizer, *others = self.optimizers
        if others:
            raise ConfigError(f"StrettoStrategy: expected one optimizer, found {1 + len(others)}")
        self._micro_batches, self._num_counted = trainer.accumulate_grad_batches, 0
        self.parallel = self._start_job(
            self._module,
            optimizer,
            micro_batches=self._micro_batches,
            scheduler=self._take_schedule(),
            options=dataclasses.replace(self._options, clip_norm=trainer.gradient_clip_val or None),
        )
        disarm([self._module, optimizer])

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:  # type: ignore[override]  # DDP returns its wrapper
        """Leave the model as it is, where DDP wraps it."""
        return model

    def _register_ddp_hooks(self) -> None:
        """Do nothing: there is no wrapper to hook."""

    def _take_schedule(self) -> Any:
        """Return a schedule that counts updates, for the job to turn, and keep Lightning from turning it."""
        if is_overridden("lr_scheduler_step", self._module):
            return None
        for config in self.lr_scheduler_configs:
            if config.interval == "step" and config.frequency == 1 and not config.reduce_on_plateau:
                config.frequency = sys.maxsize  # in steps; it stays listed, for monitors and files
                return config.scheduler
        return None

    def on_train_end(self) -> None:
        """End the job; the model shows committed parameters."""
        self._job.finish()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks."""
        super().on_exception(exception)
        if self.parallel is not None:
            self.parallel.fail(exception)

    def teardown(self) -> None:
        """Give back what the job has borrowed."""
        self._validation.close()
        arm([self._module, *self.optimizers])
        super().teardown()

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
        """Run the module's training step as a forward pass of the module, before which a round takes off."""
        self._num_samples = num_samples(args[0])
        with self.precision_plugin.train_step_context():
            return self._forward_redirection(self._module, self._module, "training_step", *args, **kwargs)

    def backward(self, closure_loss: Tensor, *_: Any, **__: Any) -> Tensor:
        """Run one micro-batch's backward pass through the job.

        Args:
            closure_loss: Its loss, divided by the micro-batches of a whole accumulation; also in a shorter one, whose
                last micro-batch therefore has the weight of those that are missing.
        """
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self._module)
        weight = self._micro_batches - self._num_counted if self._is_last else 1
        loss = closure_loss * (self._micro_batches / weight)
        self._job.backward(loss, weight=weight, samples=self._num_samples)
        self._num_counted += 1
        return self.precision_plugin.post_backward(closure_loss, self._module)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *_: Any, **__: Any) -> Any:
        """Run the last micro-batch of an accumulation, with which the job steps."""
        self._is_last = True
        try:
            result = closure()
        finally:
            self._is_last = False
        if self._num_counted < self._micro_batches:
            self._job.commit()
        self._num_counted = 0
        return result

    # Validation and files

    def on_validation_start(self) -> None:
        """Validate with the committed parameters."""
        if self.parallel is not None:
            self._land()
            self._validation.enter_context(self.parallel.settled())

    def on_validation_end(self) -> None:
        """Show again what was shown before."""
        self._validation.close()

    def _land(self) -> None:
        if self._num_counted == 0:
            self._job.commit()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the committed parameters and the buffers; all ranks must call."""
        if self.parallel is None:
            return super().lightning_module_state_dict()
        self._land()
        with self.parallel.settled():  # behind which the tensors may show something else
            state = super().lightning_module_state_dict()
            return {
                name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()
            }

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return nothing: see Note [Two parts of a checkpoint]."""
        return {} if self.parallel is not None else super().optimizer_state(optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write Lightning's file, and beside it what the job needs to go on; all ranks must call."""
        if self.parallel is not None and "optimizer_states" in checkpoint:
            checkpoints.save(self.parallel, _folder_of(filepath), keep=1)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove both."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_folder_of(filepath), ignore_errors=True)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read Lightning's file, and remember where it lies."""
        self._loaded_from = Path(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on with the job that was saved beside the file."""
        folder = _folder_of(self._loaded_from)
        if not folder.is_dir():
            raise CheckpointError(
                f"{self._loaded_from}: expected the folder {folder.name!r} beside it with the state of a job, found "
                "none: go on from a checkpoint of a StrettoStrategy, or begin anew from its weights"
            )
        for note in checkpoints.load(self._job, folder).notes:
            _log.warning("%s: %s", self._loaded_from, note)


def _folder_of(filepath: str | Path) -> Path:
    if "://" in str(filepath):
        raise ConfigError(f"{filepath}: expected a path on a file system that all ranks share")
    path = Path(filepath).resolve()  # `last.ckpt` may be a link
    return path.with_name(path.name + SUFFIX)


def _check_settings(trainer: Trainer, options: Options) -> None:
    """Raise if a setting of the Trainer or a hook of the model cannot work here.

    Raises:
        ConfigError: Names it.
    """
    module = trainer.lightning_module
    clips_values = trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # its connector sets them
    varies = any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)
    refused = {
        "manual optimization": (
            not module.automatic_optimization,
            "write the loop with DataParallel instead",
        ),
        f"precision={trainer.precision!r}": (
            "16" in trainer.precision.replace("bf16", ""),
            "use 'bf16-mixed'",
        ),
        "gradient_clip_algorithm='value'": (clips_values, "use 'norm'"),
        "GradientAccumulationScheduler": (varies, "set accumulate_grad_batches"),
        "Options(clip_norm=...)": (options.clip_norm is not None, "set gradient_clip_val"),
    }
    for hook in ("backward", "configure_gradient_clipping", "on_before_optimizer_step"):
        is_there = is_overridden(hook, module)
        refused[f"{type(module).__name__}.{hook}"] = (is_there, "gradients are the job's; leave the hook out")
    for setting, (is_set, remedy) in refused.items():
        if is_set:
            raise ConfigError(f"StrettoStrategy does not work with {setting}: {remedy}")
