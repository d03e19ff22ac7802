"""A small job on virtual ranks whose gradients, or whatever else, are damaged."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

import stretto as st
from stretto.errors import StrettoError
from stretto.noise import Noise
from stretto.records import Update
from stretto_lab.faults import Fault, FaultPlan, FaultyGroup, Injector, strike_memory
from stretto_lab.virtual import VirtualCluster

UPDATES = 8
NUMEL = 6 * 40 + 40 + 40 * 3 + 3


@dataclasses.dataclass
class Seen:
    """What one rank saw."""

    shown: list[list[Tensor]]
    """Parameters at the start and after every update."""
    updates: list[Update]
    final: list[Tensor]
    error: str | None = None


def network(seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))


def train(
    strategy: st.Strategy,
    *,
    ranks: int = 3,
    faults: Sequence[Fault | Noise] = (),
    updates: int = UPDATES,
    make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=0.05),
    options: st.Options | None = None,
    guards: Sequence[st.Guard] = (),
) -> list[Seen]:
    """Train on every rank, one micro-batch to an update, and finish; errors are noted."""
    seen = [Seen([], [], []) for _ in range(ranks)]
    plan = FaultPlan(tuple(fault for fault in faults if isinstance(fault, Fault)))
    injectors = [Injector(plan, rank) for rank in range(ranks)]
    chosen = options or st.Options(bucket_bytes=2**20)
    for one in faults:
        chosen = dataclasses.replace(chosen, noise=one) if isinstance(one, Noise) else chosen

    def program(rank: int, group: dist.ProcessGroup) -> None:
        model, own = network(), seen[rank]
        parallel = st.DataParallel(
            model,
            make(model.parameters()),
            strategy,
            micro_batches=1,
            group=group,
            guards=guards,
            options=chosen,
        )
        strike_memory(parallel, injectors[rank])
        generator = torch.Generator().manual_seed(100 + rank)
        own.shown.append(values(model))
        with parallel:
            for _ in range(updates):
                update = parallel.backward(model(torch.randn(4, 6, generator=generator)).square().mean())
                assert update is not None
                own.updates.append(update)
                own.shown.append(values(model))
            own.updates += parallel.finish()
        own.final = values(model)

    def strike(group: dist.ProcessGroup) -> dist.ProcessGroup:
        return FaultyGroup(group, injectors[group.rank()])

    try:
        VirtualCluster(ranks, faults=strike).run(program)
    except StrettoError as error:
        for own in seen:
            own.error = f"{type(error).__name__}: {error}"
    return seen


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def noise(ranks: int, variance: float, *, of: int | None = None) -> list[Noise]:
    """Noise of the given variance on the mean gradient of `of` ranks, from rank 0 on; of all `ranks` without it."""
    return [Noise(variance, rank=tuple(range(ranks if of is None else of)))]


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(
        torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(left, right, strict=True)
    )


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
