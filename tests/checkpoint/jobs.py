"""Small jobs that are saved and continued."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from stretto import ACCO, DDP, DPU, DataParallel, Options, WeightPrediction, ZeRO1, checkpoint
from stretto.optimizer import piece_states
from stretto.strategies import Strategy

STRATEGIES: tuple[Strategy, ...] = (DDP(), ZeRO1(), DPU(), WeightPrediction(), ACCO())
NAMES = [strategy.name for strategy in STRATEGIES]
UPDATES = 5
"""Where every job stops."""
SAVED_AT = 2
"""Behind which update it is saved: momentum and the step counts matter by then."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One job; the same on all ranks."""

    strategy: Strategy = dataclasses.field(default_factory=ACCO)
    optimizer: str = "adamw"
    micro_batches: int = 2
    """Of each rank."""
    dtype: torch.dtype = torch.float32
    local: bool = True
    """Whether the model has state that ranks do not share: dropout, and running statistics under way."""
    optional: bool = False
    """Whether a branch is used in the first update only."""
    options: Options = dataclasses.field(
        default_factory=lambda: Options(bucket_bytes=4096, clip_norm=0.5, allow_unused=True)
    )


class Network(nn.Module):
    """Odd shapes with padding between them, three dimensions, a tied weight, buffers, randomness, a branch."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 33)
        self.normalise = nn.BatchNorm1d(33) if case.local else nn.Identity()
        self.drop = nn.Dropout(0.25 if case.local else 0.0)
        self.mix = nn.Parameter(torch.randn(3, 11, 5) / 8)
        self.branch = nn.Linear(33, 33)
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.back = nn.Linear(33, 7)
        self.again = nn.Linear(33, 7, bias=False)
        self.again.weight = self.back.weight

    def forward(self, inputs: Tensor, use_branch: bool) -> Tensor:
        hidden = self.drop(self.normalise(self.enter(inputs)).tanh())
        hidden = hidden + torch.einsum("nik,ikj->nij", hidden.view(-1, 3, 11), self.mix).sum((1, 2))[:, None]
        if use_branch:
            hidden = hidden + self.branch(hidden)
        hidden = hidden + self.frozen(hidden)
        return self.back(hidden) + self.again(hidden.sigmoid())


class Batches:
    """Micro-batches in one global order without end, dealt to the ranks in turn, with a position that can be saved."""

    def __init__(self, case: Case, rank: int, world_size: int) -> None:
        self.case, self.rank, self.world_size = case, rank, world_size
        self.position = rank

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        while True:
            generator = torch.Generator().manual_seed(self.position)
            inputs = torch.randn(6, 7, generator=generator).to(self.case.dtype)
            targets = torch.randn(6, 7, generator=generator).to(self.case.dtype)
            used = not self.case.optional or self.position < self.case.micro_batches * self.world_size
            self.position += self.world_size
            yield inputs, targets, used

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Job:
    """One rank's share of a job."""

    def __init__(
        self, case: Case, rank: int = 0, world_size: int = 1, group: dist.ProcessGroup | None = None
    ) -> None:
        torch.manual_seed(0)
        self.case = case
        self.model = Network(case).to(case.dtype)
        self.optimizer = optimizer_of(case, self.model)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.batches = Batches(case, rank, world_size)
        self.parallel = DataParallel(
            self.model,
            self.optimizer,
            case.strategy,
            micro_batches=case.micro_batches,
            options=case.options,
            group=group,
        )
        torch.manual_seed(100 + rank)
        self.losses: list[float] = []

    def train(self, until: int = UPDATES) -> "Job":
        """Train up to an update, and stop right behind it."""
        if self.parallel.steps < until:
            for inputs, targets, used in self.parallel.feed(self.batches):
                loss = (self.model(inputs, used) - targets).float().square().mean()
                if update := self.parallel.backward(loss):
                    self.losses.append(update.loss)
                    self.scheduler.step()
                    if update.step == until:
                        break
        return self

    def save(self, directory: Path, **options: Any) -> Path:
        """Save everything."""
        return checkpoint.save(
            self.parallel, directory, loader=self.batches, extra=self.scheduler.state_dict(), **options
        )

    def load(self, directory: Path) -> checkpoint.Restored:
        """Load everything."""
        restored = checkpoint.load(self.parallel, directory, loader=self.batches)
        self.scheduler.load_state_dict(restored.extra)
        return restored

    def holds(self) -> dict[str, Tensor]:
        """Return copies of all that must come out alike: what is shown, buffers, masters, optimizer, losses."""
        owner = self.parallel.job.sharded
        found = {f"shown {name}": value for name, value in self.model.named_parameters()}
        found |= {f"buffer {name}": value for name, value in self.model.named_buffers()}
        found |= {f"agreed {i}": value for i, value in enumerate(self.parallel.job.model.statistics.agreed)}
        found |= {f"master {i}": master for i, master in enumerate(owner.masters)}
        for piece, state in piece_states(owner):
            found |= {
                f"{key} of {piece.slot.name} from {piece.offset}": value for key, value in state.items()
            }
        found = {name: value.detach().clone() for name, value in found.items()}
        return {**found, "losses": torch.tensor(self.losses, dtype=torch.float64)}


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Return the case's optimizer, with two groups."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if case.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, dampening=0.5, foreach=True)
    return torch.optim.AdamW(groups, lr=0.01, foreach=True)


def differing(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """Return the names under which two jobs differ in any bit."""
    return sorted(
        name
        for name in left.keys() | right.keys()
        if name not in left or name not in right or not torch.equal(left[name], right[name])
    )
