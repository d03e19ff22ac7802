"""BatchNorm's running statistics: equal on all ranks where the library says so, and the average of what ranks saw."""

import pytest
import torch
from torch import Tensor

from tests.exactness.jobs import Case, State, build_model, describe, same, stream
from tests.exactness.matrix import WATCHED, observed

SYNCHRONOUS = [i for i, case in enumerate(WATCHED) if not case.strategy.overlaps]
OVERLAPPING = [i for i, case in enumerate(WATCHED) if case.strategy.overlaps]


def averages(case: Case) -> list[State]:
    """Return what the running statistics are after every synchronous update on two ranks.

    They are those of the first layer, so they depend on the data and not on the parameters.
    """
    layers = [build_model(case).normalise for _ in range(2)]
    inputs = [[x for x, *_ in stream(case, rank)] for rank in range(2)]
    results = []
    for start in range(0, len(inputs[0]), 4):
        for layer, batches in zip(layers, inputs, strict=True):
            for x in batches[start : start + 4]:
                layer(x)
        mean = [mean_of_two(a, b) for a, b in zip(*map(statistics_in, layers), strict=True)]
        for layer in layers:
            for buffer, value in zip(statistics_in(layer), mean, strict=True):
                buffer.copy_(value)
        results.append(mean)
    return results


def statistics_in(layer: torch.nn.Module) -> State:
    return [buffer for buffer in layer.buffers() if buffer.is_floating_point()]


def mean_of_two(left: Tensor, right: Tensor) -> Tensor:
    return torch.zeros_like(left).add_(left, alpha=0.5).add_(right, alpha=0.5)


@pytest.mark.parametrize("index", SYNCHRONOUS, ids=lambda i: describe(WATCHED[i]))
def test_synchronous_buffers_are_the_average_at_every_update(index: int) -> None:
    for found in (rank[index] for rank in observed("watched")):
        assert len(found.statistics) == 4
        assert [
            pair for pair in zip(found.statistics, averages(WATCHED[index]), strict=True) if not same(*pair)
        ] == []
        assert [
            pair for pair in zip(found.live_statistics, found.statistics, strict=True) if not same(*pair)
        ] == []


@pytest.mark.parametrize("index", range(len(WATCHED)), ids=map(describe, WATCHED))
def test_settled_buffers_are_equal_on_all_ranks(index: int) -> None:
    first, second = (rank[index] for rank in observed("watched"))
    assert len(first.statistics) >= 3
    assert [pair for pair in zip(first.statistics, second.statistics, strict=True) if not same(*pair)] == []
    assert same(first.final_statistics, second.final_statistics)
    assert not same(first.statistics[0], first.statistics[-1])


@pytest.mark.parametrize("index", OVERLAPPING, ids=lambda i: describe(WATCHED[i]))
def test_live_buffers_of_overlapping_strategies_run_ahead(index: int) -> None:
    found = observed("watched")[0][index]
    seen = len(found.statistics) - (
        found.behind - found.drained
    )  # after the last micro-batch nothing runs ahead
    assert seen >= 2
    assert not any(map(same, found.live_statistics[:seen], found.statistics[:seen]))
