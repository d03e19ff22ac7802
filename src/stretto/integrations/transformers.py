"""`StrettoTrainer`: the Trainer of Hugging Face transformers, on a job of this library.

Note [What stays the Trainer's]
    Its loop, losses, data, callbacks, logs and files. Two of its parts meet the job. The accelerator runs backward
    passes, here through the job, which counts a micro-batch after the Trainer's `training_step`, and reduces, clips,
    and steps optimizer and schedule when an accumulation is full. The Trainer's optimizer is a stand-in: the Trainer
    steps it at the end of an accumulation, when the job has completed the update or has it in flight.

Note [Where every update is complete]
    A strategy that overlaps commits an update after the Trainer has counted it. Where the Trainer evaluates or saves,
    and after an accumulation that is shorter than the others, the job completes every update first. So evaluations
    and files have `global_step` updates, and a run that resumes from there equals the other to the bit. An
    accumulation that a callback ends inside is dropped, for the Trainer does not count it.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stretto import checkpoint
from stretto.engine import Options
from stretto.engine.method_patch import MethodPatch
from stretto.errors import CheckpointError, MissingExtra, UsageError
from stretto.feed import num_samples
from stretto.guards import Guard
from stretto.integrations.accumulation import TrainerAccumulation
from stretto.integrations.meeting import by_rank, check_alike
from stretto.integrations.refused import check_unchanged, overrides, reads_optimizer_state, refuse
from stretto.integrations.zero_grad import arm, disarm
from stretto.parallel import DataParallel
from stretto.records import Update
from stretto.strategies import Strategy

try:
    import transformers
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import TrainerCallback, trainer_jit_checkpoint

    from stretto.integrations.asked_by_any import AskedByAny
    from stretto.integrations.just_in_time import JITCheckpointCallback
except ImportError as error:
    raise MissingExtra("transformers", "recipes", "StrettoTrainer") from error

_OWN_STEPS = ("lomo", "layerwise", "schedule_free")
"""Parts of the names of optimizers that step in the backward pass, or show other parameters than they train."""
_COLLECTIVES = ("gather", "pad_across_processes", "reduce", "wait_for_everyone")
"""Collective methods of the accelerator."""
_ALIKE = (
    "average_tokens_across_devices",
    "include_num_input_tokens_seen",
    "logging_strategy",
    "logging_steps",
    "logging_first_step",
    "eval_strategy",
    "eval_steps",
    "eval_delay",
    "eval_on_start",
    "save_strategy",
    "save_steps",
    "load_best_model_at_end",
    "prediction_loss_only",
)
"""Arguments of the Trainer that decide when ranks meet, in addition to the number of steps and whether there are
metrics."""
FOLDER = "stretto"
"""The folder in each `checkpoint-N` of the Trainer with the state of the job."""
_log = logging.getLogger("stretto")


class StrettoTrainer(transformers.Trainer):
    """A `transformers.Trainer` whose ranks exchange through `DataParallel`; the same numbers by default.

    It starts as the Trainer does: under torchrun, or on one process. the page integrations says what differs.

    Args:
        args: Arguments of `transformers.Trainer`; `max_grad_norm` clips, and `gradient_accumulation_steps` is the
            number of micro-batches in an update.
        strategy: As in `DataParallel`, like the next three arguments.
        wire: Short for `Options(wire=...)`.
        guards: The guards of the job's values.
        options: All other options except `clip_norm`; None accepts unused parameters, as the Trainer does.
        kwargs: Arguments of `transformers.Trainer`.

    Raises:
        ConfigError: A setting of the Trainer cannot work here.
    """

    optimizer: Any  # None before training, and then a face
    lr_scheduler: Any

    def __init__(
        self,
        *args: Any,
        strategy: Strategy | None = None,
        wire: str | None = None,
        guards: Sequence[Guard] | Literal["standard"] = (),
        options: Options | None = None,
        **kwargs: Any,
    ) -> None:
        self.parallel: DataParallel | None = None
        """The job of the running or last `train()`."""
        self.last_update: Update | None = None
        """The last committed update: under a strategy that overlaps, often the update before `global_step`."""
        self._start_job = functools.partial(DataParallel, strategy=strategy, wire=wire, guards=guards)
        self._options = Options(allow_unused=True) if options is None else options
        self._accumulation: TrainerAccumulation | None = None
        self._taken: dict[str, object] = {}
        """Arguments with which the job was started."""
        super().__init__(*args, **kwargs)
        self.callback_handler.callbacks = [
            JITCheckpointCallback(one)
            if isinstance(one, trainer_jit_checkpoint.JITCheckpointCallback)
            else one
            for one in self.callback_handler.callbacks
        ]

    # The job

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, which does not wrap the model; the job runs backward passes."""
        self._check_settings()
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = functools.partial(
            self.accelerator.prepare_model,
            evaluation_mode=True,  # places, compiles and casts, and no more
        )
        # Here, because a subclass may make the optimizer itself.
        prepare = self.accelerator.prepare_optimizer
        self.accelerator.prepare_optimizer = lambda optimizer, **_: prepare(_faced(optimizer))
        self.accelerator.backward = self._backward
        for name in _COLLECTIVES:
            collective = getattr(self.accelerator, name)
            MethodPatch(self.accelerator, name, functools.partial(self._once_met, collective))

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Make the schedule for the real optimizer."""
        return super().create_scheduler(num_training_steps, getattr(self.optimizer, "optimizer", optimizer))

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        before = self.parallel
        model, loader = super()._prepare_for_training(  # type: ignore[no-untyped-call]  # as all its private methods
            max_steps, train_dataloader, resume_from_checkpoint
        )
        optimizer = self.optimizer.optimizer
        if before is not None and before.optimizer is optimizer and resume_from_checkpoint is None:
            raise UsageError(
                "train() was called before: the state of the optimizer ended with that job; continue with "
                "resume_from_checkpoint, or make a new StrettoTrainer"
            )
        self._check_callbacks()
        has_metric = isinstance(
            self.lr_scheduler, (torch.optim.lr_scheduler.ReduceLROnPlateau, transformers.GreedyLR)
        )
        self.last_update = None
        self.parallel = self._start_job(
            model,
            optimizer,
            micro_batches=self.args.gradient_accumulation_steps,
            scheduler=None if has_metric else self.lr_scheduler,  # the Trainer turns one that needs a metric
            options=dataclasses.replace(self._options, clip_norm=self.args.max_grad_norm or None),
        )
        self._accumulation = TrainerAccumulation(self.parallel)
        self._taken = self._taken_over()
        if self.args.world_size > 1:
            settings = {name: getattr(self.args, name) for name in _ALIKE}
            settings |= {"max_steps": max_steps, "compute_metrics": self.compute_metrics is not None}
            check_alike(self.parallel, settings)
            others = self.callback_handler.callbacks
            others.append(AskedByAny([*others], self.by_rank))
        disarm([model])
        if resume_from_checkpoint is not None:
            restored = checkpoint.load(self.parallel, _folder_in(resume_from_checkpoint))
            if restored.extra is not None:
                self.lr_scheduler.load_state_dict(restored.extra)
            for note in restored.notes:
                _log.warning("%s: %s", resume_from_checkpoint, note)
        return model, loader

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)
        except BaseException as error:
            if self._accumulation is not None:
                self._accumulation.end_job(error)
            raise
        finally:
            others = self.callback_handler.callbacks
            others[:] = [one for one in others if not isinstance(one, AskedByAny)]
            arm([self.model_wrapped])

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]  # as above
        self._land()

    def _finalize_training(self, *args: Any) -> Any:
        for update in self._job.finish():
            self.last_update = update
        return super()._finalize_training(*args)  # type: ignore[no-untyped-call]  # as above

    def by_rank(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every rank; all ranks call it, and raise if one has failed."""
        return by_rank(self._job, numbers, "agreement on what any rank asks of the Trainer")

    def _once_met(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a collective of the Trainer after ranks have met; see Note [A trainer's own collectives]."""
        self._meet()
        return collective(*args, **kwargs)

    def _meet(self) -> None:
        if self.parallel is not None and not self.parallel.job.compute.lifetime.has_finished:
            by_rank(self._job, [0], "a collective of the Trainer")

    @property
    def _present(self) -> TrainerAccumulation:
        if self._accumulation is None:
            raise UsageError("StrettoTrainer: expected a call inside train(), found no job")
        return self._accumulation

    @property
    def _job(self) -> DataParallel:
        if self.parallel is None:
            raise UsageError("StrettoTrainer: expected a call inside train(), found no job")
        return self.parallel

    # One micro-batch

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the batches of an accumulation; an empty list if the data end inside an accumulation that had to be
        complete.
        """
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        return ([], None) if len(batches) < num_batches else (batches, num_items)

    def _backward(self, loss: Tensor, **_: Any) -> None:
        """Replace `Accelerator.backward`.

        Args:
            loss: This micro-batch's share of the rank's loss, which is their sum: by micro-batches or by tokens. The
                mean over ranks is what the Trainer trains on.
        """
        self._present.backward(loss)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count the micro-batch: the Trainer calls this right after every `training_step`."""
        check_unchanged(self._taken, self._taken_over(), "train()")
        count = self.current_gradient_accumulation_steps
        is_last = self.accelerator.sync_gradients
        update = self._present.end_micro_batch(count, num_samples(inputs), is_last=is_last)
        self.last_update = update or self.last_update
        if is_last and count < self.args.gradient_accumulation_steps:
            self._commit()
        super()._track_num_input_tokens(inputs)  # type: ignore[no-untyped-call]  # as above

    def _taken_over(self) -> dict[str, object]:
        """Return the arguments that a job takes over at its start."""
        names = ("gradient_accumulation_steps", "max_grad_norm")
        return {name: getattr(self.args, name) for name in names}

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Do nothing: the job clips before it steps."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float | None:
        return None if self.last_update is None else self.last_update.gradient_norm

    def _get_learning_rate(self) -> float:
        """Return the learning rate of the Trainer's step: the one its update used, or will use if it is in flight."""
        if self.last_update is not None and self._job.steps > self.state.global_step:
            return self.last_update.learning_rates[0]
        rate: float = super()._get_learning_rate()
        return rate

    # Evaluation and files

    def _land(self) -> None:
        """Complete every update, after dropping an accumulation that a callback has ended."""
        if self.control.should_epoch_stop or self.control.should_training_stop:
            for update in self._present.drop():
                self.last_update = update
        self._commit()

    def _commit(self) -> None:
        for update in self._job.commit():
            self.last_update = update

    def _settled(self) -> AbstractContextManager[None]:
        return nullcontext() if self.parallel is None else self.parallel.settled()

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_evaluate or self.control.should_save:
            self._land()
        if self.control.should_log:
            self._meet()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict with the committed parameters; all ranks must call it."""
        with self._settled():
            return super().evaluation_loop(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save all committed updates; callbacks may call this, and then all ranks must."""
        if not self._job.job.compute.lifetime.has_finished:
            self._land()
        super()._save_checkpoint(*args, **kwargs)
        self._meet()  # so that a checkpoint is whole once any rank goes on

    def store_flos(self) -> None:
        """Sum the amount of computation over ranks; all ranks must call it."""
        self._meet()
        super().store_flos()

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the committed parameters, which `from_pretrained` reads; all ranks must call."""
        with self._settled():
            super().save_model(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        is_turned_by_the_job = self._job.scheduler is not None
        extra = None if is_turned_by_the_job else self.lr_scheduler.state_dict()
        checkpoint.save(self._job, Path(output_dir) / FOLDER, extra=extra, keep=1)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Check the state that `_prepare_for_training` will load once the job exists."""
        if checkpoint is not None and not _folder_in(checkpoint).is_dir():
            raise CheckpointError(
                f"{checkpoint}: expected a folder {FOLDER!r} with the state of a job, found none: resume from "
                "a checkpoint of a StrettoTrainer without save_only_model, or train this model without "
                "resume_from_checkpoint"
            )

    def _check_settings(self) -> None:
        """Raise if a setting of the Trainer cannot work here.

        Raises:
            ConfigError: A setting cannot work; the message names it.
        """
        args = self.args
        optimizer = transformers.training_args.OptimizerNames(args.optim).value
        refused = {
            "fp16": (args.mixed_precision == "fp16", "use bf16=True, which scales no loss"),
            "deepspeed": (args.deepspeed_plugin is not None, "it exchanges on its own; leave it out"),
            "fsdp": (args.fsdp_plugin_args is not None, "it exchanges on its own; leave it out"),
            "parallelism_config": (args.parallelism_config is not None, "every rank holds the whole model"),
            "several devices in one process": (args.n_gpu > 1, "start one process per device, with torchrun"),
            "auto_find_batch_size": (args.auto_find_batch_size, "set per_device_train_batch_size"),
            "save_on_each_node": (
                args.save_on_each_node,
                "checkpoints need a file system that all ranks share",
            ),
            f"optim={optimizer!r}": (
                any(word in optimizer for word in _OWN_STEPS),
                "it steps without the trainer, or swaps parameters; use another optimizer",
            ),
            "Options(clip_norm=...)": (self._options.clip_norm is not None, "set max_grad_norm"),
        }
        refuse("StrettoTrainer", refused)

    def _check_callbacks(self) -> None:
        """Raise if a callback or the schedule cannot work here.

        Raises:
            ConfigError: A callback or the schedule cannot work; the message names it.
        """
        remedy = "the job owns the gradients; read last_update.gradient_norm in on_step_end"
        refused = {
            f"{type(callback).__name__}.{hook}": (overrides(callback, TrainerCallback, hook), remedy)
            for callback in self.callback_handler.callbacks
            if not isinstance(callback, JITCheckpointCallback)
            for hook in ("on_pre_optimizer_step", "on_optimizer_step")
        }
        refused[type(self.lr_scheduler).__name__] = reads_optimizer_state(self.lr_scheduler)
        refuse("StrettoTrainer", refused)


class _Face(AcceleratedOptimizer):  # type: ignore[misc]  # it has no types
    """The optimizer that the Trainer steps and reads; the job steps the real optimizer and its schedule."""

    _is_accelerate_prepared = True

    def step(self, closure: Any = None) -> None:
        """Do nothing: the job has already stepped, or steps when the update is complete."""

    @property
    def step_was_skipped(self) -> bool:
        """True, so that the Trainer does not step the schedule a second time."""
        return True


def _faced(optimizer: torch.optim.Optimizer) -> _Face:
    return optimizer if isinstance(optimizer, _Face) else _Face(optimizer, device_placement=False)


def _folder_in(path: str) -> Path:
    return Path(path) / FOLDER
