"""A state saved anywhere, also between two uses of a batch, continues the run that was left."""

import copy
import dataclasses
from typing import Any

import pytest
from torch import Tensor

from stretto import Auto, Bernoulli, EchoLoader, EchoOptions, Even, Ready, errors
from stretto.echo import Cosine, Plan, Selector
from tests.echo.sources import Numbers

PLANS: list[Plan] = [
    Even(1),
    Even(2),
    Even(2.5),
    Even(Cosine(1, 4, 30)),
    Bernoulli(0.4),
    Bernoulli(0.3, max_uses=3),
]
EPOCHS = 2


def used(loader: EchoLoader[Tensor], batch: Tensor) -> tuple[float, int, int]:
    return float(batch), loader.use_index, loader.steps


def run(loader: EchoLoader[Tensor], epochs: int, cut: int | None = None) -> tuple[list[Any], Any]:
    """Hand out `epochs` epochs; with `cut`, stop after so many steps and return the state there."""
    seen: list[Any] = []
    if cut == 0:
        return seen, copy.deepcopy(loader.state_dict())
    for _ in range(epochs):
        for batch in loader:
            seen.append(used(loader, batch))
            if len(seen) == cut:
                return seen, copy.deepcopy(loader.state_dict())
    return seen, None


TRACE = (0, 0, 1, 0, 2, 1, 3, 3, 4, 2, 5, 6, 6, 7, 5)
"""Of a plan with several held batches."""


@dataclasses.dataclass(frozen=True)
class Traced(Plan):
    """Uses batches in the order of a trace."""

    trace: tuple[int, ...] = TRACE
    pool = 6
    decides_by_update = False

    def selector(self, seed: int) -> Selector:
        return _TracedSelector(self.trace)


class _TracedSelector(Selector):
    def __init__(self, trace: tuple[int, ...]) -> None:
        self._trace = trace

    def select(self, update: int, held: Any, is_ready: Any) -> Any:
        return next((one for one in held if [one.number] == [*self._trace[update : update + 1]]), None)


def epochs_left(state: dict[str, Any], length: int) -> int:
    """Epochs to go, the one under way included."""
    passed = state["position"]["epoch_fresh"] // length
    return EPOCHS - passed if state["position"]["in_epoch"] else EPOCHS - state["position"]["fresh"] // length


@pytest.mark.filterwarnings("ignore:.*to resume, Stretto reads")
@pytest.mark.parametrize("remembers", [True, False])
@pytest.mark.parametrize("plan", PLANS, ids=repr)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_run_goes_on_with_the_same_batches_and_decisions_at_every_cut(
    plan: Plan, remembers: bool, micro_batches: int
) -> None:
    length, options = 8, EchoOptions(seed=5, micro_batches=micro_batches)

    def fresh_loader() -> EchoLoader[Tensor]:
        return EchoLoader(Numbers(length, remembers=remembers), plan, options=options)

    whole, _ = run(fresh_loader(), EPOCHS)
    for cut in range(len(whole)):
        before, state = run(fresh_loader(), EPOCHS, cut)
        loader = fresh_loader()
        if not remembers:
            loader.loader.passes = (
                state["position"]["epoch_fresh"] // length
            )  # the pass a new process would make
        loader.load_state_dict(state)
        after, _ = run(loader, epochs_left(state, length))
        assert before + after == whole, cut


@pytest.mark.parametrize("in_use", [False, True])
def test_several_held_batches_are_taken_up_again_also_by_a_loader_in_use(in_use: bool) -> None:
    whole, _ = run(EchoLoader(Numbers(8), Traced()), 1)
    assert [int(batch) for batch, _, _ in whole] == list(TRACE)
    for cut in range(len(TRACE)):
        before, state = run(EchoLoader(Numbers(8), Traced()), 1, cut)
        loader = EchoLoader(Numbers(8), Traced())
        if in_use:
            run(loader, 1, 4)
        loader.load_state_dict(state)
        assert before + run(loader, 1)[0] == whole, cut


def test_dropping_leaves_out_the_uses_that_were_left_and_nothing_else() -> None:
    options = EchoOptions(resume="drop")
    for cut in range(1, 20):
        before, state = run(EchoLoader(Numbers(8), Even(2.5), options=options), 1, cut)
        loader = EchoLoader(Numbers(8), Even(2.5), options=options)
        loader.load_state_dict(state)
        after, _ = run(loader, 1)
        batches = [batch for batch, _, _ in before]
        remaining = [batch for batch, _, _ in after]
        assert remaining == sorted(remaining), cut
        assert set(remaining) == set(range(8)) - set(batches) or not remaining, cut
        if after:
            assert after[0][1:] == (1, cut + 1)


def test_a_state_that_was_loaded_is_the_state_until_the_run_goes_on() -> None:
    loader = EchoLoader(Numbers(5), Even(2.5))
    _, state = run(loader, 1, 4)
    resumed = EchoLoader(Numbers(5), Even(2.5))
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    next(iter(resumed))
    assert resumed.state_dict() != state


def test_a_frozen_measurement_is_kept() -> None:
    loader = EchoLoader(Numbers(100), Auto(window=3, skip=0))
    _, state = run(loader, 1, 10)
    measured = state["selector"]["uses"]
    assert measured >= 1
    resumed = EchoLoader(Numbers(100), Auto(window=3, skip=0))
    resumed.load_state_dict(state)
    next(iter(resumed))
    assert resumed.state_dict()["selector"]["uses"] == measured


def test_another_plan_goes_on_with_the_counts() -> None:
    _, state = run(EchoLoader(Numbers(6), Even(2)), 1, 3)
    loader = EchoLoader(Numbers(6), Ready(max_uses=1))
    loader.load_state_dict(state)
    assert [int(batch) for batch in loader] == [2, 3, 4, 5]
    assert loader.steps == 3 + 4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, r"seed=1\), but here the seed is 0"),
        ({"version": 7}, "found version 7"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Any], named: str) -> None:
    loader = EchoLoader(Numbers(3))
    with pytest.raises(errors.ConfigError, match=named):
        loader.load_state_dict({**loader.state_dict(), **change})


def test_data_that_end_before_the_saved_place_are_named() -> None:
    _, state = run(EchoLoader(Numbers(9, remembers=False), Even(2)), 1, 15)
    loader = EchoLoader(Numbers(3, remembers=False), Even(2))
    with pytest.warns(RuntimeWarning, match="Stretto reads 7 batches and drops them"):
        loader.load_state_dict(state)
    with pytest.raises(errors.ConfigError, match="ended before the position"):
        next(iter(loader))
