"""One rank alone fails somewhere in another trainer's loop, and its process lives on: the others hear why, at once."""

import importlib.util
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto import ACCO, ZeRO1
from stretto.groups.connections import connections
from tests.integrations import fits, ways
from tests.integrations.fits import asking, odd, trainer_of
from tests.integrations.language import as_under_torchrun
from tests.integrations.regression import inputs, said, samples
from tests.integrations.ways import make
from tests.processes import run_ranks

STRATEGIES = {"zero1": ZeRO1(), "acco": ACCO()}
CASES = 50
"""Of each trainer."""
SECONDS = 15.0
"""Within which a failure is told, on a machine that others keep busy. Collectives wait 600 s and more."""

Case = tuple[Any, ...]
"""The place, the failing rank, and what else was drawn."""


def fail(*_: Any) -> None:
    raise ValueError("a bad sample")


def fresh_groups(count: int) -> Iterator[int]:
    """Count, each time with a new default group, whatever is under way in the one before."""
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    before = connections()
    for number in range(count):
        named = dist.PrefixStore(f"group/{number}", store)
        dist.init_process_group("gloo", store=named, rank=rank, world_size=size)
        yield number
        store.set(f"ended/{number}/{rank}", "")
        store.wait([f"ended/{number}/{other}" for other in range(size)], timedelta(seconds=4 * SECONDS))
        for connection in connections() - before:  # a group waits for what one rank alone has begun
            with (
                suppress(OSError),
                socket.socket(fileno=os.dup(connection.descriptor)) as one,
            ):  # if still open
                one.shutdown(socket.SHUT_RDWR)
        dist.destroy_process_group()


class Spoilt(torch.utils.data.Dataset[Any]):
    """Samples of which, where `at` is given, the one that is read as the `at`-th cannot be."""

    def __init__(self, good: Any, at: int | None) -> None:
        self.good, self.at, self.num_read = good, at, 0

    def __len__(self) -> int:
        return len(self.good)

    def __getitem__(self, index: int) -> Any:
        self.num_read += 1
        return fail() if self.num_read == self.at else self.good[index]


def ended(attempt: Callable[[], Any]) -> tuple[str, float]:
    """Return what an attempt raises, and when."""
    return said(attempt), time.time()


# Lightning

LIGHTNING_HOOKS = (
    "training_step",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_validation_start",
    "validation_step",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
)


def in_lightning(rank: int) -> list[tuple[Case, str, float]]:
    as_under_torchrun(rank)
    fits.silence()
    draw, found = random.Random(3), []
    for case in fresh_groups(CASES):
        place = draw.choice([*LIGHTNING_HOOKS, "training data", "validation data"])
        failing, at = draw.randrange(2), 1 if place == "on_train_start" else draw.randint(1, 3)
        name, logs = draw.choice([*STRATEGIES]), draw.random() < 0.5
        accumulated, saves = 2 if name == "acco" else draw.choice([1, 2]), draw.random() < 0.3
        here = place if rank == failing else ""
        module = odd()(logs=logs)
        if here in LIGHTNING_HOOKS:
            module = asking(odd(), place, at, fail, logs=logs)
        loaders = [
            torch.utils.data.DataLoader(
                Spoilt(torch.utils.data.TensorDataset(inputs(count)), at if here == data else None), 2
            )
            for data, count in (("training data", 20), ("validation data", 8))
        ]
        trainer = trainer_of(
            "ours",
            strategy=STRATEGIES[name],
            devices=2,
            use_distributed_sampler=False,
            accumulate_grad_batches=accumulated,
            max_epochs=3,
            enable_checkpointing=saves,
            default_root_dir=f"case{case}",
        )
        drawn = (place, failing, at, name, accumulated, saves, case)
        found.append((drawn, *ended(lambda t=trainer, m=module, both=loaders: t.fit(m, *both))))
    return found


# The Trainer of transformers

CALLBACKS = (
    "on_train_begin",
    "on_epoch_begin",
    "on_step_begin",
    "on_substep_end",
    "on_step_end",
    "on_log",
    "on_evaluate",
    "on_save",
)
METHODS = ("compute_loss", "prediction_step", "training_step")


def failing_once(base: Any, method: str, at: int) -> Any:
    """Derive a class, a method of which fails when it is called the `at`-th time."""
    calls = iter(range(1, 1000))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return fail() if next(calls) == at else getattr(super(derived, self), method)(*args, **kwargs)

    derived = type("Fails", (base,), {method: call})
    return derived


def in_transformers(rank: int) -> list[tuple[Case, str, float]]:
    import transformers

    as_under_torchrun(rank)
    ways.silence()
    draw, found = random.Random(4), []
    for case in fresh_groups(CASES):
        place = draw.choice([*CALLBACKS, *METHODS, "train_dataset", "eval_dataset", "compute_metrics"])
        failing, name = draw.randrange(2), draw.choice([*STRATEGIES])
        at = 1 if place == "on_train_begin" else draw.randint(1, 2)
        here = place if rank == failing else ""
        settings: dict[str, Any] = {
            "strategy": STRATEGIES[name],
            "gradient_accumulation_steps": 2,
            "eval_strategy": draw.choice(["steps", "epoch"]),
            "eval_steps": 1,
            "save_strategy": "steps",
            "save_steps": 1,
            "include_num_input_tokens_seen": draw.choice(["no", "all"]),
            "num_train_epochs": 3,
            "max_steps": -1,
        }
        for key, count in (("train_dataset", 24), ("eval_dataset", 12)):
            settings[key] = Spoilt(samples(count), at if here == key else None)
        if place == "compute_metrics" or draw.random() < 0.5:
            settings["compute_metrics"] = fail if here == "compute_metrics" else lambda _: {}
        if here in CALLBACKS:
            settings["callbacks"] = [failing_once(transformers.TrainerCallback, here, at)()]
        base = (
            (lambda cls, here=here, at=at: failing_once(cls, here, at))
            if here in METHODS
            else (lambda cls: cls)
        )
        trainer = make("ours", f"case{case}", base=base, **settings)
        found.append(((place, failing, at, name, settings["eval_strategy"], case), *ended(trainer.train)))
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            program,
            id=library,
            marks=pytest.mark.skipif(
                importlib.util.find_spec(library) is None, reason=f"{library} is not installed"
            ),
        )
        for library, program in {"lightning": in_lightning, "transformers": in_transformers}.items()
    ],
)
def test_the_cause_on_one_rank_is_what_all_are_told(
    program: Callable[[int], list[tuple[Case, str, float]]],
) -> None:
    first, second = run_ranks(2, program, timeout_seconds=600)
    for (case, *one), (_, *other) in zip(first, second, strict=True):
        failing = case[1]
        (cause, began), (told, heard) = (one, other) if failing == 0 else (other, one)
        assert cause == "ValueError: a bad sample", case
        assert told.startswith(f"PeerFailed: rank {1 - failing}"), (case, told)
        assert f"rank {failing}" in told, (case, told)
        assert "ValueError: a bad sample" in told, (case, told)
        assert heard - began < SECONDS, case
