"""What the ranks of the tests do."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stretto import DataParallel, Update
from stretto_lab.virtual import VirtualGroup


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank saw."""

    parameters: list[Tensor]
    updates: list[Update]
    times_ns: list[int]
    """When every update came."""


def program(num_updates: int, micro_batches: int = 4, **settings: Any) -> Callable[[int, VirtualGroup], Seen]:
    """Return a program that trains a linear model; `settings` are those of `DataParallel`."""

    def train(rank: int, group: VirtualGroup) -> Seen:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
        draws = torch.Generator().manual_seed(rank)
        updates: list[Update] = []
        times: list[int] = []
        with DataParallel(model, optimizer, micro_batches=micro_batches, group=group, **settings) as parallel:
            for _ in range(num_updates * micro_batches):
                update = parallel.backward(model(torch.randn(3, 8, generator=draws)).square().mean())
                if update is not None:
                    updates.append(update)
                    times.append(group.now_ns)
            parallel.finish()
        parameters = [parameter.detach().clone() for parameter in model.parameters()]
        return Seen(parameters=parameters, updates=updates, times_ns=times)

    return train
