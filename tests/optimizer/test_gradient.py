"""Reduced gradients are added in place, divided once, and not used up twice."""

import random
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from stretto.errors import ConfigError
from stretto.flat import Block, Slices
from stretto.optimizer import ReducedGradient, squared_norm


def gradient(*values: float, weight: float = 1.0, used: bytes = b"\x01\x00") -> ReducedGradient:
    sums = torch.tensor(values)
    return ReducedGradient(Slices([sums], [sums]), weight, 0.0, used)


def slices(tensors: list[torch.Tensor]) -> Slices:
    return Slices([torch.cat(tensors)], tensors)


def test_sum_adds_values_weights_and_use_without_a_third_buffer_and_its_parts_are_readable_until_it_is_merged() -> (
    None
):
    first, second = gradient(1.0, 2.0, weight=2.0), gradient(4.0, 8.0, weight=3.0, used=b"\x00\x01")
    total = first + second
    assert first.mean_of(Block(0, (0,), 0, 0, 0, 1, 2), 0.5).tolist() == [0.25, 0.5]
    total.merge()
    assert total.sums[0].tolist() == [5.0, 10.0]
    assert total.weight == 5.0
    assert total.used == b"\x01\x01"
    assert total.sums[0].data_ptr() == second.sums[0].data_ptr()


def test_mean_is_taken_once_and_in_place() -> None:
    reduced = gradient(6.0, weight=3.0)
    whole = Block(0, (0,), 0, 0, 0, 1, 1)
    copy = reduced.mean_of(whole, 0.5)
    assert reduced.sums[0].tolist() == [6.0]
    for _ in range(2):
        reduced.become_mean(0.5)
    assert torch.equal(reduced.sums[0], copy)
    assert reduced.mean_of(whole, 0.5).data_ptr() == reduced.sums[0].data_ptr()


def test_gradient_that_went_into_a_sum_is_refused() -> None:
    first = gradient(1.0)
    total = first + gradient(2.0)
    total.merge()
    with pytest.raises(ConfigError, match="used a gradient again that it had added"):
        first.merge()
    with pytest.raises(ConfigError, match="used a gradient again that it had added"):
        (gradient(1.0) + first).merge()


def test_gradient_that_was_stepped_with_is_not_added() -> None:
    stepped = gradient(1.0)
    stepped.become_mean(1.0)
    with pytest.raises(ConfigError, match="add first, then step"):
        (gradient(1.0) + stepped).merge()


def test_the_norm_counts_every_element_once_whatever_the_sizes_and_magnitudes() -> None:
    draws = random.Random(0)
    for case in range(200):
        generator = torch.Generator().manual_seed(case)
        sizes = [
            max(0, draws.choice((0, 2**16, 2**17)) + draws.randint(-3, 3)) for _ in range(draws.randint(1, 3))
        ]
        scale = 10.0 ** draws.uniform(-38, 36)
        dtype = draws.choice((torch.float32, torch.float64))
        sums = [(torch.randn(size, generator=generator) * scale).to(dtype) for size in sizes]
        expected = sum(float(total.double().square().sum()) for total in sums)
        # Sums of n squares in another order differ by at most n rounding errors.
        bound = sum(sizes) * 2.0**-52 * expected
        assert abs(squared_norm(slices(sums)) - expected) <= bound, case


class Norms(TorchFunctionMode):
    """Notes how many elements each norm reads."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.linalg.vector_norm:
            self.numels.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_a_norm_on_a_device_widens_32_mebibytes_at_a_time() -> None:
    # A device copies what it widens: a model in one flat would need eight bytes more for every parameter.
    flat = torch.empty(3 * 2**22 + 5, device="meta")
    with Norms() as norms:
        squared_norm(Slices([flat], [flat]))
    assert norms.numels == [2**22, 2**22, 2**22, 5]
