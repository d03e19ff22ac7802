"""Small jobs whose strategies take turns, on the ranks of a virtual cluster."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import stretto as st
from stretto import checkpoint
from stretto_lab.virtual import VirtualCluster

TIMES = ("seconds", "lane_seconds", "exposed_seconds", "wait_seconds", "sent_bytes")
"""Fields of an update that may differ between equal runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One job; the same on all ranks."""

    strategy: Any
    ranks: int = 2
    lengths: tuple[int, ...] = (20,)
    """Batches of each rank, in turn."""
    until: Literal["any", "all"] = "any"
    micro_batches: Any = 2
    guards: Any = ()
    options: st.Options = dataclasses.field(default_factory=lambda: st.Options(bucket_bytes=256))
    updates: int | None = None


class Batches:
    """Batches of one rank, with a position that can be saved."""

    def __init__(self, rank: int, length: int) -> None:
        self.rank, self.length, self.position = rank, length, 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < self.length:
            self.position += 1
            seed = 1000 * self.rank + self.position
            yield torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch[:, :2]).square().mean()


class Job:
    """One rank's job."""

    def __init__(self, case: Case, rank: int = 0, group: Any = None) -> None:
        torch.manual_seed(0)
        self.case, self.rank = case, rank
        self.model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.1), nn.Linear(9, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=True)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=100)
        self.parallel = st.DataParallel(
            self.model,
            self.optimizer,
            case.strategy,
            micro_batches=case.micro_batches,
            scheduler=self.scheduler,
            guards=case.guards,
            group=group,
            options=case.options,
        )
        self.batches = Batches(rank, case.lengths[rank % len(case.lengths)])
        torch.manual_seed(100 + rank)
        self.updates: list[st.Update] = []
        self.names: list[str] = []
        """Of the strategy that was at work when each update was told."""
        self.folder: Path | None = None
        """Where a checkpoint of every update goes."""

    def heard(self, update: st.Update) -> None:
        self.updates.append(update)
        self.names.append(self.parallel.strategy.name)
        if self.folder is not None:
            checkpoint.save(self.parallel, self.folder, loader=self.batches, keep=100)

    def train(self) -> "Job":
        case = self.case
        with self.parallel:
            for batch in self.parallel.feed(self.batches, case.updates, case.until, on_update=self.heard):
                self.parallel.micro_batch(lambda one: loss_of(self.model, one), batch)
            self.updates += self.parallel.finish()
        return self

    def holds(self) -> dict[str, Tensor]:
        """Return the model, and this rank's masters with their state."""
        owner = self.parallel.job.sharded
        states = [owner.optimizer.state.get(segment.master, {}) for segment in owner.segments]
        found = {**self.model.state_dict(), **{f"master {i}": one for i, one in enumerate(owner.masters)}}
        found |= {f"{key} of {i}": value for i, state in enumerate(states) for key, value in state.items()}
        return {name: value.detach().clone() for name, value in found.items()}

    def told(self) -> list[dict[str, Any]]:
        """Return the updates without what may differ between equal runs."""
        return [{k: v for k, v in one.as_json().items() if k not in TIMES} for one in self.updates]


def trained(case: Case) -> list[Job]:
    """Train the case; return the jobs of all ranks."""
    return list(VirtualCluster(case.ranks).run(lambda rank, group: Job(case, rank, group).train()).values)


def differing(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """Return the names under which two jobs hold different bits."""
    return sorted(
        k
        for k in left.keys() | right.keys()
        if k not in left or k not in right or not torch.equal(left[k], right[k])
    )
