"""What is accepted trains as a plain loop does, to the bit, on any number of ranks."""

import random
from typing import Any

import pytest
from torch import optim

from stretto import ACCO, DDP, ZeRO1
from stretto.errors import UnsupportedOptimizer
from stretto.optimizer import whole_groups
from tests.optimizer.bowls import Bowls, assert_equal, groups_of, plain, trained
from tests.optimizer.written import ELEMENT_WISE, ClipsByNorm, CountsInGroup, Lamb, Lion, Lookahead

STRATEGIES = {"zero1": ZeRO1, "ddp": DDP, "acco": ACCO}


@pytest.mark.parametrize(("strategy", "world_size"), [("zero1", 3), ("ddp", 2), ("acco", 1)])
@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_accepted_optimizer_equals_a_plain_loop(name: str, strategy: str, world_size: int) -> None:
    case = (
        [(9, 31), (31,), (70, 3)],
        lambda model: ELEMENT_WISE[name](groups_of(model, 2, [{}, {"lr": 0.003}])),
    )
    found = trained(*case, STRATEGIES[strategy](), world_size)
    assert_equal(found, plain(*case, STRATEGIES[strategy](), world_size))


def random_settings(draw: random.Random, kind: type[optim.Optimizer]) -> dict[str, Any]:
    """Draw the settings of one group."""
    settings = {
        optim.SGD: {"momentum": draw.choice([0.0, 0.9]), "weight_decay": draw.choice([0.0, 0.1])},
        optim.AdamW: {"betas": (draw.random(), 0.9), "amsgrad": draw.random() < 0.5},
        optim.RMSprop: {"momentum": draw.choice([0.0, 0.5]), "centered": draw.random() < 0.5},
        Lion: {"weight_decay": draw.random()},
        Lookahead: {"period": draw.randint(1, 3)},
        Lamb: {"weight_decay": draw.choice([0.0, 0.0, 0.1])},
        ClipsByNorm: {"bound": 10.0 ** draw.randint(-2, 2)},
        CountsInGroup: {},
    }
    return {**settings[kind], "lr": draw.uniform(0.001, 0.1)}


KINDS = [optim.SGD, optim.AdamW, optim.RMSprop, Lion, Lookahead, Lamb, ClipsByNorm, CountsInGroup]


@pytest.mark.parametrize("part", range(4))
def test_random_optimizers_are_right_or_refused(part: int) -> None:
    accepted = 0
    for seed in range(part, 200, 4):
        draw = random.Random(seed)
        kind = draw.choice(KINDS)
        settings = [random_settings(draw, kind) for _ in range(draw.randint(1, 3))]
        shapes = [
            tuple(draw.randint(1, 12) for _ in range(draw.randint(0, 3)))
            for _ in range(draw.randint(len(settings), 5))
        ]

        def make(model: Bowls, kind: Any = kind, settings: Any = settings) -> optim.Optimizer:
            return kind(groups_of(model, len(settings), settings))

        if kind in (ClipsByNorm, CountsInGroup):
            with pytest.raises(UnsupportedOptimizer):
                whole_groups(make(Bowls(shapes)))
            continue
        accepted += 1
        strategy, world_size = STRATEGIES[draw.choice(list(STRATEGIES))](), draw.randint(1, 3)
        found = trained(shapes, make, strategy, world_size)
        assert_equal(found, plain(shapes, make, strategy, world_size))
    assert accepted > 25
