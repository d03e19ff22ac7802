"""What an evaluation sees: committed parameters, or a warning."""

import functools
import logging

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import stretto
from stretto.strategies import STRATEGIES
from stretto_lab.virtual import VirtualCluster
from tests.bits import unequal
from tests.loops.habits import batches, mean_square


def train(
    rank: int, group: dist.ProcessGroup, strategy: str, *, looks: bool
) -> tuple[list[Tensor], list[bool]]:
    """Return the final parameters, and after each micro-batch whether an evaluation sees what `evaluate` sees."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model[2].eval()  # stays so
    parallel = stretto.DataParallel(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.05),
        STRATEGIES[strategy](),
        micro_batches=2,
        group=group,
    )
    alike = []
    for batch in batches():
        parallel.backward(mean_square(model, batch + rank))
        if looks:
            seen = parallel.evaluate(lambda: (torch.is_grad_enabled(), model(batches()[0])))
            with parallel.settled(), torch.no_grad():
                committed = model.eval()(batches()[0])
            assert seen[0] is False
            assert torch.equal(seen[1], committed)
            with torch.no_grad():
                alike.append(torch.equal(model(batches()[0]), committed))
            model.train()
            model[2].eval()
            parallel.evaluate(lambda: None)
            assert [module.training for module in model.modules()] == [True, True, True, False, True]
    parallel.finish()
    return [parameter.detach() for parameter in model.parameters()], alike


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_evaluation_sees_committed_parameters_or_a_warning_and_training_goes_on_as_without_it(
    strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = VirtualCluster(2)
    without = cluster.run(functools.partial(train, strategy=strategy, looks=False)).values
    with caplog.at_level(logging.WARNING, "stretto"):
        found = cluster.run(functools.partial(train, strategy=strategy, looks=True)).values
    warned = [one for one in caplog.messages if "eval() while the model shows an estimate" in one]
    estimates = strategy in ("acco", "wp")  # the others show an update before, or what this rank alone has
    assert len(warned) == estimates * sum(not all(alike) for _, alike in found), warned
    for (ours, _), (theirs, _) in zip(found, without, strict=True):
        assert unequal(ours, theirs) == []
