"""A small job that every method trains, and the plain loop it has to equal."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stretto.groups import Link, register_throttled
from stretto.records import Update
from stretto_lab.peers import Peer, options_of
from stretto_lab.train.arms import peer_of
from tests.processes import run_ranks

MICRO_BATCHES = 3
UPDATES = 4
WORLD_SIZE = 2


class Blocks(nn.Module):
    """Layers in a list, as transformers have them, and a parameter at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs * self.scale


NUM_PARAMETERS = 3 * (6 * 6 + 6) + 6


def run_counted(function: Any, *args: Any, link: str = "none", world_size: int = WORLD_SIZE) -> list[Any]:
    """Call a function on ranks behind a link that counts what is sent."""
    prepare = functools.partial(register_throttled, Link.parse(link))
    return run_ranks(world_size, function, *args, backend="throttled", prepare=prepare)


def new_model() -> nn.Module:
    torch.manual_seed(7)
    return Blocks()


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3}], lr=1e-2
    )


def micro_batch(index: int) -> tuple[Tensor, float]:
    """Inputs and weight of a micro-batch, in the order of the whole job."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(4, 6, generator=generator), 1.0 + index % 3


def shard(rank: int, num: int = UPDATES * MICRO_BATCHES) -> Iterator[tuple[Tensor, float]]:
    """The micro-batches of one rank."""
    return (micro_batch(rank + WORLD_SIZE * position) for position in range(num))


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return (model(inputs) - inputs.roll(1, dims=1)).square().mean()


def plain_loop(clip_norm: float) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """One process, all micro-batches, gradient  sum(w g) / sum(w); parameters, losses and gradient norms."""
    model = new_model()
    optimizer = new_optimizer(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses, norms = [], []
    per_update = WORLD_SIZE * MICRO_BATCHES
    for update in range(UPDATES):
        batches = [micro_batch(update * per_update + position) for position in range(per_update)]
        total = sum(weight for _, weight in batches)
        mean = sum(weight / total * loss_of(model, inputs) for inputs, weight in batches)
        mean.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip_norm)))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(mean.detach()))
    return dict(model.state_dict()), losses, norms


def make_peer(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: int,
    *,
    clip_norm: float | None = None,
    **options: Any,
) -> Peer:
    kind = peer_of(name)
    return kind(model, optimizer, micro_batches, clip_norm=clip_norm, options=options_of(kind)(**options))


def train(
    rank: int, name: str, clip_norm: float | None = None, **options: Any
) -> tuple[dict[str, Tensor], list[Update]]:
    """The same job by a stock method; parameters at the end and the updates."""
    model = new_model()
    peer = make_peer(name, model, new_optimizer(model), MICRO_BATCHES, clip_norm=clip_norm, **options)
    updates = list(run(peer, shard(rank)))
    with peer.settled():
        parameters = {key: value.detach().clone() for key, value in model.named_parameters()}
    peer.finish()
    return parameters, updates


def run(peer: Peer, batches: Iterator[tuple[Tensor, float]]) -> Iterator[Update]:
    schedule = torch.optim.lr_scheduler.ExponentialLR(peer.optimizer, 0.5)
    for inputs, weight in peer.feed(batches):
        if update := peer.backward(loss_of(peer.model, inputs), weight, samples=len(inputs)):
            schedule.step()
            yield update
            if update.step == UPDATES:
                peer.stop()
