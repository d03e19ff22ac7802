"""A rank's share of the kit's job, which is saved and continued at any update."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from stretto import ACCO, DDP, DPU, DataParallel, WeightPrediction, ZeRO1, checkpoint
from stretto.optimizer import piece_states
from stretto.strategies import Strategy
from stretto_lab import testing
from stretto_lab.testing.jobs import Batches

STRATEGIES: tuple[Strategy, ...] = (DDP(), ZeRO1(), DPU(), WeightPrediction(), ACCO())
NAMES = [strategy.name for strategy in STRATEGIES]
UPDATES = 5
"""Where every job stops."""
SAVED_AT = 2
"""Behind which update it is saved: momentum and the step counts matter by then."""
Case = functools.partial(testing.Job, strategy=ACCO(), updates=1000)


class Job:
    """One rank's share of a job; `evaluates` leaves out what ranks do not share, dropout and running statistics."""

    def __init__(
        self,
        case: testing.Job,
        rank: int = 0,
        group: dist.ProcessGroup | None = None,
        *,
        evaluates: bool = False,
    ) -> None:
        self.case = case
        self.model, self.optimizer, self.scheduler = case.parts(rank)
        self.model.train(not evaluates)
        self.batches = Batches(case, rank)
        self.parallel = DataParallel(
            self.model,
            self.optimizer,
            case.strategy,
            micro_batches=case.micro_batches,
            options=case.options,
            group=group,
        )
        self.losses: list[float] = []

    def train(self, until: int = UPDATES) -> "Job":
        """Train up to an update, and stop right behind it."""
        if self.parallel.steps < until:
            for batch in self.parallel.feed(self.batches):
                if update := self.parallel.backward(self.case.loss(self.model, batch)):
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
        found |= {f"agreed {i}": value for i, value in enumerate(self.parallel.job.model.buffer_sync.agreed)}
        found |= {f"master {i}": master for i, master in enumerate(owner.masters)}
        for piece, state in piece_states(owner):
            found |= {
                f"{key} of {piece.slot.name} from {piece.offset}": value for key, value in state.items()
            }
        found = {name: value.detach().clone() for name, value in found.items()}
        return {**found, "losses": torch.tensor(self.losses, dtype=torch.float64)}
