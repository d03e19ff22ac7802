"""Every strategy trains parameters of any shape: a number, a single element, no elements at all."""

import pytest
import torch
from torch import Tensor, nn

from stretto import Average, DataParallel, DiLoCo, LocalSGD, PAFTDyn, PAFTSync
from stretto.strategies import STRATEGIES, Strategy
from stretto_lab.virtual import VirtualCluster, VirtualGroup

SOON: dict[str, Strategy] = {
    "average": Average(2),
    "local": LocalSGD(rate=0.5),
    "diloco": DiLoCo(interval=2),
    "paft-sync": PAFTSync(interval=1),
    "paft-dyn": PAFTDyn(first=1, maximum=2),
}
"""Strategies that average rarely, made to average in a short run."""
SHAPES = {"nothing": [(0, 3)], "a number": [()], "all of these": [(1,), (0,), (), (2, 0, 3), (1, 1)]}


def trained(
    strategy: Strategy, shapes: list[tuple[int, ...]], rank: int, group: VirtualGroup
) -> list[Tensor]:
    """Return the parameters after six updates and the end, of a loss that pulls them to the numbers of the ranks."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    parallel = DataParallel(model, optimizer, strategy, micro_batches=2, guards="standard", group=group)
    for _ in range(12):
        parallel.backward(sum(((parameter - rank) ** 2).sum() for parameter in model))
    with parallel.settled():
        pass
    parallel.finish()
    return [parameter.detach().clone() for parameter in model]


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_trains_parameters_of_any_shape(name: str, shapes: list[tuple[int, ...]]) -> None:
    strategy = SOON.get(name) or STRATEGIES[name]()
    first, second = VirtualCluster(2).run(lambda rank, group: trained(strategy, shapes, rank, group)).values
    for shape, one, other in zip(shapes, first, second, strict=True):
        assert one.shape == shape
        assert torch.equal(one, other)
        assert bool((one > 0).all()), "the mean of the ranks' numbers is above zero"
