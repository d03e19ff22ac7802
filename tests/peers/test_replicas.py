"""Methods whose ranks step alone and average now and then, of torch and other libraries, against loops by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto as st
from stretto.errors import ConfigError, UnknownName
from stretto_lab.train.arms import parse_arm
from tests.peers import training
from tests.peers.training import MICRO_BATCHES, NUM_PARAMETERS, UPDATES, WORLD_SIZE, run_counted

FILE = Path(__file__).parents[2] / "benchmarks" / "peers" / "other_libraries.py"
ACCELERATE, TORCHFT, HIVEMIND = (
    f"{FILE}:{kind}" for kind in ("AccelerateLocalSGD", "TorchftDiLoCo", "HivemindAverages")
)
Parameters = dict[str, Tensor]


def copy_of(model: nn.Module) -> Parameters:
    return {key: value.detach().clone() for key, value in model.named_parameters()}


def train_replicas(rank: int, name: str, options: dict[str, Any]) -> tuple[Parameters, Parameters, list[int]]:
    """The mean of the replicas, this rank's own, and what updates sent; of micro-batches that weigh the same."""
    model = training.new_model()
    peer = training.make_peer(name, model, training.new_optimizer(model), MICRO_BATCHES, **options)
    updates = [peer.backward(training.loss_of(peer.model, inputs)) for inputs, _ in training.shard(rank)]
    with peer.settled():
        mean = copy_of(model)
    peer.finish()
    return mean, copy_of(model), [update.sent_bytes for update in updates if update is not None]


def replicas_by_hand(then: Callable[[int, list[nn.Module]], None]) -> list[nn.Module]:
    """Plain loops, one for each rank; `then` is called after every update, from 1, with all models."""
    models = [training.new_model() for _ in range(WORLD_SIZE)]
    optimizers = [training.new_optimizer(model) for model in models]
    shards = [training.shard(rank) for rank in range(WORLD_SIZE)]
    for update in range(1, UPDATES + 1):
        for model, optimizer, shard in zip(models, optimizers, shards, strict=True):
            for _ in range(MICRO_BATCHES):
                (training.loss_of(model, next(shard)[0]) / MICRO_BATCHES).backward()
            optimizer.step()
            optimizer.zero_grad()
        then(update, models)
    return models


def mean_of(states: list[Parameters]) -> Parameters:
    return {key: sum(state[key] for state in states) / len(states) for key in states[0]}


@pytest.mark.parametrize(
    ("name", "options", "averaged_behind"),
    [
        ("torch-local-sgd", {"interval": 2, "whole_updates": 0}, {1, 3}),  # behind the first update already
        (ACCELERATE, {"interval": 3}, {3}),
        (TORCHFT, {"interval": 3, "outer_lr": 1.0, "outer_momentum": 0.0}, {3}),
        (HIVEMIND, {"interval": 3, "compression": "none"}, {3}),
    ],
)
def test_ranks_step_alone_and_their_replicas_are_averaged_behind_some_updates(
    name: str, options: dict[str, Any], averaged_behind: set[int]
) -> None:
    def average(update: int, models: list[nn.Module]) -> None:
        mean = mean_of([copy_of(model) for model in models])
        if update in averaged_behind:
            for model in models:
                model.load_state_dict(mean)

    models = replicas_by_hand(average)
    mean = mean_of([copy_of(model) for model in models])
    for rank, (shown, own, sent) in enumerate(run_counted(train_replicas, name, options)):
        torch.testing.assert_close(shown, mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(own, copy_of(models[rank]), rtol=0, atol=1e-6)
        assert any((own[key] - shown[key]).abs().max() > 1e-4 for key in own)
        if name in (ACCELERATE, TORCHFT):  # DDP tells bucket sizes too; hivemind is not counted
            # 2 (N-1)/N = 1 on two ranks
            whole = 4 * NUM_PARAMETERS
            assert sent == [whole if update in averaged_behind else 0 for update in range(1, UPDATES + 1)]


def our_diloco(rank: int, options: dict[str, Any]) -> Parameters:
    model = training.new_model()
    parallel = st.DataParallel(
        model, training.new_optimizer(model), st.DiLoCo(**options), micro_batches=MICRO_BATCHES
    )
    for inputs, _ in training.shard(rank):
        parallel.backward(training.loss_of(parallel.model, inputs))
    return copy_of(model)


def test_torchft_and_our_diloco_take_the_same_outer_steps_with_momentum() -> None:
    options = {"interval": 2, "outer_lr": 0.7, "outer_momentum": 0.9}
    theirs = run_counted(train_replicas, TORCHFT, options)
    ours = run_counted(our_diloco, options)
    for (_, own, _), parameters in zip(theirs, ours, strict=True):
        torch.testing.assert_close(own, parameters, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("arm", "error", "words"),
    [
        ("torch-local-sgd:interval=0", ConfigError, "interval must be at least 1"),
        (f"{TORCHFT}:wire=int8", UnknownName, "TorchftDiLoCo has no setting 'wire'"),
        ("torch-ddp:wire=int8", UnknownName, "torch-ddp has no setting 'wire'"),
        ("torch-ddp-powersgd:whole_updates=1", ConfigError, "at least 2"),
    ],
)
def test_an_arm_of_a_stock_method_takes_its_own_options_and_no_strategys(
    arm: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        parse_arm(arm)


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ("nowhere.py:Averages", "there is no arm file nowhere.py"),
        (f"{FILE}:HivemindAverage", "has no arm 'HivemindAverage'.*did you mean 'HivemindAverages'"),
    ],
)
def test_an_arm_of_anybodys_that_is_not_there_is_named(arm: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_arm(arm)


def test_an_arm_of_anybodys_says_all_of_its_options() -> None:
    arm = parse_arm(f"{HIVEMIND}:interval=4:lr=0.1")
    assert not arm.is_ours
    assert arm.settings == {"lr": 0.1}
    assert arm.resolved == f"{HIVEMIND}:interval=4:delay=0:compression=float16:lr=0.1"
    assert arm.own_text == f"{HIVEMIND}:interval=4"
