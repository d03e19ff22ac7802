"""One rank's run: who sees which samples, when it ends, and that looking changes nothing."""

import dataclasses
import math

import pytest

from stretto.engine import Clock
from tests.train.runs import evaluations, model_bits, records, tiny_run, train

OURS = ("ddp", "zero1", "dpu", "wp", "acco")
STOCK = ("compute", "torch-ddp")


@pytest.mark.parametrize("strategy", [*OURS, *STOCK])
def test_with_fixed_counts_every_method_makes_the_updates_asked_for_from_the_same_samples(
    strategy: str,
) -> None:
    (first, second) = train(tiny_run(strategy=strategy, updates=5, micro_batches=2))
    assert (first.updates, second.updates) == (5, 5)
    assert first.samples == 5 * 2 * 2 * 8  # updates, micro-batches, ranks, points
    assert first.heldout_loss < first.heldout_before


@pytest.mark.parametrize("strategy", OURS)
def test_looking_and_saving_change_nothing(strategy: str) -> None:
    train(tiny_run("seen", strategy=strategy, evaluate_every=2, checkpoint_every=2))
    train(tiny_run("unseen", strategy=strategy, evaluate_every=None, checkpoint_every=None))
    assert records("seen") == records("unseen")
    assert model_bits("seen") == model_bits("unseen")
    assert evaluations("unseen") == [evaluations("seen")[0], evaluations("seen")[-1]]


@pytest.mark.parametrize("strategy", ["wp", "acco"])
def test_a_clock_makes_the_updates_asked_for(strategy: str) -> None:
    (outcome, _) = train(tiny_run(strategy=strategy, updates=5, clock=Clock(minimum=1, maximum=3)))
    assert outcome.updates == 5


@pytest.mark.parametrize("strategy", ["acco", "zero1", "torch-ddp", "compute"])
def test_seconds_end_a_run_on_all_ranks(strategy: str) -> None:
    run = tiny_run(strategy=strategy, updates=None, seconds=0.2, evaluate_every=None, checkpoint_every=None)
    (first, second) = train(run)
    assert 0.2 <= first.training_seconds < 10
    assert strategy == "compute" or first.updates == second.updates


def test_a_reached_loss_ends_a_run_and_is_timed() -> None:
    run = tiny_run(updates=1000, to_loss=1.0, evaluate_every=2)
    (first, second) = train(run)
    assert first.updates == second.updates < 1000
    assert 0 < first.seconds_to_loss < first.training_seconds
    above = [one for one in first.evaluations if one.training_seconds < first.seconds_to_loss]
    assert min(one.heldout_loss for one in above) > 1.0 >= first.heldout_loss


def test_a_loss_that_is_not_reached_has_no_time() -> None:
    (first, _) = train(tiny_run(updates=4, to_loss=0.0))
    assert (first.updates, first.seconds_to_loss) == (4, None)


def test_the_records_of_a_run_are_complete() -> None:
    (outcome, _) = train(tiny_run("run", updates=4))
    written = records("run")
    assert [record["step"] for record in written] == [1, 2, 3, 4]
    assert {"loss", "gradient_norm", "learning_rates", "staleness", "micro_batches"} <= set(written[0])
    assert all(math.isfinite(record["loss"]) for record in written)
    assert sum(record["samples"] for record in written) == outcome.samples


def test_schedules_turn_once_per_update() -> None:
    train(tiny_run("run", strategy="zero1", updates=4))
    rates = [record["learning_rates"][0] for record in records("run")]
    assert rates == pytest.approx([0.01 * 0.97**step for step in range(4)], rel=1e-12)


def test_ranks_draw_from_states_of_their_own_and_runs_repeat() -> None:
    train(tiny_run("first"))
    train(tiny_run("again"))
    train(dataclasses.replace(tiny_run("other"), seed=1))
    assert records("first") == records("again")
    assert records("first") != records("other")


def test_one_worker_is_enough() -> None:
    (outcome,) = train(tiny_run(updates=3), world_size=1)
    assert (outcome.updates, outcome.sent_bytes) == (3, 0)


@pytest.mark.parametrize("strategy", OURS)
def test_an_evaluation_sees_what_a_run_that_ends_there_leaves(strategy: str) -> None:
    train(tiny_run("long", strategy=strategy, updates=6, evaluate_every=3))
    train(tiny_run("short", strategy=strategy, updates=3, evaluate_every=None))
    assert evaluations("long")[1] == evaluations("short")[1]
