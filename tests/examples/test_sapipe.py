"""SAPipe's options 1 and 3, written outside the library: they are the paper's equations, and plain PyTorch alone."""

import copy
import importlib.util
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto import DataParallel, Options
from stretto.errors import ConfigError
from stretto.strategies import STRATEGIES, Strategy
from stretto.strategies.contract import AllReduce, Gather, PreviewOwn, Reduce, Script, Step
from stretto.strategies.ledger import ledger_of
from stretto_lab.testing import StrategyConformance
from stretto_lab.virtual import VirtualCluster, VirtualGroup
from tests.examples.scripts import EXAMPLES, printed

UPDATES = 6


@pytest.fixture
def sapipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The strategy; its registration is forgotten afterwards."""
    spec = importlib.util.spec_from_file_location("extend_sapipe", EXAMPLES / "extend" / "sapipe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "extend_sapipe", module)
    spec.loader.exec_module(module)
    yield module.SAPipe
    del STRATEGIES["sapipe"]


MAKE_OPTIMIZER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
}


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch[:, :5]) - batch[:, 5:]).square().mean()


def values(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def trained(
    strategy: Strategy,
    optimizer: str,
    batches: Sequence[Sequence[Tensor]],
    weights: Sequence[float],
    **options: Any,
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return what every rank's model showed at each of its gradients, and what was committed in the end."""

    def program(rank: int, group: VirtualGroup) -> tuple[list[Tensor], Tensor]:
        model, shown = new_model(), []
        parallel = DataParallel(
            model,
            MAKE_OPTIMIZER[optimizer](model.parameters()),
            strategy,
            group=group,
            options=Options(**options),
        )
        for batch in batches[rank]:
            shown.append(values(model))
            parallel.backward(loss_of(model, batch), weight=weights[rank])
        parallel.finish()
        return shown, values(model)

    found = VirtualCluster(len(batches)).run(program).values
    return [shown for shown, _ in found], [committed for _, committed in found]


def reference(
    mixed: bool,
    optimizer: str,
    batches: Sequence[Sequence[Tensor]],
    weights: Sequence[float],
    clip: float | None,
) -> tuple[list[list[Tensor]], Tensor]:
    """The equations, with a model that is set to what every rank shows."""
    model = new_model()
    stepper = MAKE_OPTIMIZER[optimizer](model.parameters())
    total, ranks = sum(weights), range(len(batches))
    committed = values(model)
    shown = [[committed] for _ in ranks]
    before: list[Tensor] = []

    def gradient(at: Tensor, batch: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(at.clone(), model.parameters())
        model.zero_grad()
        loss_of(model, batch).backward()
        return nn.utils.parameters_to_vector([p.grad for p in model.parameters()]).clone()

    def stepped(by: torch.optim.Optimizer, at: Tensor, mean: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(at.clone(), model.parameters())
        factor = 1.0 if clip is None else min(1.0, clip / (float(mean.norm()) + 1e-6))
        offset = 0
        for parameter in model.parameters():
            parameter.grad = factor * mean[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        state = copy.deepcopy(stepper.state_dict())
        stepper.step()
        if by is not stepper:
            stepper.load_state_dict(state)
        return values(model)

    peek = MAKE_OPTIMIZER[optimizer](nn.Linear(1, 1).parameters())
    for number in range(UPDATES):
        now = [gradient(shown[rank][-1], batches[rank][number]) for rank in ranks]
        if before:
            mean = sum(weight * one for weight, one in zip(weights, before, strict=True)) / total
            committed = stepped(stepper, committed, mean)
        for rank in ranks:
            if not before:
                shown[rank].append(committed)  # nothing has come back yet
                continue
            own = mean + weights[rank] * (now[rank] - before[rank]) / total if mixed else now[rank]
            shown[rank].append(stepped(peek, committed, own))
        before = now
    mean = sum(weight * one for weight, one in zip(weights, before, strict=True)) / total
    return [one[:UPDATES] for one in shown], stepped(stepper, committed, mean)


def data(ranks: int, seed: int) -> list[list[Tensor]]:
    source = torch.Generator().manual_seed(seed)
    return [[torch.randn(4, 7, generator=source) for _ in range(UPDATES)] for _ in range(ranks)]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_every_rank_shows_and_commits_what_the_equations_say(sapipe: Any, mixed: bool, seed: int) -> None:
    draws = random.Random(seed)
    ranks, optimizer = draws.choice([2, 3, 5]), draws.choice(list(MAKE_OPTIMIZER))
    weights = [draws.uniform(0.5, 3.0) for _ in range(ranks)]
    clip = draws.choice([None, 0.3])
    batches = data(ranks, seed)
    found, committed = trained(
        sapipe(mixed=mixed),
        optimizer,
        batches,
        weights,
        clip_norm=clip,
        bucket_bytes=draws.choice([128, 2**20]),
    )
    shown, expected = reference(mixed, optimizer, batches, weights, clip)
    for ours, theirs in zip(found, shown, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(
                one, other, rtol=1e-4, atol=1e-5
            )  # six steps of float32, sums in other orders
    assert all(torch.equal(one, committed[0]) for one in committed)
    torch.testing.assert_close(committed[0], expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(found[0][3], found[1][3])


@pytest.mark.parametrize("optimizer", list(MAKE_OPTIMIZER))
def test_a_lone_rank_is_plain_pytorch_but_for_a_second_gradient_at_the_start(
    sapipe: Any, optimizer: str
) -> None:
    """Its estimate is what it commits next, to the bit. When the second update begins, nothing has come back yet."""
    (batches,) = data(1, 0)
    model = new_model()
    stepper = MAKE_OPTIMIZER[optimizer](model.parameters())
    first = copy.deepcopy(model)
    shown = [values(model)]
    for number, batch in enumerate(batches):
        model.zero_grad()
        at = first if number == 1 else model
        at.zero_grad()
        loss_of(at, batch).backward()
        for parameter, source in zip(model.parameters(), at.parameters(), strict=True):
            parameter.grad = source.grad.clone()
        stepper.step()
        shown.append(values(first if number == 0 else model))
    ((found,), (committed,)) = trained(sapipe(), optimizer, [batches], [1.0])
    assert all(torch.equal(one, other) for one, other in zip(found, shown, strict=False))
    assert torch.equal(committed, values(model))
    ((mixed,), _) = trained(sapipe(mixed=True), optimizer, [batches], [1.0])
    for one, other in zip(mixed, shown, strict=False):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mixed", [False, True])
def test_it_passes_the_kit_for_strategies(sapipe: Any, mixed: bool) -> None:
    class Kit(StrategyConformance):
        world_sizes = (1, 3)
        micro_batches = 2

        def make_strategy(self) -> Strategy:
            return sapipe(mixed=mixed)

    assert Kit().failures() == {}


def test_it_keeps_a_second_buffer_and_a_part_of_the_sum_where_it_mixes(sapipe: Any) -> None:
    plain, mixed = (ledger_of(sapipe(mixed=mixed)) for mixed in (False, True))
    sizes = [one.memory_bytes(sapipe(), parameter=4, accumulation=4, world_size=8) for one in (plain, mixed)]
    assert sizes == [4 + 2 * 4 + 16, 4 + 2 * 4 + 16 + 4]
    assert plain.wire_bytes(4) == mixed.wire_bytes(4) == 8


class Sharded(Strategy):
    """Ranks that would step slices with gradients of their own."""

    name = "sharded"
    overlaps = True
    staleness = 1

    def update(self) -> Script:
        gradient = yield Reduce()
        yield PreviewOwn(gradient)
        yield Step(gradient)
        yield Gather()


class Waiting(Strategy):
    """A rank that has no new gradient yet when it would look ahead."""

    name = "waiting"
    overlaps = False
    staleness = 0

    def update(self) -> Script:
        gradient = yield AllReduce()
        yield PreviewOwn(gradient)
        yield Step(gradient)


@pytest.mark.parametrize("kind", [Sharded, Waiting])
def test_it_is_refused_where_no_rank_could_make_such_an_estimate(kind: type[Strategy]) -> None:
    with pytest.raises(
        ConfigError, match="PreviewOwn needs the whole optimizer, and gradients that accumulate beside"
    ):
        ledger_of(kind())


def test_it_trains_from_the_command_line_and_resumes() -> None:
    words = (
        "--task.width",
        "4",
        "--task.batch",
        "8",
        "--micro-batches",
        "2",
        "--no-tensorboard",
        "--run-dir",
        "run",
    )
    strategy = ("--strategy", "sapipe:mixed=on", "--guards", "standard")
    printed("extend/sapipe.py", "train", "digits-resnet", *words, *strategy, "--updates", "3")
    printed("extend/sapipe.py", "resume", "run", "--updates", "5")
    lines = Path("run/updates.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
