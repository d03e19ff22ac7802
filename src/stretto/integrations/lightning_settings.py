"""Settings of Lightning that do not work with `StrettoStrategy`, checked before the job starts."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch import callbacks as known
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden

from stretto.engine import Options
from stretto.integrations.refused import overrides, reads_optimizer_state, refuse

REFUSED_CALLBACKS: dict[type, str] = {
    known.GradientAccumulationScheduler: "set accumulate_grad_batches",
    known.LearningRateFinder: "find the rate under DDPStrategy (Tuner.lr_find too), then train with it",
    known.StochasticWeightAveraging: "use WeightAveraging or EMAWeightAveraging",
    known.BaseFinetuning: "a job trains the same parameters from its start to its end; call fit once for each phase",
    known.ModelPruning: "it replaces parameters of the running job; prune before or after fit",
}

ALIKE = (
    "max_epochs",
    "max_steps",
    "limit_train_batches",
    "limit_val_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
    "reload_dataloaders_every_n_epochs",
)
"""Settings of a Trainer that decide when ranks meet. The job compares lengths of accumulations and clipping."""


def taken_over(trainer: Trainer) -> dict[str, object]:
    """Return the settings that a job takes over at its start; 0 and None both mean no clipping."""
    return {
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val or None,
    }


def callbacks_of(trainer: Trainer) -> list[Any]:
    """Return the Trainer's callbacks, in the order in which they are called."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # its connector sets them
    return callbacks


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise if an argument is for PyTorch's wrapper and changes its behaviour.

    Raises:
        ConfigError: An argument is; the message names it.
    """
    for_wrapper = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")
    refused = {
        name: (arguments.get(name) is not None, "choose strategy and wire instead") for name in for_wrapper
    }
    unused = bool(arguments.get("find_unused_parameters"))
    refused["find_unused_parameters"] = (unused, "set Options(allow_unused=True)")
    refuse("StrettoStrategy", refused)


def check_settings(trainer: Trainer, options: Options) -> None:
    """Raise if a setting of the Trainer or a hook of the model cannot work here.

    Raises:
        ConfigError: A setting or hook cannot work; the message names it.
    """
    module = trainer.lightning_module
    clips_values = trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
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
        "Options(clip_norm=...)": (options.clip_norm is not None, "set gradient_clip_val"),
    }
    for hook in ("backward", "configure_gradient_clipping", "on_before_optimizer_step"):
        is_there = is_overridden(hook, module)
        refused[f"{type(module).__name__}.{hook}"] = (is_there, "gradients are the job's; leave the hook out")
    refuse("StrettoStrategy", refused)


def check_callbacks(trainer: Trainer, schedules: Sequence[Any], *, overlaps: bool) -> None:
    """Raise if a callback, a schedule or a hook that looks at gradients cannot work here.

    Args:
        trainer: The Trainer with the callbacks.
        schedules: Schedules of the optimizer.
        overlaps: Whether an update is complete only after its step.

    Raises:
        ConfigError: One cannot work; the message names it.
    """
    refused = {type(one).__name__: reads_optimizer_state(one) for one in schedules}
    module = trainer.lightning_module
    parts = overlaps or trainer.world_size > 1
    seen = "it would see the gradients of this rank before the exchange; remove the hook"
    refused[f"{type(module).__name__}.on_after_backward"] = (
        parts and is_overridden("on_after_backward", module),
        seen,
    )
    for callback in callbacks_of(trainer):
        name = type(callback).__name__
        for kind, remedy in REFUSED_CALLBACKS.items():
            if isinstance(callback, kind):
                refused[name] = (True, remedy)
        stepping = overrides(callback, known.Callback, "on_before_optimizer_step")
        refused[f"{name}.on_before_optimizer_step"] = (
            stepping,
            "gradients are the job's; leave the hook out",
        )
        backward = parts and overrides(callback, known.Callback, "on_after_backward")
        refused[f"{name}.on_after_backward"] = (backward, seen)
        is_timed = isinstance(callback, known.ModelCheckpoint) and callback._train_time_interval is not None
        refused[f"{name}(train_time_interval=...)"] = (
            is_timed and overlaps and trainer.accumulate_grad_batches > 1,
            "the time may be up in the middle of an update; set every_n_train_steps",
        )
    refuse("StrettoStrategy", refused)
