"""Guards that a test can see at work, and a job to give them to."""

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

import stretto as st
from stretto.guards.contract import Fingerprint, GuardScript, Report, Share
from stretto.records import Update

STRATEGIES: dict[str, st.Strategy] = {
    "ddp": st.DDP(),
    "zero1": st.ZeRO1(),
    "dpu": st.DPU(),
    "wp": st.WeightPrediction(),
    "acco": st.ACCO(),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Telltale(st.Guard):
    """Reports what it was answered, at every moment it is asked."""

    name = "telltale"
    overlaps = False
    needs_replicas = False

    threshold: int = 0
    """Means nothing; ranks can differ in it."""

    def after_update(self) -> GuardScript:
        digests = yield Fingerprint()
        records = yield Share(len(digests).to_bytes(2))
        yield Report(guard=self.name, site="after", part=str(len(records)), ranks=(0,), action="none")

    def before_step(self) -> GuardScript:
        yield Report(guard=self.name, site="before", part="", ranks=(), action="none")


class Network(nn.Module):
    """Two layers, a frozen parameter, and a buffer that nobody writes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(6, width)
        self.leave = nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("shift", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(x))) * self.scale + self.get_buffer("shift")


class Job:
    """A small job on this rank, with micro-batches of its own."""

    def __init__(
        self,
        strategy: st.Strategy,
        rank: int,
        *,
        width: int = 19,
        replayable: bool = True,
        frozen: Collection[str] = (),
        **choices: Any,
    ) -> None:
        torch.manual_seed(3)
        self.model = Network(width)
        for name in frozen:
            self.model.get_parameter(name).requires_grad_(False)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        choices.setdefault("options", st.Options(bucket_bytes=1024))
        self.parallel = st.DataParallel(self.model, optimizer, strategy, micro_batches=2, **choices)
        self.replayable = replayable
        """Whether micro-batches are handed over before their forward pass."""
        self._generator = torch.Generator().manual_seed(100 + rank)

    def micro_batch(self) -> Update | None:
        """Train on one micro-batch."""
        x = torch.randn(4, 6, generator=self._generator)
        if self.replayable:
            return self.parallel.micro_batch(self._loss, x)
        return self.parallel.backward(self._loss(x))

    def run(self, micro_batches: int = 8) -> list[Update]:
        """Train and finish."""
        updates = [update for _ in range(micro_batches) if (update := self.micro_batch())]
        return updates + self.parallel.finish()

    def _loss(self, x: Tensor) -> Tensor:
        output: Tensor = self.model(x)
        return output.square().mean()

    def final(self) -> list[Tensor]:
        """Copies of the parameters."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    """Whether two sets of parameters are equal to the bit."""
    return all(
        torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(left, right, strict=True)
    )
