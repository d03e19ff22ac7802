"""An arm is one line of text: a strategy, its options, settings of its own."""

import dataclasses
import random

import pytest

from stretto.engine import Clock
from stretto.errors import ConfigError, UnknownName
from stretto.fields import field_types, named_settings
from stretto.strategies import ACCO, STRATEGIES, Average, DiLoCo, LocalSGD, Strategy
from stretto_lab.train.arms import parse_arm, parse_arms, parse_clock, split_list
from stretto_lab.train.configuration import CompareConfig, Job, RunConfig
from tests.draws import seeds
from tests.train.tiny import Tiny


def test_a_comma_before_a_digit_belongs_to_a_clock() -> None:
    arms = split_list("compute, acco:wire=bf16:clock=1,8,torch-ddp,wp:clock=2,16")
    assert arms == ("compute", "acco:wire=bf16:clock=1,8", "torch-ddp", "wp:clock=2,16")


def test_an_arm_carries_options_of_its_strategy_and_settings_of_its_run() -> None:
    arm = parse_arm("acco:first=1:wire=bf16:lr=2e-3:micro_batches=6")
    run = Job(task=Tiny()).run_of(arm)
    assert arm.strategy() == ACCO(first=1)
    assert (run.wire, run.micro_batches, run.task.lr) == ("bf16", 6, 2e-3)
    assert run.strategy == arm.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("average", Average(4, 2, 1)),
        ("average:4", Average(4, 2, 1)),
        ("average:every=10", Average(10, 5, 1)),
        ("average:30:fragments=10", Average(30, 10, 2)),
        ("average:3", Average(3, 1, 2)),
        ("average:1", Average(1, 1, 0)),
        ("average:10:fragments=1:delay=0", Average(10, 1, 0)),
        ("acco:1", ACCO(first=1)),
        ("diloco:30:delay=2", DiLoCo(interval=30, delay=2)),
        (
            "local:rate=0.25:plan=bernoulli:max_gap=50:state=on:seed=3",
            LocalSGD(rate=0.25, plan="bernoulli", max_gap=50, state=True, seed=3),
        ),
    ],
)
def test_options_are_read_by_the_kind_of_their_defaults_and_a_number_that_comes_first_is_the_first(
    text: str, expected: Strategy
) -> None:
    assert parse_arm(text).strategy() == expected


@pytest.mark.parametrize("seed", seeds(60))
def test_what_a_text_was_resolved_to_says_all_options_and_the_same(seed: int) -> None:
    draw = random.Random(seed)
    name = draw.choice([name for name in STRATEGIES if name not in ("paft-dyn",)])
    some = {
        "acco": ["first=1"],
        "average": ["every=6", "fragments=2", "delay=0", "worker=node"],
        "local": ["rate=0.25", "plan=bernoulli", "max_gap=7", "state=on", "seed=3", "rate=cosine(1,0.1)"],
        "diloco": ["interval=12", "outer_lr=0.5", "nesterov=off", "delay=1", "mix=0.25"],
        "paft-sync": ["interval=5", "state=on"],
    }
    given = {part.partition("=")[0]: part for part in some.get(name, []) if draw.random() < 0.5}
    text = ":".join([name, *given.values(), *draw.sample(["wire=int4", "lr=0.5", "micro_batches=8"], 2)])
    arm = parse_arm(text)
    resolved = parse_arm(arm.resolved)
    assert (resolved.strategy(), resolved.settings) == (arm.strategy(), arm.settings)
    assert resolved.resolved == arm.resolved
    values = {name: getattr(arm.strategy(), name) for name in field_types(type(arm.strategy()))}
    left_out = {name for name, value in values.items() if value is None or name == "seed"}
    assert set(values) - left_out <= set(named_settings(arm.resolved, ()))


@pytest.mark.parametrize("name", ["ddp", "zero1", "compute", "torch-ddp"])
def test_a_method_without_a_communication_lane_has_no_clock(name: str) -> None:
    job = Job(task=Tiny(), clock=Clock(), micro_batches=3)
    run = job.run_of(parse_arm(name))
    assert (run.clock, run.micro_batches) == (None, 3)


def test_micro_batches_of_an_arm_replace_the_clock_of_the_job() -> None:
    job = Job(task=Tiny(), clock=Clock())
    assert job.run_of(parse_arm("acco:micro_batches=2")).clock is None


@pytest.mark.parametrize(
    ("text", "error", "named"),
    [
        ("bogus", UnknownName, "zero1"),
        ("acco:frist=1", UnknownName, "first"),
        ("ddp:first=1", UnknownName, "wire"),
        ("acco:first=one", ConfigError, "first='one'"),
        ("acco:clock=8", ConfigError, "MIN,MAX"),
        ("ddp:exchange=native", UnknownName, "wire"),
        ("acco:lr=", ConfigError, "lr=''"),
        ("local:state=yes", ConfigError, "expected on or off"),
        ("local:_pace=1", UnknownName, "max_gap"),
        ("average:4:every=8", ConfigError, "remove the other"),
        ("average:0", ConfigError, "at least 1 update"),
        ("average:4:fragments=5", ConfigError, "fragments=5, every=4"),
        ("average:4:delay=2", ConfigError, "from 0 to 1"),
        ("average:fragments=0", ConfigError, "at least 1 fragment"),
        ("average:many", UnknownName, "every"),
    ],
)
def test_an_arm_that_cannot_be_read_is_an_error_that_names_what_is_known(
    text: str, error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        parse_arm(text)


def test_an_arm_that_stands_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        parse_arms(["ddp", "ddp"])


def test_a_clock_is_two_numbers() -> None:
    assert parse_clock("2,16") == Clock(minimum=2, maximum=16)
    with pytest.raises(ConfigError, match="1 <= minimum <= maximum"):
        parse_clock("4,2")


def test_a_format_that_arms_share_is_set_for_those_that_can_use_it_and_set_none() -> None:
    job = CompareConfig(task=Tiny(), wire="int8", changes="int4")
    fitted = {
        text: job.fitted_to(parse_arm(text)).run_of(parse_arm(text))
        for text in ("ddp", "zero1", "acco:wire=int4", "compute")
    }
    assert {text: (run.wire, run.changes) for text, run in fitted.items()} == {
        "ddp": ("int8", None),
        "zero1": ("int8", "int4"),
        "acco:wire=int4": ("int4", "int4"),
        "compute": ("int8", None),
    }


def test_a_run_stays_in_its_folder_whatever_its_arm_sets() -> None:
    run = RunConfig(task=Tiny(), strategy="wp:wire=bf16", run_dir="run", resume=True, checkpoint_every=7)
    configured = run.run_of(parse_arm(run.strategy))
    assert configured == dataclasses.replace(run, wire="bf16")
