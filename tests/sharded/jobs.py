"""Small jobs whose models are sharded inside nodes, and the whole models that they are compared with.

Four processes are N nodes of L shards. They train with batches of their own. What they are compared with are N ranks
with a whole model each, and with the batches of a node side by side; every column of processes is such a job.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from stretto import (
    ACCO,
    DDP,
    DPU,
    Clock,
    DataParallel,
    DiLoCo,
    Guard,
    LocalSGD,
    Options,
    WeightPrediction,
    ZeRO1,
)
from stretto.optimizer import as_one
from stretto.records import Update
from stretto.strategies import Strategy
from tests.optimizer.written import Lars

WORLD_SIZE = 4
WORDS, WIDTH, LENGTH = 13, 12, 6
"""Thirteen rows do not divide by the shards, and three rows leave a shard of four without any."""
STRATEGIES: tuple[Strategy, ...] = (
    DDP(),
    ZeRO1(),
    DPU(),
    WeightPrediction(),
    ACCO(),
    LocalSGD(0.34),
    DiLoCo(interval=2, fragments=1, delay=1),
)
Values = dict[str, Tensor]


def not_finite(gradient: Tensor) -> Tensor:
    """The same, with that of the first sample not a number."""
    gradient = gradient.clone()
    gradient[0] = float("nan")
    return gradient


class Network(nn.Module):
    """A tied weight, rows that do not divide, a frozen layer and a constant buffer; the last words first."""

    places: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.few = nn.Linear(width, 3)
        self.back = nn.Linear(3, width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("places", torch.linspace(-1, 1, LENGTH)[:, None])

    def forward(self, words: Tensor, *, poisoned: bool = False) -> Tensor:
        hidden = self.words(words)
        if poisoned:
            hidden.register_hook(not_finite)
        hidden = hidden + self.places.to(hidden.dtype)
        for layer in self.mix:
            hidden = hidden + layer(hidden).tanh()
        hidden = hidden + self.back(self.few(self.frozen(hidden)).tanh())
        scores: Tensor = self.head(hidden)
        return scores


def network(width: int = WIDTH) -> Network:
    torch.manual_seed(0)
    return Network(width)


def batch(rank: int, index: int) -> Tensor:
    """Words of one micro-batch; the first sample holds the first words alone, which lie on the first shard."""
    generator = torch.Generator().manual_seed(1000 * index + rank)
    words = torch.randint(WORDS, (4, LENGTH), generator=generator)
    words[0] %= 3
    return words


def loss_of(model: nn.Module, words: Tensor, *, poisoned: bool = False) -> Tensor:
    scores = model(words, poisoned=poisoned)
    return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), words[:, 1:].flatten())


@functools.cache
def mesh_of(nodes: int, shards: int) -> DeviceMesh:
    """One mesh of every shape in each process."""
    return init_device_mesh("cpu", (nodes, shards), mesh_dim_names=("node", "shard"))


def shard(model: Network, mesh: DeviceMesh, **settings: Any) -> None:
    for layer in model.mix:
        fully_shard(layer, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.9)


def beside(other: Any, kind: type[torch.optim.Optimizer], prefixes: tuple[str, ...], model: nn.Module) -> Any:
    """An optimizer for the matrices whose names begin so, and another one for the rest."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    chosen = {name: p for name, p in trained.items() if p.ndim == 2 and name.startswith(prefixes)}
    rest = [p for name, p in trained.items() if name not in chosen]
    return as_one([kind(chosen.values(), lr=0.02), other(rest)])


beside_adamw = functools.partial(beside, functools.partial(torch.optim.AdamW, lr=0.01))
lars = functools.partial(
    beside, functools.partial(torch.optim.SGD, lr=0.2, momentum=0.9), Lars, ("mix", "back")
)


def whole(model: nn.Module) -> Values:
    """All values of a model, gathered."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


@dataclasses.dataclass(kw_only=True)
class Case:
    """What both jobs do."""

    strategy: Strategy = dataclasses.field(default_factory=ZeRO1)
    model: Callable[[int], nn.Module] = network
    """Of this width, which is `width`."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    options: Options = dataclasses.field(default_factory=lambda: Options(bucket_bytes=512))
    policy: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What `fully_shard` is told beside the mesh."""
    weights: Sequence[float] = (1.0, 1.0, 1.0, 1.0)
    """Of every micro-batch, by rank."""
    width: int = WIDTH
    micro_batches: int | Clock = 2
    updates: int = 4
    """By a clock, of three micro-batches."""
    lengths: Sequence[int] = ()
    """Micro-batches that each rank has; empty where each has them for all updates."""
    until: Literal["any", "all"] = "any"
    has_length: bool = True
    """Whether loaders say how long they are."""
    guards: Literal["standard"] | Sequence[Guard] = ()
    poisoned: tuple[int, int] | None = None
    """Rank and index of a micro-batch whose gradient is not finite."""
    evaluates: bool = False
    """After every micro-batch, by the committed parameters."""
    compiles: bool = False
    prepared: Callable[[DataParallel, Sequence[int]], None] = lambda parallel, ranks: None
    """Called with a job and its ranks before it trains."""

    def batches(self, ranks: Sequence[int]) -> list[int]:
        """Numbers of the micro-batches that a node of these ranks has: as many as each of them."""
        each = 3 if isinstance(self.micro_batches, Clock) else self.micro_batches
        return list(
            range(min([self.lengths[rank] for rank in ranks]) if self.lengths else each * self.updates)
        )


@dataclasses.dataclass(kw_only=True)
class Outcome:
    values: Values
    updates: list[Update]

    def distance(self, other: "Outcome") -> float:
        """The largest difference of any value."""
        assert self.values.keys() == other.values.keys()
        return max(float((value - other.values[name]).abs().max()) for name, value in self.values.items())

    def equals(self, other: "Outcome") -> bool:
        """To the bit, parameters and what the updates tell of learning."""
        told = [
            [(u.loss, u.gradient_norm, u.weight, u.samples, u.skipped_rounds) for u in one.updates]
            for one in (self, other)
        ]
        return self.distance(other) == 0 and told[0] == told[1]


def sharded(case: Case, nodes: int, shards: int) -> tuple[nn.Module, DataParallel]:
    """A job of this process among the N x L."""
    model, mesh = case.model(case.width), mesh_of(nodes, shards)
    shard(model, mesh["shard"], **case.policy)
    return model, DataParallel(
        model, case.optimizer(model), case.strategy, micro_batches=case.micro_batches, options=case.options,
        guards=case.guards, mesh=mesh["node"],
    )  # fmt: skip


def unsharded(case: Case, group: dist.ProcessGroup | None = None) -> tuple[nn.Module, DataParallel]:
    """The same with a whole model on every rank of `group`."""
    model = case.model(case.width)
    return model, DataParallel(
        model, case.optimizer(model), case.strategy, micro_batches=case.micro_batches, options=case.options,
        group=group,
    )  # fmt: skip


def train(case: Case, model: nn.Module, parallel: DataParallel, ranks: Sequence[int]) -> Outcome:
    """Train with the batches of `ranks`, weighed together."""
    updates = []
    weight = sum(case.weights[rank] for rank in ranks)
    forward = torch.compile(model, backend="aot_eager") if case.compiles else model
    case.prepared(parallel, ranks)
    for index in numbers(case, parallel, ranks):
        losses = [
            loss_of(forward, batch(rank, index), poisoned=case.poisoned == (rank, index)).float()
            * (case.weights[rank] / weight if len(ranks) > 1 else 1.0)
            for rank in ranks
        ]
        updates.append(parallel.backward(sum(losses[1:], losses[0]), weight, samples=len(ranks)))
        if case.evaluates:
            with parallel.settled(), torch.no_grad():
                loss_of(model, batch(99, index))
    updates += parallel.finish()
    return Outcome(values=whole(model), updates=[one for one in updates if one is not None])


def numbers(case: Case, parallel: DataParallel, ranks: Sequence[int]) -> Iterator[int]:
    """Yield which micro-batches are trained on; where ranks have different ones, by `feed`."""
    batches: Any = case.batches(ranks)
    if not case.lengths:
        return iter(batches)
    return parallel.feed(batches if case.has_length else iter(batches), until=case.until)


def run_sharded(case: Case, rank: int, nodes: int, shards: int) -> Outcome:
    return train(case, *sharded(case, nodes, shards), [rank])


def run_whole(case: Case, rank: int, nodes: int) -> Outcome:
    """N ranks with whole models, each with the batches of a node of L; every column of processes is such a job."""
    shards = WORLD_SIZE // nodes
    node = rank // shards
    group = mesh_of(nodes, shards)["node"].get_group() if shards > 1 else None
    return train(case, *unsharded(case, group), range(node * shards, node * shards + shards))


def run_plainly(case: Case, rank: int, nodes: int, shards: int) -> Outcome:
    """What PyTorch makes of the same batches by itself; of several nodes, by its HSDP."""
    model = case.model(case.width)
    mesh = mesh_of(nodes, shards)
    shard(model, mesh if nodes > 1 else mesh["shard"], **case.policy)
    optimizer = case.optimizer(model)
    assert isinstance(case.micro_batches, int)
    for index in case.batches([rank]):
        (loss_of(model, batch(rank, index)).float() / case.micro_batches).backward()
        if (index + 1) % case.micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()
    return Outcome(values=whole(model), updates=[])


def tolerance(case: Case, expected: Outcome) -> float:
    """Both runs round a parameter once per update, to half a unit in the last place, from gradients whose sums have
    another order: two units per update, of the largest parameter."""
    largest = max(float(value.abs().max()) for value in expected.values.values())
    return 2 * case.updates * torch.finfo(torch.float32).eps * largest
