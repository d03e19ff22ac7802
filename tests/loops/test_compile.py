"""A compiled model is traced once and whole, trains as the eager one does, and saves under the same names."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounter

import stretto
from stretto import checkpoint
from stretto.strategies import Strategy
from stretto_lab.virtual import VirtualCluster
from tests.loops.habits import batches, job, mean_square, network, ours, same

Ways = Callable[[nn.Sequential, Strategy, object], tuple[stretto.DataParallel, nn.Module]]


class Written(nn.Sequential):
    """Has a forward of ours: PyTorch 2.11 captures none of its own where a module is compiled in place."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self:
            values = layer(values)
        return values


@pytest.fixture(autouse=True)
def forget_traces() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_before(model: nn.Sequential, strategy: Strategy, backend: object) -> tuple:
    called = torch.compile(model, backend=backend, fullgraph=True)
    return job(called, strategy), called


def compiled_after(model: nn.Sequential, strategy: Strategy, backend: object) -> tuple:
    return job(model, strategy), torch.compile(model, backend=backend, fullgraph=True)


def in_place_before(model: nn.Sequential, strategy: Strategy, backend: object) -> tuple:
    model.compile(backend=backend, fullgraph=True)
    return job(model, strategy), model


def in_place_after(model: nn.Sequential, strategy: Strategy, backend: object) -> tuple:
    parallel = job(model, strategy)
    model.compile(backend=backend, fullgraph=True)
    return parallel, model


def a_part_of_it(model: nn.Sequential, strategy: Strategy, backend: object) -> tuple:
    model[0] = torch.compile(model[0], backend=backend, fullgraph=True)
    return job(model, strategy), model


WAYS = [compiled_before, compiled_after, in_place_before, in_place_after, a_part_of_it]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_compiled_model_is_one_graph_and_trains_to_the_bit(way: Ways) -> None:
    strategy = stretto.ACCO()  # whose rounds take off in a forward pass
    backend = CompileCounter()  # runs the captured graph as it is, so that its arithmetic is the eager one's
    model = Written(*network())
    parallel, called = way(model, strategy, backend)
    for batch in parallel.feed(batches()):
        parallel.backward(mean_square(called, batch))
    parallel.finish()
    assert backend.frame_count == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert same(model, ours(network(), strategy=strategy))


def test_ahead_of_time_autograd_trains_to_the_bit() -> None:
    model = network()
    parallel, called = compiled_before(model, stretto.ZeRO1(), "aot_eager")
    for batch in parallel.feed(batches()):
        parallel.backward(mean_square(called, batch))
    parallel.finish()
    assert same(model, ours(network()))


def test_a_compiled_step_that_calls_backward_trains_to_the_bit() -> None:
    model = network()
    parallel = job(model)
    step = torch.compile(lambda batch: parallel.backward(mean_square(model, batch)), backend="eager")
    for batch in parallel.feed(batches()):
        step(batch)
    parallel.finish()
    assert same(model, ours(network()))


def test_two_ranks_train_a_compiled_model_to_the_bit() -> None:
    def program(rank: int, group: dist.ProcessGroup, backend: object) -> torch.Tensor:
        model = network()
        parallel = job(model, group=group)
        called = torch.compile(model, backend=backend, fullgraph=True) if backend else model
        for batch in parallel.feed(batches()[rank::2]):
            parallel.backward(mean_square(called, batch))
        parallel.finish()
        return model[0].weight.detach().clone()

    found = [
        VirtualCluster(2).run(lambda rank, group, b=backend: program(rank, group, b)).values
        for backend in ("eager", None)
    ]
    assert [
        (values, weight) for values in found for weight in values if not torch.equal(weight, found[1][0])
    ] == []


@pytest.mark.parametrize("way", [compiled_before, a_part_of_it], ids=lambda way: way.__name__)
@pytest.mark.parametrize("is_saved_compiled", [True, False], ids=["saved compiled", "loaded compiled"])
def test_compiled_and_eager_jobs_read_each_others_checkpoints(way: Ways, is_saved_compiled: bool) -> None:
    def make(is_compiled: bool) -> tuple[stretto.DataParallel, nn.Module, nn.Sequential]:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        made = way(model, stretto.ZeRO1(), "eager") if is_compiled else (job(model), model)
        return *made, model

    saving, called, trained = make(is_saved_compiled)
    for batch in saving.feed(batches()):
        saving.backward(mean_square(called, batch))
    checkpoint.save(saving, "checkpoints")
    loading, _, fresh = make(not is_saved_compiled)
    assert checkpoint.load(loading, "checkpoints").notes == ()
    saving.finish()
    loading.finish()
    assert same(trained, fresh)
    assert [slot for slot in saving.job.layout.slots if not "_orig_mod" not in slot.name] == []
