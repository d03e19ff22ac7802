"""Owners that step slices equal a stock optimizer that steps parameters."""

import pytest
import torch

from stretto.optimizer import read_hyperparameters
from tests.optimizer.owners import (
    OPTIMIZERS,
    WEIGHT,
    gradients_for,
    groups_of,
    model_of,
    new_flats,
    owners_of,
    reduced,
    values_by_name,
)

CLIP = 0.75
# By update: the parameters without gradient. Whole groups, ends and middles of segments.
UNUSED = {
    "none": [set(), set(), set(), set()],
    "first": [{"0.weight"}, set(), set(), {"0.weight"}],
    "later": [set(), {"1.weight", "1.bias"}, {"1.weight"}, set()],
    "all but one": [set(), {"0.weight", "0.bias", "1.weight", "1.bias", "2.weight"}, set(), set()],
}


@pytest.mark.parametrize("unused", UNUSED)
@pytest.mark.parametrize("num_owners", [1, 2, 3])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "fused" not in name])
def test_owners_step_as_a_stock_optimizer_does(name: str, num_owners: int, unused: str) -> None:
    model = model_of()
    stock = OPTIMIZERS[name](groups_of(list(model.parameters())))
    layout, owners = owners_of(model, OPTIMIZERS[name], num_owners)
    for seed, skipped in enumerate(UNUSED[unused]):
        gradients = gradients_for(layout, seed, skipped)
        for group in stock.param_groups:
            group["lr"] *= 0.8
        for parameter_name, parameter in model.named_parameters():
            gradient = gradients[parameter_name]
            parameter.grad = None if gradient is None else gradient.div(WEIGHT).mul(CLIP)
        stock.step()
        flats = new_flats(layout)
        for owner in owners:
            owner.step(reduced(owner, gradients), read_hyperparameters(stock), CLIP)
            owner.publish(flats)
        published = values_by_name(layout, flats)
        for parameter_name, parameter in model.named_parameters():
            assert torch.equal(published[parameter_name], parameter), f"update {seed}: {parameter_name}"
