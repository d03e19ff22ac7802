"""Stock methods are hit like our own: on the mean gradient, whatever the weights, before they clip and step."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.errors import ConfigError
from stretto.noise import Noise
from stretto_lab.peers import make_peer
from stretto_lab.recipes import DigitsResNet
from stretto_lab.train.configuration import RunConfig
from stretto_lab.train.handle import check_run
from tests.noise.jobs import NEEDED, Model, flat, gradient
from tests.processes import run_ranks

VARIANCE = 0.04
UPDATES = 5


def train(rank: int, name: str, noise: Noise | None) -> list[Tensor]:
    """What a rank's parameters were at the start and after every update, with a learning rate of 1."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    peer = make_peer(name, Passing(model), optimizer, 2, noise=noise)
    shown = [flat(model.parameters())]
    for number in peer.feed(range(2 * UPDATES)):
        values = gradient(rank, number)
        if peer.backward(peer.model(values), (1.0, 9.0, 0.5)[(rank + number) % 3]) is not None:
            shown.append(flat(model.parameters()))
    peer.finish()
    return shown


class Passing(torch.nn.Module):
    """A model whose loss is linear in its parameters."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, values: list[Tensor]) -> Any:
        return sum(((p * v).sum() for p, v in zip(self.model.parts, values, strict=True)), torch.zeros(()))


@pytest.mark.parametrize("name", ["torch-ddp", "torch-ddp-zero"])
def test_a_stock_methods_mean_gradient_has_the_variance_that_was_asked_for(name: str) -> None:
    clean, noisy = (run_ranks(2, train, name, noise) for noise in (None, Noise(VARIANCE)))
    found = []
    for one, other in zip(noisy, clean, strict=True):
        assert [len(shown) for shown in (one, other)] == [UPDATES + 1] * 2
        steps = (torch.stack(shown).double().diff(dim=0) for shown in (other, one))
        found.append(torch.sub(*steps).flatten())
    draws = (
        torch.cat(found) if name == "torch-ddp" else found[0]
    )  # each of zero's ranks steps a part for both
    assert len(draws) >= NEEDED
    assert float(draws.var()) == pytest.approx(VARIANCE, rel=0.03)
    if name == "torch-ddp":
        assert abs(float(torch.corrcoef(torch.stack(found))[0, 1])) < 6 / math.sqrt(len(found[0]))
    else:
        assert torch.equal(found[0], found[1])


def test_only_the_rank_that_is_named_is_hit() -> None:
    clean, noisy = (run_ranks(2, train, "torch-ddp", noise) for noise in (None, Noise(VARIANCE, rank=1)))
    assert all(map(torch.equal, clean[0], noisy[0]))
    assert not torch.equal(clean[1][1], noisy[1][1])


def test_averages_of_stock_methods_cannot_be_hit() -> None:
    run = RunConfig(task=DigitsResNet(), strategy="torch-local-sgd", noise=Noise(0.0, averages=1e-4))
    with pytest.raises(ConfigError, match="torch-local-sgd: noise hits averages of our own strategies only"):
        check_run(run, 2)
