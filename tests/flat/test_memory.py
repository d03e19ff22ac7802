"""Parameters of every shape and place in memory train right, or are refused with one line."""

import random
import warnings

import pytest
import torch
from torch import Tensor, nn

from stretto import DataParallel, ZeRO1
from stretto.errors import UnsupportedModel
from stretto.flat.memory import check_memory
from tests.bits import unequal


def model_of(*tensors: Tensor) -> nn.Module:
    return nn.ParameterList(nn.Parameter(tensor) for tensor in tensors)


def train(model: nn.Module, updates: int = 2) -> None:
    """Train alone, with a loss that depends on the values."""
    with DataParallel(model, torch.optim.AdamW(model.parameters(), lr=0.1), ZeRO1()) as job:
        while job.steps < updates:
            job.backward(sum((p**2).sum() for p in model.parameters()))


def train_plainly(model: nn.Module, updates: int = 2) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(updates):
        optimizer.zero_grad()
        sum((p**2).sum() for p in model.parameters()).backward()
        optimizer.step()


def storage() -> Tensor:
    return torch.arange(240.0) / 100 + 1


# Each makes tensors that lie apart, whatever their strides.
APART = {
    "transposed": lambda: [storage().view(12, 20).t()],
    "channels last": lambda: [storage().view(2, 10, 3, 4).to(memory_format=torch.channels_last)],
    "every other row": lambda: [storage().view(12, 20)[::2]],
    "blocks of one storage": lambda: [storage()[:100], storage()[100:].view(7, 20)],
    "neighbours in one storage": lambda: list(storage().split([100, 140])),
    "columns of one matrix": lambda: list(storage().view(12, 20).split([13, 7], dim=1)),
    "interleaved": lambda: [one[start::2] for one in [storage()] for start in (0, 1)],
    "no elements": lambda: [storage()[:0], storage().view(12, 20), torch.zeros(3, 0)],
    "a number": lambda: [torch.tensor(1.5), storage()],
}


@pytest.mark.parametrize("name", APART)
def test_parameters_that_lie_apart_train_as_in_a_plain_loop(name: str) -> None:
    ours, plain = model_of(*APART[name]()), model_of(*APART[name]())
    with warnings.catch_warnings():
        # Gradients are contiguous where parameters are not, and PyTorch says once that this may be slower.
        warnings.filterwarnings("ignore", "grad and param do not obey")
        train(ours)
    train_plainly(plain)
    assert unequal(ours.parameters(), plain.parameters()) == []


def test_two_parameters_over_the_same_elements_are_refused() -> None:
    one = storage()
    for other in (one, one.view(12, 20), one[100:], one.view(12, 20).t(), one[::3]):
        with pytest.raises(UnsupportedModel, match="'0' and '1' share memory and are not one parameter"):
            train(model_of(one, other))


def test_tied_parameter_is_not_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    train(model)


def test_buffer_over_the_elements_of_a_parameter_is_refused() -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("first_row", model.weight.detach()[0])
    with pytest.raises(UnsupportedModel, match="'first_row' and 'weight' share memory"):
        train(model)


def test_buffers_and_frozen_parameters_may_share_memory_with_each_other() -> None:
    model = nn.Linear(3, 3)
    one = storage()
    model.register_buffer("one", one)
    model.register_buffer("other", one[5:])
    model.frozen = nn.Parameter(one, requires_grad=False)
    train(model)


@pytest.mark.parametrize("shape", [(4, 5), (1, 5)])
def test_expanded_tensor_is_refused_where_elements_share_memory(shape: tuple[int, int]) -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("mask", torch.ones(5).expand(shape))
    for broken in (model, model_of(torch.ones(5).expand(shape))):
        if shape[0] == 1:
            train(broken)
        else:
            with pytest.raises(UnsupportedModel, match=r"elements of '(mask|0)' .* share memory.*clone\(\)"):
                train(broken)


def test_random_views_are_refused_exactly_if_elements_coincide() -> None:
    refused = 0
    for seed in range(300):
        draw = random.Random(seed)
        base = torch.zeros(60)
        views = []
        for _ in range(draw.randint(1, 3)):
            shape = [draw.randint(0, 3) for _ in range(draw.randint(0, 3))]
            strides = [draw.choice([0, 1, 2, 3, 6, 9]) for _ in shape]
            views.append(base.as_strided(shape, strides, draw.choice([0, 5, 20, 30])))
        places = [
            offset for view in views for offset in torch.arange(60).as_strided(
                view.shape, view.stride(), view.storage_offset()
            ).flatten().tolist()
        ]  # fmt: skip
        named = [(str(index), nn.Parameter(view)) for index, view in enumerate(views)]
        if len(set(places)) == len(places):
            check_memory(named)
        else:
            refused += 1
            with pytest.raises(UnsupportedModel, match="share memory"):
                check_memory(named)
    assert 50 < refused < 250
