"""One rank's run: who sees which samples, when it ends, and that looking changes nothing."""

import dataclasses
from typing import Any

import pytest

from stretto_lab.train.configuration import RunConfig
from stretto_lab.train.outcome import Outcome
from stretto_lab.train.rank import title_of
from tests.train.runs import evaluations, model_bits, records, tiny_run, train
from tests.train.tiny import Tiny

OURS = ("ddp", "zero1", "dpu", "wp", "acco")
STOCK = ("compute", "torch-ddp")


@dataclasses.dataclass(frozen=True)
class Undisturbed:
    """A run of six updates in which nobody looks and nothing is saved."""

    strategy: str
    folder: str
    outcomes: list[Outcome]


@pytest.fixture(scope="module", params=[*OURS, *STOCK])
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = str(tmp_path_factory.mktemp("undisturbed") / "run")
    run = tiny_run(
        folder, strategy=request.param, updates=6, evaluate_every=None, checkpoint_every=None, micro_batches=2
    )
    return Undisturbed(request.param, folder, train(run))


def test_with_fixed_counts_every_method_makes_the_updates_asked_for_from_the_same_samples(
    undisturbed: Undisturbed,
) -> None:
    (first, second) = undisturbed.outcomes
    assert (first.updates, second.updates) == (6, 6)
    assert first.samples == 6 * 2 * 2 * 8  # updates, micro-batches, ranks, points
    assert first.heldout_loss < first.heldout_before


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("undisturbed", OURS, indirect=True)
def test_looking_and_saving_change_nothing_and_an_evaluation_sees_what_a_run_that_ends_there_leaves(
    undisturbed: Undisturbed,
) -> None:
    chosen = {"strategy": undisturbed.strategy, "evaluate_every": 2}
    train(tiny_run("seen", updates=6, checkpoint_every=2, **chosen))
    unseen = undisturbed.folder
    assert records("seen") == records(unseen)
    assert model_bits("seen") == model_bits(unseen)
    assert [step for step, _ in evaluations("seen")] == [0, 2, 4, 6]
    assert evaluations(unseen) == [evaluations("seen")[0], evaluations("seen")[-1]]
    train(tiny_run("short", updates=4, checkpoint_every=None, **chosen | {"evaluate_every": None}))
    assert evaluations("short")[1] == evaluations("seen")[2]


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


@pytest.mark.parametrize("undisturbed", ["zero1"], indirect=True)
def test_schedules_turn_once_per_update(undisturbed: Undisturbed) -> None:
    rates = [record["learning_rates"][0] for record in records(undisturbed.folder)]
    assert rates == pytest.approx([0.01 * 0.97**step for step in range(6)], rel=1e-12)


TITLES: list[tuple[dict[str, Any], str]] = [
    ({"wire": "fp32"}, "zero1 on 4 workers (cpu)"),
    ({"wire": "int8", "link": "1gbit"}, "zero1 on 4 workers (cpu), wire int8, link 1gbit"),
    (
        {"changes": "int2", "strategy": "acco", "wire": "int4"},
        "acco on 4 workers (cpu), wire int4, changes int2",
    ),
    ({"strategy": "acco:wire=int4", "wire": "int4"}, "acco:wire=int4 on 4 workers (cpu)"),
    ({"slow": {0: 2.0, 1: 3.0}}, "zero1 on 4 workers (cpu), slow 0=2,1=3"),
    ({"shard": 2, "run_dir": "run"}, "zero1 on 4 workers, 2 nodes of 2 shards (cpu), run"),
]


def test_the_first_line_names_what_the_strategy_does_not_name_itself() -> None:
    for settings, title in TITLES:
        assert title_of(RunConfig(task=Tiny(), **settings), 4, "cpu") == title
