"""How often guards make the host wait for its device: as often for many buckets, tensors and layers as for few."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto as st
from stretto import checksums
from stretto.strategies import STRATEGIES
from tests.engine.test_synchronising import VARIANTS, check_law
from tests.wires import OF_GRADIENTS

GUARDS: dict[str, dict[str, Any]] = {
    "standard": {"guards": "standard"},
    "verified": {"verified": True},
    "rest": {"guards": (st.AtRest(),)},
    "replica": {"guards": (st.ReplicaGuard(),)},
    "audit": {"guards": (st.Audit(rate=1.0),)},
}

AVERAGING = {"average", "local", "diloco", "paft-sync", "paft-dyn"}
"""Strategies whose replicas may differ: no audits."""


@pytest.fixture(autouse=True)
def digests_as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "HOSTS", ())


class Layer(nn.Linear):
    """Trained and frozen parameters, and a buffer that nobody writes."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.scale = nn.Parameter(torch.ones(16), requires_grad=False)
        self.register_buffer("count", torch.zeros(16, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.get_buffer("count")


def drawn() -> list[tuple[str, str]]:
    """All guards together under every strategy, and each alone under some."""
    draws, equal = random.Random(5), sorted(set(STRATEGIES) - AVERAGING)
    alone = [
        (draws.choice(equal if one == "audit" else list(STRATEGIES)), one) for one in GUARDS for _ in "12"
    ]
    return sorted({*alone, *((name, "standard") for name in VARIANTS)})


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(("strategy", "guards"), drawn())
def test_guards_make_the_host_wait_as_often_for_many_tensors_as_for_few(strategy: str, guards: str) -> None:
    draws = random.Random(f"{strategy} {guards}")
    check_law(strategy, draws, layer=Layer, wire=draws.choice(OF_GRADIENTS), **GUARDS[guards])
