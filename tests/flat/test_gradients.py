"""Gradients accumulate into views of flat storage."""

import pytest
import torch
from torch import nn

from stretto.errors import GradientsTouched
from stretto.flat import GradientBuffer, plan_layout


def attached(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, GradientBuffer]:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layout, parameters = plan_layout(model, optimizer, world_size=2, bucket_bytes=512, widen=True)
    for parameter in parameters:
        parameter.grad_dtype = torch.float32
    buffer = GradientBuffer(layout)
    buffer.attach(parameters)
    return model, buffer


def parameters_of(model: nn.Module, buffer: GradientBuffer) -> list[nn.Parameter]:
    return [model.get_parameter(slot.name) for slot in buffer.layout.slots]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_passes_add_into_flat_storage(dtype: torch.dtype) -> None:
    model, buffer = attached(dtype)
    inputs = [torch.randn(4, 3, dtype=dtype) for _ in range(3)]
    for x in inputs:
        model(x).square().mean().backward()
    expected = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for x in inputs:
        gradients = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        for name, gradient in zip(expected, gradients, strict=True):
            expected[name] += gradient.float()
    for slot in buffer.layout.slots:
        flat = buffer.flats[slot.set_index][slot.start : slot.stop].view(slot.shape)
        assert flat.dtype is torch.float32
        assert torch.equal(flat, expected[slot.name])


def test_padding_stays_zero() -> None:
    model, buffer = attached()
    model(torch.randn(4, 3)).sum().backward()
    held = torch.zeros(buffer.flats[0].numel(), dtype=torch.bool)
    for slot in buffer.layout.slots:
        held[slot.start : slot.stop] = True
    assert (buffer.flats[0][~held] == 0).all()
    assert (buffer.flats[0][held] != 0).any()


def test_attaching_again_starts_from_zero() -> None:
    model, buffer = attached()
    model(torch.randn(4, 3)).sum().backward()
    buffer.zero()
    buffer.attach(parameters_of(model, buffer))
    assert all((flat == 0).all() for flat in buffer.flats)


def test_replaced_gradient_is_noticed_by_name() -> None:
    model, buffer = attached()
    model.zero_grad()
    with pytest.raises(GradientsTouched, match=r"rank 0: the gradient of '1.bias' was replaced"):
        buffer.check_attached(parameters_of(model, buffer), "rank 0")


def test_write_between_backward_passes_is_noticed() -> None:
    model, buffer = attached()
    model(torch.randn(4, 3)).sum().backward()
    buffer.remember()
    buffer.check_unwritten("rank 0")
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(GradientsTouched, match="rank 0: the accumulated gradients were changed"):
        buffer.check_unwritten("rank 0")
