"""Noise as it is typed: read, shown, recorded, and refused in plain words."""

import random
from typing import Any

import pytest

from stretto.errors import ConfigError
from stretto.noise import Noise, parse_noise
from stretto_lab.cli.options import parse_options
from stretto_lab.faults import Fault, FaultPlan
from stretto_lab.train.configuration import CompareConfig, RunConfig
from stretto_lab.train.simulation import SimulateConfig
from tests.draws import seeds


def drawn(seed: int) -> Noise:
    chance = random.Random(seed)
    ranks: Any = chance.choice(["all", 3, (0, 2, 5)])
    return Noise(
        chance.choice([0.0, 1e-4, chance.random()]),
        mean=chance.choice([0.0, -chance.random()]),
        every=chance.choice([None, (chance.randint(1, 500), chance.random())]),
        averages=chance.choice([0.0, 1e-7 * chance.random()]),
        rank=ranks,
        seed=chance.choice([None, 0, 7]),
    )


@pytest.mark.parametrize("seed", seeds(50))
def test_noise_is_read_as_it_is_shown(seed: int) -> None:
    assert parse_noise(str(drawn(seed))) == drawn(seed)


def test_the_papers_noise_is_short() -> None:
    assert parse_noise("1e-2") == Noise(0.01)
    assert parse_noise("1e-4,every=500:0.1") == Noise(1e-4, every=(500, 0.1))
    assert parse_noise("1e-2,rank=all") == Noise(0.01)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("much", "cannot read variance 'much'"),
        (
            "1e-2,evry=5:1",
            "noise has no setting 'evry'; there are mean, every, averages, rank, seed; did you mean",
        ),
        ("1e-2,every=500", "cannot read every '500'.*as every=500:0.1"),
        ("1e-2,every=0:1", "expected a burst every 1 or more updates"),
        ("1e-2,rank=one", "cannot read rank 'one'.*rank=1, rank=1\\+3 or rank=all"),
        ("1e-2,rank=-1", "expected ranks from 0"),
        ("-1", "expected variances of at least 0"),
        ("nan", "expected variances of at least 0"),
        ("0,averages=inf", "expected variances of at least 0"),
        ("0,variance=1", "noise has no setting 'variance'"),
        ("0,mean=1,mean=2", "mean is set twice"),
    ],
)
def test_what_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_noise(text)


@pytest.mark.parametrize("kind", [RunConfig, SimulateConfig, CompareConfig])
def test_train_simulate_and_compare_take_noise_and_faults(kind: Any) -> None:
    words = ["digits-resnet", "--noise", "1e-4,every=500:0.1", "--faults", "masters:rank=all:instant=2"]
    _, config = parse_options("any", words, lambda task: kind(task=task))
    assert config.noise == Noise(1e-4, every=(500, 0.1))
    assert config.faults == (Fault(site="masters", rank="all", instant=2),)


def test_a_fault_on_all_ranks_draws_from_another_seed_on_each() -> None:
    plan = FaultPlan((Fault(site="sum", rank="all", lasts="sticky", seed=5), Fault(site="step", rank=1)))
    assert plan.of_rank(0) == (Fault(site="sum", rank=0, lasts="sticky", seed=5),)
    assert plan.of_rank(1) == (Fault(site="sum", rank=1, lasts="sticky", seed=6), Fault(site="step", rank=1))
    assert plan.going_on([0]).faults == (Fault(site="sum", rank="all", lasts="sticky", seed=5),)


def test_ranks_that_go_on_without_others_are_hit_under_their_new_numbers() -> None:
    assert Noise(1.0, rank=(1, 3)).going_on([0]).rank == (0, 2)
    assert Noise(1.0, rank=(1, 3)).going_on([1]).rank == (2,)
    assert Noise(1.0, rank=1).going_on([1]).ranks == ()
    assert Noise(1.0).going_on([0]) == Noise(1.0)
