"""Gradients accumulate into views of flat storage."""

import pytest
import torch
from torch import nn

from stretto.engine.accumulation import Accumulation, GradientBuffer
from stretto.errors import GradientsTouched
from stretto.flat import plan_layout


def attached(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Accumulation]:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layout, parameters = plan_layout(model, optimizer, world_size=2, bucket_bytes=512, widen=True)
    for parameter in parameters:
        parameter.grad_dtype = torch.float32
    accumulation = Accumulation(parameters, GradientBuffer(layout))
    accumulation.attach()
    return model, accumulation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_passes_add_into_flat_storage(dtype: torch.dtype) -> None:
    model, accumulation = attached(dtype)
    buffer = accumulation.buffer
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
    model, accumulation = attached()
    model(torch.randn(4, 3)).sum().backward()
    buffer = accumulation.buffer
    held = torch.zeros(buffer.flats[0].numel(), dtype=torch.bool)
    for slot in buffer.layout.slots:
        held[slot.start : slot.stop] = True
    assert (buffer.flats[0][~held] == 0).all()
    assert (buffer.flats[0][held] != 0).any()


def test_attaching_again_starts_from_zero() -> None:
    model, accumulation = attached()
    model(torch.randn(4, 3)).sum().backward()
    accumulation.attach()
    assert [flat for flat in accumulation.buffer.flats if not (flat == 0).all()] == []


def test_replaced_gradient_is_noticed_by_name() -> None:
    model, accumulation = attached()
    model.zero_grad()
    with pytest.raises(GradientsTouched, match=r"rank 0: the gradient of '1.bias' was replaced"):
        accumulation.check_untouched("rank 0")


def test_write_between_backward_passes_is_noticed() -> None:
    model, accumulation = attached()
    model(torch.randn(4, 3)).sum().backward()
    accumulation.remember()
    accumulation.check_untouched("rank 0")
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(GradientsTouched, match="rank 0: the accumulated gradients were changed"):
        accumulation.check_untouched("rank 0")
