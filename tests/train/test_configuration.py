"""What ends a run, and settings that cannot be."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from stretto import Noise
from stretto.engine import Options
from stretto.errors import ConfigError
from stretto.groups import SoloGroup
from stretto.parallel import DataParallel
from stretto.strategies import STRATEGIES
from stretto_lab.train.configuration import CompareConfig, Job, RunConfig
from stretto_lab.train.handle import check_run, open_handle
from tests.train.tiny import Tiny


@pytest.mark.parametrize(
    ("settings", "updates", "seconds"),
    [
        ({}, 240, None),
        ({"updates": 5}, 5, None),
        ({"seconds": 9.0}, None, 9.0),
        ({"updates": 5, "seconds": 9.0}, 5, 9.0),
        ({"to_loss": 1.0}, None, 600.0),
        ({"to_loss": 1.0, "updates": 5}, 5, None),
        ({"to_loss": 1.0, "seconds": 9.0}, None, 9.0),
    ],
)
def test_every_run_has_an_end(settings: dict[str, Any], updates: int | None, seconds: float | None) -> None:
    job = Job(task=Tiny(), **settings)
    assert (job.planned_updates, job.planned_seconds) == (updates, seconds)


def test_the_options_of_the_job_are_those_of_the_run() -> None:
    run = RunConfig(task=Tiny(), wire="bf16", clip_norm=0.5, timeout_seconds=7)
    assert run.options == Options(wire="bf16", clip_norm=0.5, timeout_seconds=7, strikes=3)


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        (Job, {"workers": 0}, "workers must be at least 1, found 0"),
        (Job, {"seed": -1}, "seed must be at least 0, found -1"),
        (Job, {"seconds": 0.0}, "seconds must be positive"),
        (Job, {"link": "fast"}, "fast"),
        (Job, {"wire": "fp8"}, "bf16"),
        (Job, {"to_loss": 1.0, "evaluate_every": None}, "set evaluate_every"),
        (Job, {"guards": ("moon",)}, "no guard is called 'moon'; there are replica, rest"),
        (RunConfig, {"checkpoint_every": 0}, "checkpoint_every"),
        (RunConfig, {"restarts": -1}, "restarts must be at least 0"),
        (RunConfig, {"resume": True}, "set run_dir"),
        (CompareConfig, {"repeats": 0}, "repeats"),
        (CompareConfig, {"strategies": ()}, "at least one strategy"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(kind: Any, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        kind(task=Tiny(), **settings)


CANNOT_RUN: list[tuple[int, dict[str, Any], str]] = [
    (2, {"updates": 3, "samples": 9}, "updates=3 and samples=9: expected one length"),
    (2, {"samples": 0}, "samples must be at least 1"),
    (2, {"samples": 90, "strategy": "local:rate=0.5", "echo": "ready"}, "ranks that step alone do not know"),
    (
        2,
        {"samples": 90, "strategy": "local:rate=0.5", "echo": "even", "nonfinite": "skip"},
        "ranks that step alone do not know",
    ),
    (
        2,
        {"samples": 90, "strategy": "local:rate=cosine(1,0.1)", "echo": "even:uses=2"},
        "expected plan=bernoulli, or the number of updates as a third value",
    ),
    (2, {"strategy": "local:rate=cosine(1,0.1)", "seconds": 1.0}, "needs its number of updates as a third value"),
    (2, {"strategy": "local:rate=often"}, "cannot read rate='often'"),
    (2, {"echo": "evne"}, "no echo plan is called 'evne'"),
    (2, {"echo": "even:uses=cosine(1,3)", "seconds": 1.0}, "third value"),
    (2, {"slow_loader": "3,burn"}, "cannot read the slow loader"),
    (4, {"shard": 3}, "shard=3: expected a divisor of the 4 ranks"),
    (4, {"shard": 2, "strategy": "torch-ddp"}, "strategy='torch-ddp', a stock method"),
    (4, {"shard": 2, "link": "10mbit"}, "link='10mbit', which would slow links inside nodes too"),
    (4, {"shard": 2, "ranks_per_node": 2}, "ranks_per_node, whose ranks FSDP2 has already"),
    (4, {"shard": 2, "noise": Noise(0.1)}, "noise"),
    (
        2,
        {"noise": Noise(0.1), "strategy": "torch-local-sgd"},
        "torch-local-sgd: noise hits strategies of the library only",
    ),
    (2, {"slow": {2: 3.0}}, "slow names rank 2; the run has ranks 0 to 1"),
    (2, {"slow": {1: 0.5}}, "expected a factor of at least 1"),
    (2, {"slow": {1: float("nan")}}, "expected a factor of at least 1"),
    (2, {"slow": {1: 3.0}, "strategy": "torch-ddp"}, "a stock method does not report its micro-batches"),
]  # fmt: skip


def test_what_cannot_run_is_named_before_a_worker_starts() -> None:
    for ranks, settings, named in CANNOT_RUN:
        with pytest.raises(ConfigError, match=re.escape(named)):
            check_run(RunConfig(task=Tiny(normed=False), **settings), ranks)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Job, {"workers": 1, "seed": 0, "shard": 1, "micro_batches": 1, "updates": 1}),
        (Job, {"ranks_per_node": 1, "bucket_bytes": 1}),
        (RunConfig, {"checkpoint_every": 1, "restarts": 0}),
        (CompareConfig, {"repeats": 1}),
    ],
)
def test_the_least_that_a_message_asks_for_is_taken(kind: Any, settings: dict[str, Any]) -> None:
    assert {name: getattr(kind(task=Tiny(), **settings), name) for name in settings} == settings


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_word_sets_guards_that_fit_any_strategy(strategy: str) -> None:
    model = nn.Linear(2, 1)
    run = RunConfig(task=Tiny(), strategy=strategy, guards=("standard",))
    with open_handle(run, model, torch.optim.SGD(model.parameters(), lr=0.1), group=SoloGroup()) as parallel:
        assert isinstance(parallel, DataParallel)
        assert parallel.options.verified
        assert parallel.guards
