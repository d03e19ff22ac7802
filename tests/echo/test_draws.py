"""Random draws that race: a loader that draws from the process's generators while another thread trains is named."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, WeightedRandomSampler

from stretto import EchoLoader, EchoOptions, Even, Ready
from tests.echo.sources import Squares


class Drawing(Squares):
    """Items that draw a number each."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__(16)
        self.draw = draw

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + 0 * float(self.draw())


OWN = torch.Generator()
DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(1),
    "NumPy": np.random.rand,
    "Python": random.random,
}


def told(loader: EchoLoader[Any], passes: int = 2) -> list[str]:
    """Return the warnings of some passes, in which the loop draws from every generator itself."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(passes):
            for _ in loader:
                for draw in DRAWS.values():
                    draw()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("plan", [Even(1), Even(2.5), Ready()])
@pytest.mark.parametrize("name", DRAWS)
def test_a_data_set_that_draws_on_the_reading_thread_is_named_once(name: str, plan: Any) -> None:
    (message,) = told(EchoLoader(DataLoader(Drawing(DRAWS[name]), shuffle=True), plan))
    assert f"random state of {name} on the reading thread" in message
    assert "EchoOptions(ahead=0)" in message


@pytest.mark.parametrize(
    ("data", "options", "plan"),
    [
        (lambda: DataLoader(Squares(16), shuffle=True), None, Even(2)),
        (lambda: DataLoader(Squares(16), sampler=WeightedRandomSampler([1.0] * 16, 16)), None, Ready()),
        (lambda: DataLoader(Drawing(lambda: torch.rand(1, generator=OWN)), shuffle=True), None, Even(1)),
        (lambda: DataLoader(Drawing(DRAWS["torch"]), num_workers=1), None, Even(1)),
        (lambda: DataLoader(Drawing(DRAWS["torch"])), EchoOptions(ahead=0), Even(1)),
    ],
    ids=["shuffled", "weighted", "generator of its own", "worker", "read by the caller"],
)
def test_draws_that_race_with_nobody_are_not_named(data: Callable[[], Any], options: Any, plan: Any) -> None:
    assert told(EchoLoader(data(), plan, options=options)) == []
