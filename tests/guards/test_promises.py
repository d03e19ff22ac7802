"""What guards promise holds in every loop: damage is named, and what it has spoilt is computed again or left out.

Drawn are the strategy, the loop, what is damaged, how, and when: in a pass, while the optimizer steps, or while a guard
runs the round again. The model has batch normalization, dropout, a frozen layer and buffers that nobody writes.
"""

import dataclasses
import random

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import stretto as st
from stretto_lab.virtual import VirtualCluster
from tests.draws import seeds
from tests.guards.watched import Seen, apart, seen_of

RANKS, PASSES, QUOTA = 2, 16, 4
ROUND = {"acco": 2}
STRATEGIES: dict[str, st.Strategy] = {
    "ddp": st.DDP(),
    "zero1": st.ZeRO1(),
    "acco": st.ACCO(),
    "dpu": st.DPU(),
    "wp": st.WeightPrediction(),
    "average": st.Average(every=2),
    "diloco": st.DiLoCo(interval=2),
}
SITES = {
    "parameter": ("enter.weight", "norm.bias", "leave.weight"),
    "frozen": ("frozen.weight", "frozen.bias"),
    "buffer": ("table",),
    "whole numbers": ("places",),
}


class Network(nn.Module):
    """Everything that guards watch while gradients are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(5, 17), nn.BatchNorm1d(17)
        self.frozen = nn.Linear(17, 17).requires_grad_(False)
        self.leave = nn.Linear(17, 5)
        self.register_buffer("table", torch.randn(17))
        self.register_buffer("places", torch.randperm(17))

    def forward(self, batch: Tensor) -> Tensor:
        hidden = nn.functional.dropout(torch.relu(self.norm(self.enter(batch))), 0.2)
        mixed = torch.tanh(self.frozen(hidden) + self.get_buffer("table"))[:, self.get_buffer("places") % 17]
        return self.leave(mixed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One struck job."""

    strategy: str
    loop: str
    struck: int
    site: str
    name: str
    bit: int
    moment: str
    at: int
    """Pass or step."""

    @classmethod
    def drawn(cls, seed: int) -> "Case":
        rng = random.Random(seed)
        moment = rng.choice(["pass", "pass", "step", "replay"])
        site = rng.choice(["frozen", "whole numbers"] if moment == "step" else list(SITES))
        return cls(
            strategy=rng.choice(["ddp", "zero1"] if moment == "step" else list(STRATEGIES)),
            loop="micro_batch" if moment == "replay" else rng.choice(["backward", "backward", "micro_batch"]),
            struck=rng.randrange(RANKS),
            site=site,
            name=rng.choice(SITES[site]),
            bit=rng.choice([0, 22, 27, 30]) if site != "whole numbers" else rng.randrange(4),
            moment=moment,
            at=rng.randrange(1, PASSES // QUOTA - 1) if moment == "step" else rng.randrange(4, PASSES - 4),
        )

    @property
    def is_left_out(self) -> bool:
        """Whether the struck rank cannot compute the round again."""
        return self.moment == "pass" and self.loop == "backward"

    @property
    def round(self) -> range:
        """The passes of the struck round."""
        length = ROUND.get(self.strategy, QUOTA)
        return range(self.at // length * length, (self.at // length + 1) * length)


def flip(model: nn.Module, name: str, bit: int) -> None:
    """Damage one element as faulty memory does: no version counter hears of it."""
    tensor = dict([*model.named_parameters(), *model.named_buffers()])[name].data.view(-1)
    (tensor.view(torch.int32) if tensor.is_floating_point() else tensor)[3] ^= 1 << bit


def trained(case: Case, *, strikes: bool, leaves_out: bool = False) -> tuple[Seen, ...]:
    """Train on all ranks; with `leaves_out` the struck round counts nothing on its rank, and writes no statistics."""

    def program(rank: int, group: dist.ProcessGroup) -> Seen:
        torch.manual_seed(5)
        model, is_struck = Network(), rank == case.struck
        parallel = st.DataParallel(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.02),
            STRATEGIES[case.strategy],
            group=group,
            micro_batches=QUOTA,
            guards="standard",
        )
        torch.manual_seed(50 + rank)
        data = torch.Generator().manual_seed(500 + rank)
        steps, seen, struck_again = 0, set[int](), list[int]()
        step = parallel.job.sharded.optimizer.step

        def stepped() -> None:
            nonlocal steps
            step()
            steps += 1
            if strikes and is_struck and case.moment == "step" and steps == case.at:
                flip(model, case.name, case.bit)

        parallel.job.sharded.optimizer.step = stepped

        def loss_of(index: int) -> Tensor:
            is_again = index in seen
            seen.add(index)
            if strikes and is_struck and case.moment == "replay" and is_again and not struck_again:
                struck_again.append(index)
                flip(model, case.name, case.bit)
            return model(batches[index]).square().mean()

        batches = [torch.randn(4, 5, generator=data) for _ in range(PASSES)]
        updates = []
        for index in range(PASSES):
            is_out = leaves_out and is_struck and index in case.round
            if strikes and is_struck and case.moment in ("pass", "replay") and index == case.at:
                first = case.name if case.moment == "pass" else "leave.bias"
                flip(model, first, case.bit if case.moment == "pass" else 22)
            model.norm.momentum = 0.0 if is_out else 0.1
            if case.loop == "micro_batch":
                update = parallel.micro_batch(loss_of, index)
            else:
                update = parallel.backward(loss_of(index), 0.0 if is_out else 1.0)
            updates += [update] if update else []
        updates += parallel.finish()
        late = list(parallel.late_incidents)
        found = seen_of(model, updates)
        return dataclasses.replace(found, incidents=[*found.incidents, *late])

    return VirtualCluster(RANKS).run(program).values


@pytest.mark.long(keep=8)
@pytest.mark.parametrize("seed", seeds(120))
def test_damage_is_named_and_what_it_spoilt_is_computed_again_or_left_out(seed: int) -> None:
    case = Case.drawn(seed)
    expected = trained(case, strikes=False, leaves_out=case.is_left_out)
    found = trained(case, strikes=True)
    assert apart(found, expected) == [], case
    for one, other in zip(expected, found, strict=True):
        assert one.incidents == [], case
        assert {incident.ranks for incident in other.incidents} == {(case.struck,)}, case
        assert case.name in {incident.part for incident in other.incidents}, case
