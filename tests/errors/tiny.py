"""A job so small that it can be built, trained and broken within milliseconds."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import stretto as st
from stretto import strategies

MICRO_BATCHES = 2
STRATEGIES: dict[str, st.Strategy] = {
    "ddp": st.DDP(),
    "zero1": st.ZeRO1(),
    "dpu": st.DPU(),
    "wp": st.WeightPrediction(),
    "acco": st.ACCO(),
}
EVERY: dict[str, st.Strategy] = {
    **{name: kind() for name, kind in strategies.STRATEGIES.items()},
    "average": st.Average(every=2),
    "local": st.LocalSGD(rate=0.5),
    "diloco": st.DiLoCo(interval=2),
}
BOTH_KINDS = ("zero1", "acco")
"""A synchronous and an overlapping strategy: where a check sits in another place for each."""


def tiny_model() -> nn.Sequential:
    """A model of four parameters with the same values every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


class TinyJob:
    """A wrapped model, its optimizer, and micro-batches to train it on: each rank's own."""

    def __init__(
        self,
        strategy: str | st.Strategy = "acco",
        *,
        model: nn.Module | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        learning_rate: float = 0.01,
        rank: int = 0,
        **settings: Any,
    ) -> None:
        self.model = tiny_model() if model is None else model
        self.optimizer = optimizer(self.model.parameters(), lr=learning_rate)
        self.parallel = st.DataParallel(
            self.model,
            self.optimizer,
            EVERY[strategy] if isinstance(strategy, str) else strategy,
            **{"micro_batches": MICRO_BATCHES, **settings},
        )
        self._generator = torch.Generator().manual_seed(1 + rank)

    def batch(self) -> Tensor:
        """The next micro-batch, `(2, 4)`."""
        return torch.randn(2, 4, generator=self._generator)

    def loss(self, batch: Tensor | None = None) -> Tensor:
        """A scalar loss of a micro-batch, or else of the next one, with its graph."""
        output: Tensor = self.model(self.batch() if batch is None else batch)
        return output.square().mean()

    def micro_batch(self) -> st.Update | None:
        """Train on one micro-batch."""
        return self.parallel.backward(self.loss())

    def until_update(self) -> st.Update:
        """Train until an update is committed; with an overlapping strategy the next round is closed already."""
        while (update := self.micro_batch()) is None:
            pass
        return update

    def until_half_accumulated(self) -> None:
        """Train until an update is committed and one micro-batch of the next round is accumulated."""
        self.until_update()
        self.micro_batch()


def says(error: BaseException, *parts: str) -> bool:
    """Whether the message holds every part; a failed assertion shows both."""
    missing = [part for part in parts if part not in str(error)]
    assert not missing, f"{missing} missing in: {error}"
    return True
