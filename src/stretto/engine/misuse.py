"""What a user is told whose loop, model or loss does what a job cannot follow; whoever notices it raises these."""

from collections.abc import Sequence

from torch import Tensor

from stretto.errors import (
    GradientsTouched,
    LossNotScalar,
    ParametersTouched,
    StepWithoutBackward,
    UnusedParameters,
    UsageError,
)


def no_loss(loss: object, where: object) -> UsageError:
    """No backward pass can begin at this."""
    if isinstance(loss, Tensor) and loss.is_floating_point() and loss.numel() == 1:
        return UsageError(
            f"{where}: the loss depends on no parameter that requires a gradient: expected one computed by the model "
            "outside torch.no_grad(), and not detached"
        )
    found, remedy = f"a {type(loss).__name__}", "hand over the tensor alone, such as output.loss"
    if isinstance(loss, Tensor):
        found, remedy = f"shape {tuple(loss.shape)} and dtype {loss.dtype}", "reduce it with .mean()"
    return LossNotScalar(f"{where}: expected a loss of one floating-point element, found {found}: {remedy}")


def no_gradient(where: object) -> StepWithoutBackward:
    """A micro-batch is counted whose gradient has not come."""
    return StepWithoutBackward(
        f"{where}: no gradient has arrived since the last micro-batch was counted: run its backward pass first, or "
        "count it with weight=0 to contribute nothing"
    )


def autocast_to_float16(where: object) -> UsageError:
    """A forward pass runs in float16, whose small gradients vanish."""
    return UsageError(f"{where}: float16 needs loss scaling: expected autocast to bfloat16")


def gradients_written(where: object) -> GradientsTouched:
    """Accumulated gradients are not what backward passes have left."""
    return GradientsTouched(
        f"{where}: the accumulated gradients were changed outside backward, by clipping, scaling or zeroing; clip with "
        "Options(clip_norm=...), weigh with backward(loss, weight)"
    )


def gradient_replaced(name: str, where: object) -> GradientsTouched:
    """A parameter has another `.grad` than the one in which gradients accumulate."""
    return GradientsTouched(
        f"{where}: the gradient of {name!r} was replaced; leave out zero_grad() (gradients are zeroed at take-off), do "
        "not assign .grad but before parallel.count_micro_batch(), and call backward without create_graph=True"
    )


def others_gradients(names: Sequence[str], where: object) -> GradientsTouched:
    """Gradients of a backward pass that the job has not run are neither counted nor dropped."""
    return GradientsTouched(
        f"{where}: {len(names)} parameters, {names[0]!r} among them, hold gradients of a backward pass that was not "
        "this job's (another job's, or loss.backward()): drop them with parallel.discard(), or count them with "
        "parallel.count_micro_batch()"
    )


def added_without_weight(name: str, weight: float) -> GradientsTouched:
    """A gradient has passed by the hook that gives it its weight."""
    return GradientsTouched(
        f"{name!r}: an autograd function has added to its gradient itself, without the weight {weight} that a loss or "
        "model of 16 bits is given later: use weight=1.0, or return the gradient from the function"
    )


def without_gradient(names: Sequence[str], where: object) -> UnusedParameters:
    """Parameters that take no part in the loss."""
    return UnusedParameters(
        f"{where}: {len(names)} parameters received no gradient on any rank, among them {names[:3]}: freeze them, or "
        "accept that they are skipped as PyTorch skips them with Options(allow_unused=True)"
    )


def storage_rebound(name: str, where: object) -> ParametersTouched:
    """A parameter has other memory than when it was wrapped."""
    return ParametersTouched(
        f"{where}: the storage of parameter {name!r} was rebound (.data = ..., .to(...), .half()); bring the model to "
        "its device and dtype before wrapping"
    )


def parameter_written(name: str, where: object) -> ParametersTouched:
    """A parameter holds something else than what the job has installed."""
    return ParametersTouched(
        f"{where}: parameter {name!r} was written between updates; load weights before wrapping, or through a "
        "checkpoint"
    )


def groups_added(found: int, before: int, where: object) -> ParametersTouched:
    """The optimizer has groups of which the job knows nothing."""
    return ParametersTouched(
        f"{where}: the optimizer has {found} parameter groups, {before} when it was wrapped; add groups before wrapping"
    )


def parameters_added(count: int, where: object) -> ParametersTouched:
    """The model trains parameters of which the job knows nothing."""
    return ParametersTouched(
        f"{where}: the model has {count} trainable parameters that it did not have when it was wrapped; wrap after the "
        "model is complete and sharded (fully_shard), and freeze after that what is to train later"
    )


def parameter_removed(name: str, where: object) -> ParametersTouched:
    """The job trains a parameter that the model has not any more."""
    return ParametersTouched(
        f"{where}: parameter {name!r} was removed from the model after wrapping; make a new DataParallel over the "
        "changed model"
    )
