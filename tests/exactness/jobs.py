"""Small training jobs, and what they showed on the way."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.lr_scheduler import LambdaLR

from stretto import ACCO, DDP, DPU, Clock, DataParallel, Options, Update, WeightPrediction, ZeRO1
from stretto.strategies import Strategy

State = list[Tensor]
"""Parameters, in the order of `model.parameters()`."""
Batch = tuple[Tensor, Tensor, float, bool]
"""Inputs, targets, the weight, and whether the model's branch is used."""

WIDTH_IN, WIDTH, WIDTH_OUT = 7, 33, 5
STRATEGIES: tuple[Strategy, ...] = (DDP(), ZeRO1(), DPU(), WeightPrediction(), ACCO(), ACCO(first=1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One job; the same on all ranks."""

    strategy: Strategy = dataclasses.field(default_factory=ACCO)
    optimizer: Literal["sgd", "adamw"] = "adamw"
    micro_batches: int | Clock = 4
    lengths: tuple[int, ...] = (15,)
    """Micro-batches of each rank; the last is repeated for further ranks. 15 ends within a window."""
    until: Literal["any", "all"] = "any"
    tokens: bool = False
    """Give every micro-batch a weight of its own."""
    branch: Literal["always", "some", "one rank", "never", "first micro-batch"] = "always"
    """Which micro-batches use the branch: those of some updates; of rank 1; none; the first of four."""
    poisoned: tuple[int, ...] = ()
    """Micro-batches of the last rank whose inputs are not finite."""
    tied: bool = False
    frozen: bool = False
    batch_norm: bool = False
    dtype: torch.dtype = torch.float32
    scheduled: bool = True
    """Turn the learning rate after every update."""
    settle: bool = True
    """Look at the committed parameters, and evaluate them, at every update."""
    options: Options = dataclasses.field(default_factory=lambda: Options(bucket_bytes=4096))

    def length(self, rank: int) -> int:
        """Return the micro-batches of one rank."""
        return self.lengths[min(rank, len(self.lengths) - 1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """What one rank saw of a job."""

    shown: list[State]
    """Every new set of parameters that the model held after a micro-batch, in order, the start included."""
    committed: list[State]
    """Parameters inside `settled()` at every update that `feed` told of."""
    statistics: list[State]
    """Floating-point buffers inside `settled()` at the same moments."""
    live_statistics: list[State]
    """The same buffers just before."""
    final: State
    """Parameters after `finish`."""
    final_statistics: State
    updates: list[Update]
    drained: int
    """How many of `updates` came from `finish`."""
    behind: int = 0
    """How many landed after the last micro-batch, in `feed` or `finish`: nobody sees all that was shown there."""


class Network(nn.Module):
    """A perceptron of odd shapes, so that padding lies between all parameters, with an optional branch."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.normalise = nn.BatchNorm1d(WIDTH_IN) if case.batch_norm else nn.Identity()
        self.enter = nn.Linear(WIDTH_IN, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.leave = nn.Linear(WIDTH, WIDTH_OUT)
        if case.tied:
            self.branch.weight = self.middle.weight
        if case.frozen:
            self.middle.bias.requires_grad_(False)

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        x = torch.tanh(self.enter(self.normalise(x)))
        x = torch.tanh(self.middle(x))
        return self.leave(x + self.branch(x) if branch else x)


def build_model(case: Case, seed: int = 7) -> nn.Module:
    """Return the case's model with seeded weights."""
    torch.manual_seed(seed)
    return Network(case).to(case.dtype)


def build_optimizer(case: Case, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return the case's optimizer over tensors of the model's shapes."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if case.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True)
    matrices = {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1}
    vectors = {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0, "lr": 0.03}
    return torch.optim.AdamW([matrices, vectors], lr=0.01, foreach=True)


def rate(step: int) -> float:
    """Return the learning rate's factor after `step` committed updates: another one for every update."""
    return 1.0 / (1.0 + 0.3 * step)


def constant(step: int) -> float:
    """Return a factor that is always 1."""
    return 1.0


def stream(case: Case, rank: int) -> list[Batch]:
    """Return the micro-batches of one rank."""
    generator = torch.Generator().manual_seed(1000 + rank)
    batches: list[Batch] = []
    for index in range(case.length(rank)):
        size = 3 + index % 4
        x = torch.randn(size, WIDTH_IN, generator=generator)
        y = 3 * torch.randn(size, WIDTH_OUT, generator=generator)
        if index in case.poisoned and rank == len(case.lengths) - 1:
            x[0, 0] = float("nan")
        weight = 0.25 * size + 0.1 * rank if case.tokens else 1.0
        batches.append((x.to(case.dtype), y.to(case.dtype), weight, _uses_branch(case, rank, index)))
    return batches


def _uses_branch(case: Case, rank: int, index: int) -> bool:
    return {
        "always": True,
        "some": index // 4 % 3 == 0,
        "one rank": rank == 1,
        "never": False,
        "first micro-batch": index % 4 == 0,
    }[case.branch]


def wrap(case: Case, group: ProcessGroup | None = None, **settings: Any) -> tuple[nn.Module, DataParallel]:
    """Return the case's model and a job on it; settings replace those of the case."""
    model = build_model(case)
    optimizer = build_optimizer(case, model.parameters())
    given = {"micro_batches": case.micro_batches, "options": case.options, "group": group, **settings}
    return model, DataParallel(model, optimizer, case.strategy, **given)


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over what the batch's weight counts."""
    x, y, _, branch = batch
    return ((model(x, branch) - y).float() ** 2).mean()  # in 32 bits, also of a 16-bit model


def parameters_of(model: nn.Module) -> State:
    """Return copies of the trainable parameters."""
    return [parameter.detach().clone() for parameter in model.parameters() if parameter.requires_grad]


def statistics_of(model: nn.Module) -> State:
    """Return copies of the floating-point buffers."""
    return [buffer.clone() for buffer in model.buffers() if buffer.is_floating_point()]


def train(rank: int, case: Case, group: ProcessGroup | None = None) -> Observed:
    """Run the case on this rank of `group`, or of the default group."""
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN: a read of an unwritten element shows
    model = build_model(case, seed=7 + rank)  # every rank must take rank 0's
    optimizer = build_optimizer(case, model.parameters())
    schedule = LambdaLR(optimizer, rate if case.scheduled else constant)
    parallel = DataParallel(
        model,
        optimizer,
        case.strategy,
        scheduler=schedule,
        micro_batches=case.micro_batches,
        group=group,
        options=case.options,
    )
    shown, committed, agreed, live = [parameters_of(model)], [], [], []
    updates: list[Update] = []

    def look(update: Update) -> None:
        """At every update that feed knows of, on all ranks alike, whatever data they have left."""
        updates.append(update)
        if case.settle:
            live.append(statistics_of(model))
            with parallel.settled():
                committed.append(parameters_of(model))
                agreed.append(statistics_of(model))
                evaluate(model, case)

    def note() -> None:
        if not same(parameters_of(model), shown[-1]):
            shown.append(parameters_of(model))

    with parallel:
        num_seen = 0
        for batch in parallel.feed(stream(case, rank), until=case.until, on_update=look):
            note()
            parallel.backward(mean_loss(model, batch), weight=batch[2])
            note()
            num_seen = len(updates)
        note()
        drained = parallel.finish()
    return Observed(
        shown=shown,
        committed=committed,
        statistics=agreed,
        live_statistics=live,
        final=parameters_of(model),
        final_statistics=statistics_of(model),
        updates=updates + drained,
        drained=len(drained),
        behind=len(updates) + len(drained) - num_seen,
    )


def evaluate(model: nn.Module, case: Case) -> float:
    """Return the loss on the first micro-batch of a rank that does not exist."""
    model.eval()
    with torch.no_grad():
        loss = mean_loss(model, stream(case, rank=99)[0])
    model.train()
    return float(loss)


def train_all(rank: int, cases: Sequence[Case]) -> list[Observed]:
    """Run one case after the other: starting processes costs more than training in them."""
    return [train(rank, case) for case in cases]


def same(left: State, right: State) -> bool:
    """Return whether two states are equal to the bit."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def describe(case: Case) -> str:
    """Return a short name of what differs between cases."""
    first = getattr(case.strategy, "first", None)
    parts = {
        case.strategy.name: True,
        f"first{first}": first is not None,
        case.optimizer: True,
        "clip": case.options.clip_norm is not None,
        "tokens": case.tokens,
        f"branch {case.branch}": case.branch != "always",
        "tied": case.tied,
        "frozen": case.frozen,
        "batch_norm": case.batch_norm,
        case.options.wire: case.options.wire != "fp32",
        "16-bit model": case.dtype is torch.bfloat16,
        "16-bit accumulation": case.options.accumulate == "parameter",
    }
    return "-".join(name.replace(" ", "_") for name, applies in parts.items() if applies)
