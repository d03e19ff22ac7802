"""Owners of a small model's parameters, and gradients for them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from stretto.flat import Layout, plan_layout
from stretto.optimizer import ReducedGradient, ShardedOptimizer

MakeOptimizer = Callable[[list], torch.optim.Optimizer]
WEIGHT = 5.0

# Each with and without state before its first step, and with moments of both orders.
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1),
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, lr=0.1, amsgrad=True, foreach=True),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.1),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "rprop": lambda groups: torch.optim.Rprop(groups, lr=0.1),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=0.1),
}


def model_of(seed: int = 0) -> nn.Module:
    """Return a model whose parameters are cut by buckets and owners."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(9, 31), nn.Linear(31, 17), nn.Linear(17, 3))


def groups_of(parameters: list[Tensor]) -> list[dict]:
    """Return two groups: matrices and vectors."""
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() == 1]},
    ]


def owners_of(
    model: nn.Module, make: MakeOptimizer, num_owners: int
) -> tuple[Layout, list[ShardedOptimizer]]:
    """Return the owners of all slices."""
    optimizer = make(groups_of(list(model.parameters())))
    layout, parameters = plan_layout(model, optimizer, world_size=num_owners, bucket_bytes=1024, widen=True)
    owners = [
        ShardedOptimizer(layout, parameters, optimizer, rank=rank, num_owners=num_owners)
        for rank in range(num_owners)
    ]
    return layout, owners


def gradients_for(layout: Layout, seed: int, unused: set[str]) -> dict[str, Tensor | None]:
    """Return Σ w·g by parameter name."""
    generator = torch.Generator().manual_seed(seed)
    values = {slot.name: torch.randn(slot.shape, generator=generator) for slot in layout.slots}
    return {name: None if name in unused else value for name, value in values.items()}


def reduced(owner: ShardedOptimizer, gradients: dict[str, Tensor | None]) -> ReducedGradient:
    """Return what a reduction would give this owner."""
    sums = owner.new_sums()
    for piece in owner.pieces:
        gradient = gradients[piece.slot.name]
        if gradient is not None:
            part = gradient.flatten()[piece.offset : piece.offset + piece.numel]
            owner.values(sums, piece).copy_(part)
    used = bytes(gradients[slot.name] is not None for slot in owner.layout.slots)
    return ReducedGradient(sums, WEIGHT, 0.0, used)


def new_flats(layout: Layout) -> list[Tensor]:
    """Return storage to publish into."""
    return [torch.zeros(flat.numel, dtype=flat.accumulation_dtype) for flat in layout.sets]
