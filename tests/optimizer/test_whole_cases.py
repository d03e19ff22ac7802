"""Whole tensors in hard cases: ranks without any; unused, tied, transposed and 16-bit parameters; damage; wires."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from stretto import AtRest, Audit, DataParallel, LocalSGD, ReplicaGuard, ZeRO1
from stretto.errors import UnsupportedOptimizer
from stretto.guards import Guard
from stretto.strategies import STRATEGIES, Strategy
from stretto_lab.testing import Damage
from tests.optimizer.bowls import SMALL, UPDATES, Bowls, assert_equal, on_ranks, plain, trained
from tests.optimizer.test_whole import AVERAGES, OPTIMIZERS, SHAPES, muon_and_adamw
from tests.optimizer.written import Lars, Written


def muon(model: nn.Module) -> optim.Optimizer:
    return optim.Muon(model.values, lr=0.05)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_own_nothing_take_part(strategy: str) -> None:
    case = [(9, 31)], muon
    chosen = AVERAGES.get(strategy) or STRATEGIES[strategy]()
    alike = strategy in AVERAGES
    assert_equal(trained(*case, chosen, 4, alike=alike), plain(*case, chosen, 1 if alike else 4))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "acco"])
def test_sums_inside_nodes_change_nothing(strategy: str) -> None:
    case = SHAPES, OPTIMIZERS["muon and adamw"], STRATEGIES[strategy]()
    options = dataclasses.replace(SMALL, ranks_per_node=2)
    # Four equal gradients: whatever the order of the sum, nothing is rounded.
    assert_equal(trained(*case, 4, options=options, alike=True), plain(*case, 1))


@pytest.mark.parametrize("chosen", [ZeRO1(), LocalSGD(rate=0.5, state=True)], ids=str)
def test_parameter_that_is_not_used_in_an_update_is_not_stepped(chosen: Strategy) -> None:
    shapes, unused = SHAPES[:4], [1, 2, None]
    model = Bowls(shapes)
    optimizer = Lars(model.values)
    for index in unused:
        optimizer.zero_grad()
        model(0, index).backward()
        optimizer.step()

    def train(job: DataParallel, model: nn.Module, rank: int) -> Any:
        return job.backward(model(0, unused[job.steps]))

    options = dataclasses.replace(SMALL, allow_unused=True)
    found = on_ranks(
        2, lambda: Bowls(shapes), lambda m: Lars(m.values), train, strategy=chosen, options=options
    )
    for values, _, _ in found:
        assert_equal(values, [p.detach() for p in model.values])


class Tied(Bowls):
    """Registers one parameter twice."""

    def __init__(self) -> None:
        super().__init__([(9, 31), (40, 70)])
        self.again = self.values[0]


class Transposed(Bowls):
    """Has a matrix whose columns are contiguous, with the values of one whose rows are."""

    def __init__(self) -> None:
        super().__init__([(9, 31), (40, 70)])
        self.values[1] = nn.Parameter(self.values[1].detach().t().contiguous().t())


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("kind", [Tied, Transposed])
def test_tied_and_transposed_parameters_train_as_plain_contiguous_ones(kind: type[Bowls]) -> None:
    found = on_ranks(2, kind, muon, micro_batches=2)
    expected = plain([(9, 31), (40, 70)], muon, ZeRO1(), 2)
    for values, _, _ in found:
        assert_equal(values, expected)


def test_16_bit_parameters_have_masters_that_the_optimizer_sees_whole() -> None:
    shapes = [(9, 31), (40, 70)]
    model = Bowls(shapes).bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in model.values]
    stock = optim.Muon(masters, lr=0.05)
    for _ in range(UPDATES):
        per_rank = [torch.autograd.grad(model(rank), list(model.values)) for rank in range(2)]
        for master, first, second in zip(masters, *per_rank, strict=True):
            master.grad = (first.float() + second.float()) / 2
        stock.step()
        for parameter, master in zip(model.values, masters, strict=True):
            parameter.data.copy_(master)
    found = on_ranks(2, lambda: Bowls(shapes).bfloat16(), muon)
    for values, _, _ in found:
        assert_equal(values, [p.detach() for p in model.values])


def micro_batch(job: DataParallel, model: nn.Module, rank: int) -> Any:
    return job.micro_batch(model, rank, samples=1)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "acco", "wp"])
def test_guards_see_nothing_wrong(strategy: str) -> None:
    chosen = STRATEGIES[strategy]()
    guards = [AtRest(), ReplicaGuard()] + [Audit(rate=1.0)] * (strategy in ("ddp", "zero1"))
    choices = {"strategy": chosen, "guards": guards, "micro_batches": 2}
    found = on_ranks(2, lambda: Bowls(SHAPES), muon_and_adamw, micro_batch, **choices)
    expected = plain(SHAPES, OPTIMIZERS["muon and adamw"], chosen, 2)
    for values, job, updates in found:
        assert_equal(values, expected)
        assert not any(update.incidents for update in updates)
        assert not job.late_incidents


@pytest.mark.parametrize(
    ("strategy", "guard", "action"),
    [("zero1", AtRest(), "mended"), ("ddp", ReplicaGuard(), "copied from rank 0")],
)
def test_damage_to_the_state_of_a_whole_tensor_is_repaired(strategy: str, guard: Guard, action: str) -> None:
    def train(job: DataParallel, model: nn.Module, rank: int) -> Any:
        update = job.backward(model(rank))
        if update and update.step == 2:
            Damage(site="optimizer state").strike(job)
        return update

    shapes, chosen = [(9, 31), (40, 70)], STRATEGIES[strategy]()
    choices = {"strategy": chosen, "guards": [guard], "micro_batches": 2}
    expected = plain(shapes, muon, chosen, 3)
    for values, _, updates in on_ranks(3, lambda: Bowls(shapes), muon, train, **choices):
        assert_equal(values, expected)
        incidents = {one.site: one.action for one in updates[-1].incidents}
        assert incidents["optimizer state"] == action


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "acco"])
def test_padding_has_masters_and_no_state(strategy: str) -> None:
    world_size, chosen = 3, STRATEGIES[strategy]()
    found = on_ranks(world_size, lambda: Bowls(SHAPES), muon_and_adamw, strategy=chosen, micro_batches=2)
    copies = world_size if strategy == "ddp" else 1
    sharded = [job.job.sharded for _, job, _ in found]
    masters = sum(master.numel() for one in sharded for master in one.masters)
    assert masters == copies * found[0][1].job.layout.numel
    states = [state for one in sharded for state in one.optimizer.state.values()]
    held = sum(state["momentum_buffer"].numel() for state in states if "momentum_buffer" in state)
    matrices = sum(torch.Size(shape).numel() for shape in SHAPES if len(shape) == 2)
    assert held == copies * matrices


class Outer(Written):
    """Remembers more than the parameter has: sums of products of its rows, as Shampoo does."""

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        rows = g.reshape(len(g), -1)
        products = state.setdefault("products", torch.zeros(len(g), len(g))).add_(rows @ rows.T)
        super().update(p, g / (1 + products.diagonal().sqrt().mean()), group, state)


def test_state_larger_than_its_parameter_is_refused_only_where_replicas_are_averaged() -> None:
    case = [(30, 5), (4, 7)], lambda model: Outer(model.values)
    assert_equal(trained(*case, ZeRO1(), 2), plain(*case, ZeRO1(), 2))
    with pytest.raises(
        UnsupportedOptimizer, match=r"'products'.*\(30, 30\).*'values.0' of shape \(30, 5\).*ZeRO1"
    ):
        trained(*case, LocalSGD(), 1)


def test_groups_that_need_it_are_whole_and_the_others_are_cut() -> None:
    values, job, _ = on_ranks(1, lambda: Bowls(SHAPES), muon_and_adamw)[0]
    is_whole = {slot.shape: slot.is_whole for slot in job.job.layout.slots}
    assert is_whole == {shape: len(shape) == 2 and 0 not in shape for shape in SHAPES}
    assert len(values) == len(SHAPES)
