"""Models of every kind train as in a plain loop, to the bit, or are refused before anything is sent."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stretto.errors import ConfigError, UnsupportedModel
from tests.loops.habits import BOTH_KINDS, Loss, job, mean_square, network, ours, plain, same
from tests.processes import run_ranks


class Tied(nn.Module):
    """An embedding whose weight is the output's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.output = nn.Linear(4, 5, bias=False)
        self.output.weight = self.embed.weight

    def forward(self, batch: Tensor) -> Tensor:
        return self.output(self.embed(words(batch)))


def words(batch: Tensor) -> Tensor:
    return (batch[:, 0].abs() * 2).long().clamp(max=4)


def image(batch: Tensor) -> Tensor:
    return batch.reshape(1, 1, 4, 4).expand(4, 3, 4, 4).contiguous(memory_format=torch.channels_last)


def convolutions() -> nn.Module:
    layers = nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def in_bfloat16(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(batch).float().square().mean()


def checkpointed(use_reentrant: bool) -> Loss:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        inputs = batch.clone().requires_grad_()
        return checkpoint(model, inputs, use_reentrant=use_reentrant).square().mean()

    return loss


def submodules_alone(model: nn.Module, batch: Tensor) -> Tensor:
    return model[2](torch.tanh(model[0](batch))).square().mean()


KINDS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "autocast": (network, in_bfloat16),
    "checkpointed, reentrant": (network, checkpointed(True)),
    "checkpointed": (network, checkpointed(False)),
    "tied": (Tied, mean_square),
    "recurrent": (
        lambda: nn.GRU(4, 5),
        lambda model, batch: (model.flatten_parameters(), model(batch)[0].square().mean())[1],
    ),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), mean_square),
    "forward twice": (network, lambda model, batch: (model(batch) - model(batch + 1)).square().mean()),
    "submodules called alone": (network, submodules_alone),
    "channels last": (convolutions, lambda model, batch: mean_square(model, image(batch))),
    "scripted": (lambda: torch.jit.script(network()), mean_square),
    "scripted in part": (
        lambda: nn.Sequential(torch.jit.script(network()), nn.Linear(2, 3)),
        mean_square,
    ),
    "in evaluation mode": (network, lambda model, batch: mean_square(model.eval(), batch)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # deprecated by one class of warning or another
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize(("make", "loss"), KINDS.values(), ids=KINDS)
def test_a_model_trains_as_in_a_plain_loop(make: Callable[[], nn.Module], loss: Loss) -> None:
    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return make()

    assert same(ours(fresh(), loss), plain(fresh(), loss))
    ours(fresh(), loss, strategy=BOTH_KINDS[1])  # and goes through where rounds overlap


def test_sparse_gradients_train_as_in_a_plain_loop() -> None:
    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return nn.Embedding(5, 4, sparse=True)

    def without_momentum(model: nn.Module) -> torch.optim.Optimizer:  # PyTorch skips rows without gradient
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(words(batch)).square().mean()

    one = ours(fresh(), loss, make_optimizer=without_momentum).weight.detach()
    other = plain(fresh(), loss, optimizer=without_momentum).weight.detach()
    # PyTorch adds each of at most 8 uses of a row to the weight, we add their sum: at most 8 roundings per update on
    # each side, in 4 updates, and the loss draws weights towards each other.
    assert float((one - other).abs().max()) <= 4 * 2 * 8 * 2.0**-24 * float(other.abs().max())
    assert not torch.equal(one, fresh().weight)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(4, 4)


def with_buffer(value: Tensor) -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_buffer("graph", value)
    return model


def with_parameter(value: Tensor) -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_parameter("graph", nn.Parameter(value, requires_grad=value.is_floating_point()))
    return model


RAGGED = [torch.ones(2), torch.ones(3)]
NOT_DENSE: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (lambda: torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
    "sparse rows": (lambda: torch.eye(2).to_sparse_csr(), "layout torch.sparse_csr"),
    "nested": (lambda: torch.nested.nested_tensor(RAGGED), "nested values"),
    "jagged": (lambda: torch.nested.nested_tensor(RAGGED, layout=torch.jagged), "nested values"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized values"),
    "quantized by channel": (
        lambda: torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint8),
        "quantized values",
    ),
    "conjugated": (lambda: torch.ones(2, dtype=torch.complex64).conj(), "lazily conjugated values"),
    "blocked": (lambda: torch.ones(2, 2).to_mkldnn(), "layout torch._mkldnn"),
    "on meta": (lambda: torch.ones(2, device="meta"), "no values yet"),
}
REFUSED = {
    **{
        f"{name} buffer": (lambda make=make: with_buffer(make()), found)
        for name, (make, found) in NOT_DENSE.items()
    },
    **{
        f"{name} parameter": (lambda make=make: with_parameter(make()), found)
        for name, (make, found) in NOT_DENSE.items()
    },
    "nn.DataParallel": (lambda: nn.DataParallel(network()), "found a DataParallel"),
    "wrapped inside": (lambda: nn.Sequential(nn.DataParallel(network())), "found a DataParallel"),
}


@pytest.mark.filterwarnings(
    "ignore:(Sparse CSR|The PyTorch API of nested|torch.quantize_per_tensor):UserWarning"
)
@pytest.mark.parametrize(("make", "found"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_cannot_be_trained_is_refused(make: Callable[[], nn.Module], found: str) -> None:
    with pytest.raises(UnsupportedModel, match=found):
        job(make())


def refused_without_values(rank: int) -> bool:
    with pytest.raises(UnsupportedModel, match="has no values yet"):
        job(on_meta())
    return True


def test_ranks_refuse_a_model_on_a_device_that_no_backend_knows() -> None:
    assert run_ranks(2, refused_without_values) == [True, True]


def test_a_parameter_has_one_job_at_a_time() -> None:
    model = network()
    first = job(model)
    for shared in (model, nn.Sequential(model[0], nn.Linear(8, 1))):
        with pytest.raises(ConfigError, match="call its finish"):
            job(shared)
    first.finish()
    second = job(model)
    second.fail(KeyboardInterrupt("a cell that is run again"))
    job(model).finish()
