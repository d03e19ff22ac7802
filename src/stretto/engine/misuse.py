"""Errors for loops, models and losses that a job does not support; the code that notices the mistake raises them."""

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.errors import (
    ConfigError,
    EstimateShown,
    GradientsTouched,
    LossNotScalar,
    ParametersTouched,
    StepWithoutBackward,
    StrettoError,
    UnusedParameters,
    UsageError,
)
from stretto.fields import shown
from stretto.optimizer import Hyperparameters
from stretto.strategies.contract import Effect, Preview, Step


def no_loss(loss: object, where: object) -> UsageError:
    """Return the error for a loss that has no backward pass."""
    if isinstance(loss, Tensor) and loss.is_floating_point() and loss.numel() == 1:
        return UsageError(
            f"{where}: the loss depends on no parameter that requires a gradient: expected a loss that the "
            "model computes outside torch.no_grad(), not a detached one"
        )
    found, remedy = f"a {type(loss).__name__}", "pass the tensor alone, such as output.loss"
    if isinstance(loss, Tensor):
        found, remedy = f"shape {tuple(loss.shape)} and dtype {loss.dtype}", "reduce it with .mean()"
    return LossNotScalar(f"{where}: expected a loss of one floating-point element, found {found}: {remedy}")


def read_weight(weight: object, where: object) -> float:
    """Return the weight of a micro-batch that is not a plain number, such as a tensor's.

    Raises:
        ConfigError: float32 cannot hold gradients with this weight, or their sums.
    """
    given: Any = weight.detach() if isinstance(weight, Tensor) else weight
    try:
        value = math.nan if isinstance(given, str | bytes) else float(given)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        value = math.nan
    if not (value == 0 or 1e-30 <= value <= 1e30):
        raise ConfigError(f"{where}: weight {shown(weight)}: expected 0, or a number from 1e-30 to 1e30")
    return value


def read_samples(samples: object, where: object) -> int:
    """Return the number of samples in a micro-batch.

    Raises:
        ConfigError: It is not a count.
    """
    try:
        count = operator.index(samples)  # type: ignore[arg-type]  # is it one?
    except (TypeError, ValueError, RuntimeError):
        count = -1
    if not 0 <= count < 2**53:
        raise ConfigError(f"{where}: samples {shown(samples)}: expected a number of samples, or None")
    return count


def read_recorded_loss(loss: object, where: object) -> Tensor:
    """Return a loss that is only recorded.

    Raises:
        LossNotScalar: It is not a floating-point tensor with one element.
    """
    if not (isinstance(loss, Tensor) and loss.is_floating_point() and loss.numel() == 1) or loss.is_meta:
        raise no_loss(loss, where)
    return loss.reshape(())


def read_weighed(outcome: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Return loss, weight and samples, if a loss function has returned all three.

    Raises:
        LossNotScalar: It has returned another kind of tuple.
    """
    if len(outcome) == len(("loss", "weight", "samples")):
        return outcome
    raise LossNotScalar(
        f"a loss function returned a tuple of {len(outcome)}: expected the loss, or (loss, weight, samples)"
    )


def check_moved(
    names: Sequence[str],
    tensors: Sequence[Tensor],
    memory: Sequence[int],
    before: Sequence[int],
    where: object,
) -> None:
    """Raise if a parameter has another address, unless its memory has moved into shared memory.

    Memory moves when the model is sent to another process.

    Args:
        names: Names of the parameters.
        tensors: The parameters.
        memory: Result of `memory_of` at the start of the job.
        before: Addresses at the start of the job.
        where: Rank and step, for messages.

    Raises:
        ParametersTouched: A parameter has another address; the message names the first.
    """
    for name, tensor, own, address in zip(names, tensors, memory, before, strict=True):
        is_shared = tensor.is_cpu and tensor.is_shared() and memory_of(tensor) == own
        if tensor.data_ptr() != address and not is_shared:
            raise storage_rebound(name, where)


def check_written(
    names: Sequence[str], before: Sequence[int], versions: Sequence[int], where: object
) -> None:
    """Raise if a parameter has another version than before.

    Raises:
        ParametersTouched: A parameter was written; the message names the first.
    """
    for name, old, new in zip(names, before, versions, strict=True):
        if old != new:
            raise parameter_written(name, where)


def memory_of(tensor: Tensor) -> int:
    """Return an identifier of a tensor's memory: equal after a move, and different after `.data =`."""
    return int(tensor.untyped_storage()._cdata)


def check_exception(given: object) -> None:
    """Raise unless a job can end because of this object.

    Raises:
        ConfigError: It is not an exception.
    """
    if not isinstance(given, BaseException):
        raise ConfigError(f"fail: expected an exception, found {shown(given)}")


def check_step(error: Exception, effect: Effect, settings: Hyperparameters, where: object) -> None:
    """Raise if a step of the optimizer, or a preview of a step, failed with the settings of its groups.

    Args:
        error: The raised error.
        effect: The strategy's effect that raised it.
        settings: Settings of the step.
        where: Rank and step, for messages.

    Raises:
        UsageError: The step failed; the message shows the settings.
    """
    is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if is_memory or isinstance(error, StrettoError) or not isinstance(effect, Step | Preview):
        return
    groups = [", ".join(f"{name}={shown(value)}" for name, value in group.items()) for group in settings]
    raise UsageError(
        f"{where}: step() of the optimizer raised {type(error).__name__} ({' '.join(str(error).split())}): expected "
        f"settings with which it can step, found {'; '.join(groups)}: look at the settings of its param_groups"
    ) from error


def check_graph(error: RuntimeError, where: object) -> None:
    """Raise if a backward pass failed because a tensor saved by its forward pass was written since.

    Raises:
        UsageError: It failed for this reason.
    """
    if "modified by an inplace operation" in str(error):
        raise UsageError(
            f"{where}: a tensor from which the loss was computed has been written since: expected a forward "
            "pass and then its backward pass, with no settled(), update or write between them; PyTorch says: "
            + " ".join(str(error).split())
        ) from error


def no_gradient(where: object) -> StepWithoutBackward:
    """Return the error for a counted micro-batch without a gradient."""
    return StepWithoutBackward(
        f"{where}: no gradient has arrived since the last micro-batch was counted: run the backward pass "
        "first, or count the micro-batch with weight=0 so that it adds nothing"
    )


def autocast_to_float16(where: object) -> UsageError:
    """Return the error for a forward pass in float16, whose small gradients underflow."""
    return UsageError(f"{where}: float16 needs loss scaling: expected autocast to bfloat16")


def gradients_written(where: object) -> GradientsTouched:
    """Return the error for accumulated gradients that user code has written."""
    return GradientsTouched(
        f"{where}: the accumulated gradients were changed outside backward, by clipping, scaling or zeroing: "
        "clip with Options(clip_norm=...), and weigh with backward(loss, weight)"
    )


def gradient_replaced(name: str, where: object) -> GradientsTouched:
    """Return the error for a parameter whose `.grad` was replaced."""
    return GradientsTouched(
        f"{where}: the gradient of {name!r} was replaced: remove zero_grad(), because Stretto zeroes gradients when it "
        "sends them; assign .grad only before parallel.count_micro_batch(), and call backward without create_graph=True"
    )


def others_gradients(names: Sequence[str], where: object) -> GradientsTouched:
    """Return the error for gradients of a backward pass that the job did not run, neither counted nor dropped."""
    return GradientsTouched(
        f"{where}: {len(names)} parameters, {names[0]!r} among them, hold gradients of a backward pass of another job "
        "or of loss.backward(): drop them with parallel.discard(), or count them with parallel.count_micro_batch()"
    )


def added_without_weight(name: str, weight: float) -> GradientsTouched:
    """Return the error for a gradient that bypassed the hook for its weight."""
    return GradientsTouched(
        f"{name!r}: an autograd function has added to its gradient directly, without the weight {weight} that Stretto "
        "applies later to a loss or model of 16 bits: use weight=1.0, or return the gradient from the function"
    )


def estimate_left(where: object) -> EstimateShown:
    """Return the error for a model that shows an estimate after its job has ended by an error or was dropped."""
    return EstimateShown(
        f"{where}: the model shows an estimate of a job that ended with an error or was dropped: expected "
        "committed parameters; load a checkpoint into a new DataParallel, or weights into the model"
    )


DIALECTS = {
    "forward": "call the model itself, model(batch)",
    "module": "remove it: Stretto does not wrap the model",
    "step": (
        "remove it: parallel.backward(loss) steps after micro_batches micro-batches, and parallel.commit() earlier"
    ),
    "zero_grad": "remove it: Stretto sets gradients to zero",
    "no_sync": "remove it, and set DataParallel(micro_batches=...)",
    "join": "remove it: feed(loader, until='all') counts every batch of every rank",
    "train": "call model.train()",
    "eval": "call model.eval(), or parallel.evaluate(function)",
    "parameters": "call model.parameters()",
    "to": "move the model to its device and dtype before wrapping",
    "clip_grad_norm_": "remove it, and set Options(clip_norm=...)",
    "save_checkpoint": "call stretto.checkpoint.save(parallel, folder)",
    "load_checkpoint": "call stretto.checkpoint.load(parallel, folder)",
    "prepare": "remove it: pass the bare model, optimizer and scheduler to DataParallel",
}
"""Replacements for attributes of the wrappers of DDP, Accelerate and DeepSpeed."""


class OfAnotherWrapper(UsageError, AttributeError):
    """Raised for an attribute of other libraries' wrappers; `hasattr` returns False for it."""


def of_another_wrapper(name: str, where: object) -> OfAnotherWrapper:
    """Return the error for an attribute in `DIALECTS`, or for calling the job as a model."""
    return OfAnotherWrapper(f"{where}: DataParallel has no {name!r} as other wrappers have: {DIALECTS[name]}")


def optimizer_state_read(where: object) -> UsageError:
    """Return the error for reading or loading the state of the user's optimizer, which has none."""
    return UsageError(
        f"{where}: the state of this optimizer is empty during the job, because Stretto steps a private "
        "optimizer instead: expected parallel.state_dict() and load_state_dict(), or checkpoint.save and load"
    )


def optimizer_copied(where: object) -> UsageError:
    """Return the error for copying the optimizer, whose copy would have no state."""
    return UsageError(
        f"{where}: a copy or a pickle of this optimizer, or of an object that holds it, such as a scheduler: "
        "its state is empty during the job, because Stretto steps a private optimizer instead: expected "
        "checkpoint.save, or scheduler.state_dict()"
    )


def job_copied() -> UsageError:
    """Return the error for copying a job."""
    return UsageError(
        "a copy or a pickle of a DataParallel, or of an object that holds it: its connections and threads "
        "belong to this process: copy parallel.model inside `with parallel.settled():`, save with "
        "stretto.checkpoint.save(parallel, folder), and do not send the job to other processes"
    )


def without_gradient(names: Sequence[str], where: object) -> UnusedParameters:
    """Return the error for parameters that the loss does not use."""
    return UnusedParameters(
        f"{where}: {len(names)} parameters received no gradient on any rank, among them {names[:3]}: freeze "
        "them, or set Options(allow_unused=True), which skips them as PyTorch does"
    )


def storage_rebound(name: str, where: object) -> ParametersTouched:
    """Return the error for a parameter whose memory was replaced after it was wrapped."""
    return ParametersTouched(
        f"{where}: the storage of parameter {name!r} was replaced (.data = ..., .to(...), .half()): move the "
        "model to its device and dtype before wrapping"
    )


def written_at_rest(name: str, where: object) -> ParametersTouched:
    """Return the error for a parameter that was written in a block of `settled`."""
    return ParametersTouched(
        f"{where}: parameter {name!r} was written inside settled() and has another value at the end of the "
        "block: restore the old value, or load weights through a checkpoint"
    )


def parameter_written(name: str, where: object) -> ParametersTouched:
    """Return the error for a parameter that user code has written."""
    return ParametersTouched(
        f"{where}: parameter {name!r} was written between updates; load weights before wrapping, or through a "
        "checkpoint"
    )


def groups_changed(found: Sequence[int], before: Sequence[int], where: object) -> ParametersTouched:
    """Return the error for optimizer groups whose numbers of parameters have changed."""
    return ParametersTouched(
        f"{where}: the optimizer's groups hold {list(found)} parameters, {list(before)} when it was wrapped: "
        "expected the same groups: change them before wrapping, freeze a parameter with "
        "requires_grad_(False), or give its group lr=0"
    )


def parameters_added(count: int, where: object) -> ParametersTouched:
    """Return the error for trainable parameters that were added after the model was wrapped."""
    return ParametersTouched(
        f"{where}: the model has {count} trainable parameters that it did not have when it was wrapped: wrap "
        "the complete model, after fully_shard, and then freeze the parameters that train later"
    )


def parameter_removed(name: str, where: object) -> ParametersTouched:
    """Return the error for a parameter that is no longer in the model."""
    return ParametersTouched(
        f"{where}: parameter {name!r} was removed from the model after wrapping; make a new DataParallel over the "
        "changed model"
    )
