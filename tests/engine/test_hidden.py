"""Gradients that leave early: what may happen during a backward pass changes no result, and blocks nobody."""

import itertools
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from stretto import ACCO, DDP, AtRest, Audit, Clock, DataParallel, Options, PAFTSync, ReplicaGuard, ZeRO1
from stretto.engine.early_accumulation import EarlyAccumulation
from stretto_lab.virtual import Compute, Span, Trace, Transfer, VirtualCluster
from tests.bits import unequal
from tests.draws import part
from tests.processes import rank_outcomes

WIDTH, LAYERS, UPDATES, MICRO_BATCHES = 24, 4, 4, 2
Step = Callable[["Net", DataParallel, int, int], object]
"""What a rank does in a micro-batch, given its model, the job, its rank and the micro-batch's index."""


class Net(nn.Module):
    """Layers that a test may run in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2, 3), again: bool = False) -> Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return checkpoint(self.layers[order[-1]], x, use_reentrant=True) if again else x


def data(rank: int, index: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * rank + index))


def plain(net: Net, parallel: DataParallel, rank: int, index: int) -> None:
    parallel.backward(net(data(rank, index)).square().mean())


def train(
    step: Step,
    prepare: Callable[[Net], object] = lambda net: None,
    *,
    world_size: int = 2,
    hide: bool = True,
    torn: bool = False,
    wire: str = "fp32",
    **settings: Any,
) -> tuple[list[list[Tensor]], Trace]:
    """Train on a virtual cluster; return every rank's parameters after every micro-batch, and the trace.

    The job must end as it is said to: hiding, or no longer, because some round was `torn`.
    """

    def program(rank: int, group: ProcessGroup) -> list[Tensor]:
        torch.manual_seed(0)
        net, seen = Net(), []
        prepare(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=True)
        options = Options(bucket_bytes=1024, wire=wire, hide_reductions=hide, allow_unused=True)
        given = {"strategy": ZeRO1(), "micro_batches": MICRO_BATCHES, "options": options, **settings}
        with DataParallel(net, optimizer, group=group, **given) as parallel:
            for index in range(UPDATES * MICRO_BATCHES):
                step(net, parallel, rank, index)
                seen += [parameter.detach().clone() for parameter in net.parameters()]
            parallel.finish()
        assert not hide or parallel.job.replica.overlaps_backward is not torn
        return seen

    results = VirtualCluster(world_size, compute=Compute(micro_batch_ns=10**6)).run(program)
    return list(results.values), results.trace


def begun_inside(trace: Trace) -> list[int]:
    """Return when those collectives began that began while rank 0 was inside a micro-batch."""
    busy = [r for r in trace.records if isinstance(r, Span) and r.work == "micro-batch" and r.rank == 0]
    started = [r.start_ns for r in trace.records if isinstance(r, Transfer)]
    return [start for start in started if any(span.start_ns < start < span.stop_ns for span in busy)]


def check_same(step: Step, prepare: Callable[[Net], object] = lambda net: None, **settings: Any) -> Trace:
    """Compare a job with the one that hides nothing, on all wires; return the trace of the former."""
    for wire in ("int8", "fp32"):
        hidden, trace = train(step, prepare, wire=wire, **settings)
        unhidden, _ = train(step, prepare, wire=wire, hide=False, **settings)
        for ours, theirs in zip(hidden, unhidden, strict=True):
            assert unequal(ours, theirs) == []
    return trace


def test_gradients_leave_early_in_an_ordinary_job() -> None:
    assert len(begun_inside(check_same(plain))) >= UPDATES


def test_every_bucket_but_those_of_the_last_gradient_leaves_during_the_backward_pass() -> None:
    layouts = []

    def step(net: Net, parallel: DataParallel, rank: int, index: int) -> None:
        plain(net, parallel, rank, index)
        layouts.append(parallel.job.layout)

    trace = check_same(step)
    names = [[slot.name for slot in slots] for slots in layouts[0].slots_by_bucket()]
    early = [bucket for bucket in names if "layers.0.weight" not in bucket]  # whose gradient comes last
    assert len(early) > len(names) / 2
    assert len(begun_inside(trace)) == UPDATES * len(early)


def in_any_order(net: Net, parallel: DataParallel, rank: int, index: int) -> None:
    generator = torch.Generator().manual_seed(7 * rank + index)
    order = tuple(torch.randperm(LAYERS, generator=generator).tolist())
    parallel.backward(net(data(rank, index), order).square().mean())


def without_some_layers(net: Net, parallel: DataParallel, rank: int, index: int) -> None:
    order = tuple(layer for layer in range(LAYERS) if (layer + rank + index) % 3)
    parallel.backward(net(data(rank, index), order).square().mean())


def beside_other_gradients(net: Net, parallel: DataParallel, rank: int, index: int) -> None:
    loss = net(data(rank, index)).square().mean()
    torch.autograd.grad(net(data(rank, index + 50)).sum(), list(net.parameters()))
    net(data(rank, index + 60)).sum().backward()
    parallel.discard()
    parallel.backward(loss)


def counted_in_several_ways(net: Net, parallel: DataParallel, rank: int, index: int) -> None:
    if (index + rank) % 4 == 1:
        parallel.backward(net(data(rank, index)).square().mean(), weight=0.0)
    elif (index + rank) % 4 == 2:
        for part in (0, 50):  # several backward passes
            net(data(rank, index + part)).square().mean().backward()
        parallel.count_micro_batch(2.0)
    else:
        parallel.backward(net(data(rank, index)).square().mean(), weight=0.5)


def with_hooks_that_rewrite(net: Net, parallel: DataParallel, rank: int, index: int) -> None:
    """Each gradient is rewritten by a hook behind the job's own, every other one through `.data`."""

    def rewrite(parameter: Tensor) -> None:
        gradient = parameter.grad.data if parameter.dim() == 1 else parameter.grad
        gradient.clamp_(-1e-3, 1e-3)

    if index == 0:
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(rewrite)
    plain(net, parallel, rank, index)


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(
    "step",
    [
        *(in_any_order, without_some_layers, beside_other_gradients),
        *(counted_in_several_ways, with_hooks_that_rewrite),
    ],
)
def test_however_a_rank_comes_to_its_gradients_hiding_changes_nothing(step: Step) -> None:
    assert begun_inside(check_same(step))


def test_second_gradient_behind_a_departure_has_all_ranks_sum_again(caplog: pytest.LogCaptureFixture) -> None:
    def step(net: Net, parallel: DataParallel, rank: int, index: int) -> None:
        late = rank == 1 and index >= MICRO_BATCHES  # not from the start, and not on all ranks
        x = data(rank, index).requires_grad_()
        if late:  # the first layer, whose gradient comes last, makes the last layer's come once more
            x = checkpoint(net.layers[-1], x, use_reentrant=True)
        parallel.backward(net(x).square().mean())

    with caplog.at_level(logging.INFO, "stretto"):
        trace = check_same(step, torn=True)
    told = [record.getMessage() for record in caplog.records if "sums the round again" in record.getMessage()]
    assert told
    assert [message for message in told if "on ranks [1]" not in message] == []
    # The first update hides, the second is torn, and nothing leaves early from then on.
    stops = [
        r.stop_ns for r in trace.records if isinstance(r, Span) and (r.rank, r.work) == (0, "micro-batch")
    ]
    starts = begun_inside(trace)
    assert min(starts) < stops[MICRO_BATCHES - 1]
    assert max(starts) < stops[2 * MICRO_BATCHES - 1]


def test_late_write_of_a_hook_has_all_ranks_sum_again(caplog: pytest.LogCaptureFixture) -> None:
    def prepare(net: Net) -> None:
        def hook(_: Tensor) -> None:
            net.layers[-1].weight.grad.mul_(0.5)

        net.layers[0].weight.register_hook(hook)

    with caplog.at_level(logging.INFO, "stretto"):
        check_same(plain, prepare, torn=True)
    assert "sums the round again" in caplog.text


def damaging(where: tuple[int, int], layer: int, place: int, factor: float, kept: bool) -> Step:
    """Return a step that damages the model, before it runs, on the rank and micro-batch that `where` names."""

    def step(net: Net, parallel: DataParallel, rank: int, index: int) -> None:
        if (rank, index) == where:
            net.layers[layer].weight.detach().numpy().reshape(-1)[place] *= factor
        if kept:
            parallel.micro_batch(lambda x: net(x).square().mean(), data(rank, index))
        else:
            plain(net, parallel, rank, index)

    return step


def test_wherever_and_whenever_the_model_is_damaged_the_result_is_that_of_the_unhidden_job() -> None:
    draws = random.Random(5)
    for strategy, world_size, kept in part(itertools.product([DDP(), ZeRO1()], [2, 3], [True, False])):
        where = draws.randrange(world_size), draws.randrange(UPDATES * MICRO_BATCHES)
        layer, place = draws.randrange(LAYERS), draws.randrange(WIDTH * WIDTH)
        factor = draws.choice([-1.0, 0.0, 1.5, 1e30])
        step = damaging(where, layer, place, factor, kept)
        settings = {"strategy": strategy, "guards": "standard", "world_size": world_size}
        hidden, _ = train(step, torn=True, **settings)
        unhidden, _ = train(step, hide=False, **settings)
        for ours, theirs in zip(hidden, unhidden, strict=True):
            assert unequal(ours, theirs) == []


def test_model_with_backward_hooks_on_modules_does_not_hide() -> None:
    def prepare(net: Net) -> None:
        def hook(*_: object) -> None:
            net.layers[-1].weight.grad.data.mul_(0.5)

        net.layers[1].register_full_backward_hook(hook)

    assert begun_inside(check_same(plain, prepare)) == []


@pytest.mark.parametrize(
    ("settings", "overlaps_backward"),
    [
        ({}, True),
        ({"strategy": DDP()}, True),
        ({"strategy": PAFTSync()}, True),
        ({"guards": (ReplicaGuard(),), "strategy": DDP()}, True),
        ({"strategy": PAFTSync(overlap=True)}, False),
        ({"strategy": ACCO()}, False),
        ({"micro_batches": Clock()}, False),
        ({"guards": (AtRest(),)}, True),
        ({"guards": "standard", "strategy": DDP()}, True),
        ({"guards": (AtRest(),), "wire": "int8"}, False),  # it looks at what the wire owes, which leaves too
        ({"guards": (Audit(rate=1.0),)}, False),
        ({"world_size": 1}, False),
        ({"hide": False}, False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_job_that_cannot_hide_accumulates_as_ever(
    settings: dict[str, Any], overlaps_backward: bool
) -> None:
    kinds = []

    def step(net: Net, parallel: DataParallel, rank: int, index: int) -> None:
        kinds.append(type(parallel.job.compute.accumulation) is EarlyAccumulation)
        parallel.micro_batch(lambda x: net(x).square().mean(), data(rank, index))

    train(step, torn=not overlaps_backward, **settings)
    assert set(kinds) == {overlaps_backward}


class Breaks(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError("planted")


def break_on_a_process(rank: int) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    options = Options(bucket_bytes=1024, timeout_seconds=60.0)
    with DataParallel(net, optimizer, DDP(), micro_batches=MICRO_BATCHES, options=options) as parallel:
        for index in range(UPDATES * MICRO_BATCHES):
            x = torch.tanh(net.layers[0](data(rank, index)))
            if rank == 1 and index == UPDATES * MICRO_BATCHES - 1:  # half of the gradients have left by then
                x = Breaks.apply(x)
            parallel.backward(net(x, (1, 2, 3)).square().mean())


def test_error_in_the_middle_of_a_backward_pass_ends_all_processes_with_its_cause() -> None:
    first, second = rank_outcomes(2, break_on_a_process, timeout_seconds=60)
    assert "ZeroDivisionError: planted" in (second.error or "")
    assert "PeerFailed" in (first.error or "")
    assert "rank 1" in (first.error or "")
    assert "planted" in (first.error or "")
