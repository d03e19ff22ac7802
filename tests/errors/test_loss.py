"""A loss, a weight or a call that cannot become an update is refused before it is counted."""

import pytest
import torch
from torch import Tensor, nn

from stretto.errors import ConfigError, Finished, LossNotScalar, StepWithoutBackward, StrettoError, UsageError
from tests.errors.tiny import BOTH_KINDS, TinyJob, says

WHERE = "rank 0, after step 1"


def refused(job: TinyJob, loss: object, kind: type[StrettoError], **arguments: object) -> StrettoError:
    """The error of one `backward`, after one update; it ends the job and says so."""
    job.until_update()
    with pytest.raises(kind) as caught:
        job.parallel.backward(loss, **arguments)
    with pytest.raises(Finished) as afterwards:
        job.micro_batch()
    assert says(afterwards.value, WHERE, kind.__name__, "make a new DataParallel")
    return caught.value


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (torch.ones(3, requires_grad=True) * 2, "shape (3,)"),
        (torch.ones(2, 2, requires_grad=True) * 2, "shape (2, 2)"),
        (torch.ones((), dtype=torch.complex64, requires_grad=True) * 2, "dtype torch.complex64"),
        (torch.ones((), dtype=torch.int64), "dtype torch.int64"),
        (0.5, "a float"),
        ((torch.ones(()), torch.ones(3)), "a tuple"),
    ],
    ids=["vector", "matrix", "complex", "integer", "number", "tuple"],
)
def test_a_loss_that_is_not_one_real_number_is_refused(loss: object, found: str) -> None:
    error = refused(TinyJob(), loss, LossNotScalar)
    remedy = ".mean()" if isinstance(loss, Tensor) else "the tensor alone, such as output.loss"
    assert says(error, WHERE, "expected a loss of one floating-point element", found, remedy)


def test_a_loss_of_one_element_may_have_dimensions() -> None:
    job = TinyJob()
    output: Tensor = job.model(torch.ones(1, 4))
    assert output.shape == (1, 1)
    assert job.parallel.backward(output) is None


def test_a_loss_without_a_graph_is_refused() -> None:
    job = TinyJob()
    error = refused(job, job.loss().detach(), UsageError)
    assert says(error, WHERE, "no parameter that requires a gradient", "torch.no_grad()")


@pytest.mark.parametrize("weight", [float("nan"), -1.0, float("inf"), 1e-46, 1e31])
def test_a_weight_that_is_negative_or_that_float32_cannot_hold_is_refused(weight: float) -> None:
    job = TinyJob()
    error = refused(job, job.loss(), ConfigError, weight=weight)
    assert says(error, WHERE, f"weight {weight}", "expected 0, or a number from 1e-30 to 1e30")


@pytest.mark.parametrize("strategy", BOTH_KINDS)
def test_a_step_without_backward_is_refused(strategy: str) -> None:
    job = TinyJob(strategy)
    job.until_update()
    job.loss()
    with pytest.raises(StepWithoutBackward) as caught:
        job.parallel.count_micro_batch()
    assert says(caught.value, WHERE, "no gradient has arrived", "run the backward pass", "weight=0")


def test_a_loss_of_other_parameters_is_a_step_without_backward() -> None:
    job = TinyJob()
    assert says(
        refused(job, nn.Linear(4, 1)(torch.ones(4)), StepWithoutBackward), WHERE, "no gradient has arrived"
    )


def test_a_backward_pass_that_fails_ends_the_job_since_half_a_gradient_has_arrived() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            raise MemoryError("no memory for the second half")

    job = TinyJob(model=nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)))
    first, second = job.model
    with pytest.raises(MemoryError):
        job.parallel.backward(second(Fails.apply(first(torch.ones(1, 4)))).sum())
    with pytest.raises(Finished) as caught:
        job.micro_batch()
    assert says(caught.value, "MemoryError: no memory for the second half")
