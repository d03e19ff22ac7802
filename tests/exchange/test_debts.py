"""What a packed wire owes is paid in full on a wire that owes nothing, whatever rounds come between."""

import dataclasses
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto as st
from stretto import checkpoint

WIRES = ("int8", "int4", "int2")
PACKED_UPDATES = 3


@dataclasses.dataclass
class Batch:
    """One micro-batch: the gradient of `a` and of `b`, whatever the parameters are, unless one is left out."""

    seed: int
    kind: str
    """One of `KINDS`."""

    def loss(self, model: nn.ModuleDict) -> Tensor:
        """The loss."""
        gradients = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(self.seed))
        names = {"only a": ["a"], "only b": ["b"]}.get(self.kind, ["a", "b"])
        total: Tensor = sum(
            model[name](gradient).sum()
            for name, gradient in zip("ab", gradients, strict=True)
            if name in names
        )
        return total * math.nan if self.kind == "not finite" else total


KINDS = ("both", "only a", "only b", "weight zero", "not finite")


def batches(draw: random.Random, kinds: Sequence[str]) -> list[Batch]:
    """A few that use both parameters, then any kinds, then some in which what is owed can be paid."""
    drawn = [draw.choice(kinds) for _ in range(2 * draw.randint(1, 6))]
    whole = ["both"] * 2 * (PACKED_UPDATES + 1)
    return [Batch(draw.randrange(2**31), kind) for kind in whole + drawn + whole]


class Job:
    """One rank's job with steps of size 1, so that parameters add up what they are given."""

    def __init__(self, strategy: Any, wire: str, micro_batches: int) -> None:
        self.model = nn.ModuleDict({name: nn.Linear(64, 1, bias=False) for name in "ab"})
        for parameter in self.model.parameters():
            nn.init.zeros_(parameter)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        options = st.Options(wire=wire, changes="fp32", nonfinite="skip", allow_unused=True)
        self.parallel = st.DataParallel(
            self.model, optimizer, strategy, micro_batches=micro_batches, options=options
        )

    def train(self, some: Sequence[Batch]) -> int:
        """Train on batches until the packed updates are made, or on all; return how many it took."""
        for taken, batch in enumerate(some, start=1):
            weight = float(batch.kind != "weight zero")
            update = self.parallel.backward(batch.loss(self.model), weight)
            if update is not None and update.step == PACKED_UPDATES:
                return taken
        return len(some)

    def moved(self) -> Tensor:
        """End the job; return how far its parameters have gone."""
        self.parallel.finish()
        return torch.cat([parameter.detach().view(-1) for parameter in self.model.parameters()])


def bound(some: Sequence[Batch]) -> float:
    """What float32 allows for: every sum is of values below 8, and every value is rounded a few times."""
    return 4 * len(some) * 8 * 2.0**-23 * len(some)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("strategy", [st.ZeRO1(), st.DPU(), st.ACCO(), st.WeightPrediction()])
def test_where_a_checkpoint_goes_on_on_a_plain_wire(strategy: st.Strategy, seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    # With two micro-batches of equal weight in every update: what is owed is a part of a sum, which is then divided.
    wire, some = draw.choice(WIRES), batches(draw, KINDS[:3])
    ends = []
    for first in (wire, "fp32"):
        saving, loading = Job(strategy, first, 2), Job(strategy, "fp32", 2)
        taken = saving.train(some)
        checkpoint.save(
            saving.parallel, tmp_path / first
        )  # it holds a round under way, where a strategy has one
        assert checkpoint.load(loading.parallel, tmp_path / first).notes == ()
        loading.train(some[taken:])
        ends.append(loading.moved())
        saving.parallel.finish()
    assert (ends[0] - ends[1]).abs().max() < bound(some)
