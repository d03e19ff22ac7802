"""A learning rate that is set by hand in `on_update` holds for the next update, under every strategy."""

import pytest

from stretto.records import Update
from stretto.strategies import STRATEGIES
from tests.loops.habits import batches, job, mean_square, network


def rate(step: int) -> float:
    return 0.001 * (step + 1)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_update_has_the_rate_that_was_set_after_the_one_before(name: str) -> None:
    parallel = job(network(), STRATEGIES[name]())
    found: list[float] = []

    def updated(update: Update) -> None:
        found.append(update.learning_rates[0])
        for group in parallel.optimizer.param_groups:
            group["lr"] = rate(update.step)

    parallel.optimizer.param_groups[0]["lr"] = rate(0)
    for batch in parallel.feed(batches(16), on_update=updated):
        parallel.backward(mean_square(parallel.model, batch))
    parallel.finish()
    assert found == [rate(step) for step in range(8)]
