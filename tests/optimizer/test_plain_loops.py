"""What is accepted trains as a plain loop does, to the bit, on any number of ranks."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, optim

from stretto import ACCO, DDP, ZeRO1
from stretto.errors import UnsupportedOptimizer
from tests.draws import seeds
from tests.optimizer.bowls import Bowls, assert_equal, groups_of, plain, trained
from tests.optimizer.written import ELEMENT_WISE, WHOLE, Written

STRATEGIES = {"zero1": ZeRO1, "ddp": DDP, "acco": ACCO}


@pytest.mark.long(keep=12)
@pytest.mark.parametrize(("strategy", "world_size"), [("zero1", 3), ("ddp", 2), ("acco", 1)])
@pytest.mark.parametrize("name", [*ELEMENT_WISE, *WHOLE])
def test_accepted_optimizer_equals_a_plain_loop(name: str, strategy: str, world_size: int) -> None:
    make = {**ELEMENT_WISE, **WHOLE}[name]
    # Matrices in one group, a vector in the other.
    case = [(9, 31), (31,), (70, 3)], lambda model: make(groups_of(model, 2, [{}, {"lr": 0.003}]))
    found = trained(*case, STRATEGIES[strategy](), world_size)
    assert_equal(found, plain(*case, STRATEGIES[strategy](), world_size))


def cosine(p: Tensor, g: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(p.flatten(), g.flatten(), dim=0))


WHEN: dict[str, Callable[[Tensor, Tensor, int, int], bool]] = {
    "always": lambda p, g, step, bound: True,
    "from a step on": lambda p, g, step, bound: step > bound,
    "every few steps": lambda p, g, step, bound: step % bound == 0,
    "from so many rows on": lambda p, g, step, bound: p.dim() > 0 and p.shape[0] >= 16 * bound,
    "from so many elements on": lambda p, g, step, bound: p.numel() >= 16 * bound,
    "of matrices": lambda p, g, step, bound: p.dim() > 1,
    "wide": lambda p, g, step, bound: p.dim() > 1 and p.shape[1] > 4 * p.shape[0],
    "along the values": lambda p, g, step, bound: cosine(p, g) > 0.8,
    "where the norm is small": lambda p, g, step, bound: float(g.norm()) < bound,
    "where the values are large": lambda p, g, step, bound: float(p.abs().max()) > 2,
}
"""When a rule acts, by what it looks at."""
RULES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "unit": lambda p, g: g / (g.norm() + 1e-6),
    "radial part left out": lambda p, g: g - p * (p * g).sum() / (p.square().sum() + 1e-6),
    "trust": lambda p, g: g * p.norm() / (g.norm() + 1e-6),
    "factored": lambda p, g: g / (g.square().mean(-1, keepdim=True).sqrt() + 1e-3) if g.dim() else g,
    "largest alone": lambda p, g: torch.where(g.abs() == g.abs().max(), g, torch.zeros_like(g)),
    "centred": lambda p, g: g - g.mean(),
    "turned round": lambda p, g: g.flip(0) if g.dim() else -g,
    "sign": lambda p, g: g.sign(),
}
"""What a rule makes of a gradient."""


class Drawn(Written):
    """A rule that acts where its condition holds, over momentum; steps are counted where the settings say."""

    settings = {"lr": 0.05, "rule": "sign", "when": "always", "bound": 3, "counts": "state", "steps": 0}  # noqa: RUF012  # as the classes beside it

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if group["counts"] == "group":
                group["steps"] += 1
            elif group["counts"] == "itself":
                self.steps += 1
        super().step()

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        average = state.setdefault("average", torch.zeros_like(p)).lerp_(g, 0.5)
        counted = {"state": state["step"], "group": group["steps"], "itself": self.steps}[group["counts"]]
        acts = WHEN[group["when"]](p, g, counted, group["bound"])
        p.sub_(group["lr"] * (RULES[group["rule"]](p, average) if acts else average))


@pytest.mark.long(keep=6)
@pytest.mark.parametrize("seed", seeds(120))
def test_an_optimizer_with_a_drawn_rule_is_right_or_refused(seed: int) -> None:
    draw = random.Random(seed)
    settings = [
        {
            "rule": draw.choice(list(RULES)),
            "when": draw.choice(list(WHEN)),
            "bound": draw.choice([2, 3, 7, 15]),
            "counts": draw.choice(["state", "state", "group", "group", "itself"]),
            "lr": draw.uniform(0.001, 0.1),
        }
        for _ in range(draw.randint(1, 2))
    ]
    sizes = [1, 3, 8, 33, 130]
    shapes = [
        tuple(draw.choice(sizes) for _ in range(draw.randint(0, 2)))
        for _ in range(draw.randint(len(settings), 5))
    ]

    def make(model: Bowls) -> optim.Optimizer:
        return Drawn(groups_of(model, len(settings), settings))

    case = shapes, make, STRATEGIES[draw.choice(list(STRATEGIES))](), draw.randint(1, 3)
    try:
        found = trained(*case, updates=20)
    except UnsupportedOptimizer:
        assert any(one["counts"] == "itself" for one in settings)
    else:
        assert_equal(found, plain(*case, updates=20))
