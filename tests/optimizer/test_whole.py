"""Optimizers that see whole tensors train as a plain loop does, to the bit, under every strategy.

Sums are taken in the order of ranks on both sides. Where ranks step alone they have equal gradients, and their number
is a power of two: so is each one's share of a mean, and the mean of equal replicas is what they are.
"""

from typing import Any

import pytest
from torch import optim

from stretto.strategies import STRATEGIES, Average, DiLoCo, LocalSGD, PAFTDyn, PAFTSync, Strategy
from tests.optimizer.bowls import Bowls, assert_equal, plain, trained
from tests.optimizer.written import Lamb, Lars

SHAPES = [(9, 31), (31,), (40, 70), (70, 3), (0, 4), (), (5, 7, 3)]
"""One larger than a bucket, one without elements, one without dimensions."""


def muon_and_adamw(model: Bowls) -> list[optim.Optimizer]:
    values = list(model.values)
    return [
        optim.Muon([p for p in values if p.dim() == 2 and p.numel()], lr=0.05),
        optim.AdamW([p for p in values if p.dim() != 2 or not p.numel()], lr=0.1, foreach=True),
    ]


OPTIMIZERS: dict[str, Any] = {
    "muon and adamw": muon_and_adamw,
    "adafactor": lambda model: optim.Adafactor([p for p in model.values if p.numel()], lr=0.1),
    "lamb": lambda model: Lamb(model.values, weight_decay=0.1),
    "lars": lambda model: Lars(model.values),
}
EXCHANGES_EVERY_GRADIENT = ("ddp", "zero1", "dpu", "wp", "acco")


AVERAGES: dict[str, Strategy] = {
    "average": Average(2, fragments=2),
    "local": LocalSGD(rate=0.5, state=True),
    "diloco": DiLoCo(interval=2, outer_lr=1.0, outer_momentum=0.0, fragments=2),
    "paft-sync": PAFTSync(interval=2, state=True),
    "paft-dyn": PAFTDyn(first=2, state=True),
}
"""Strategies that average often, and take the averages as they are."""


CASES = [
    (name, strategy, (1, 2, 4)[(row + column) % 3])
    for row, name in enumerate(OPTIMIZERS)
    for column, strategy in enumerate(STRATEGIES)
]
"""Every pair of an optimizer, a strategy and a number of ranks."""


@pytest.mark.long(keep=6)
@pytest.mark.parametrize(("name", "strategy", "world_size"), CASES)
def test_whole_tensors_are_stepped_as_in_a_plain_loop(name: str, strategy: str, world_size: int) -> None:
    shapes = SHAPES if name != "adafactor" else [shape for shape in SHAPES if 0 not in shape]
    case = shapes, OPTIMIZERS[name], AVERAGES.get(strategy) or STRATEGIES[strategy]()
    if strategy in EXCHANGES_EVERY_GRADIENT:
        assert_equal(trained(*case, world_size), plain(*case, world_size))
    else:  # ranks step alone: equal gradients keep replicas equal
        assert_equal(trained(*case, world_size, alike=True), plain(*case, 1))
