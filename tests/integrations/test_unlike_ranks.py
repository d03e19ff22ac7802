"""Ranks whose trainers would meet at different places are told at the start; under DDP they wait for each other."""

import importlib.util
import random
from typing import Any

import pytest

from tests.draws import draws, part
from tests.integrations import fits, ways
from tests.integrations.fits import loader, odd, trainer_of
from tests.integrations.language import as_under_torchrun
from tests.integrations.regression import said, samples
from tests.integrations.ways import make
from tests.processes import run_ranks

OF_LIGHTNING: dict[str, tuple[Any, Any]] = {
    "max_epochs": (2, 3),
    "max_steps": (4, 6),
    "limit_train_batches": (4, 6),
    "limit_val_batches": (1, 2),
    "val_check_interval": (1.0, 0.5),
    "check_val_every_n_epoch": (1, 2),
    "num_sanity_val_steps": (0, 1),
    "reload_dataloaders_every_n_epochs": (0, 1),
}
OF_TRANSFORMERS: dict[str, tuple[Any, Any]] = {
    "max_steps": (4, 6),
    "logging_steps": (1, 2),
    "logging_strategy": ("no", "epoch"),
    "eval_strategy": ("no", "steps"),
    "eval_steps": (1, 3),
    "save_strategy": ("no", "steps"),
    "save_steps": (2, 4),
    "eval_on_start": (False, True),
    "average_tokens_across_devices": (False, True),
    "include_num_input_tokens_seen": ("no", "all"),
    "compute_metrics": (None, len),
}
BATCHES = {"the number of batches of training": (20, 24), "the number of batches of validation": (4, 8)}


def in_lightning(rank: int) -> list[tuple[str, str]]:
    as_under_torchrun(rank)
    fits.silence()
    draw, found, names = random.Random(1), [], [*OF_LIGHTNING, *BATCHES]
    for number in draws(40, len(names)):
        name, flipped = names[number % len(names)], draw.randrange(2)
        settings = {name: OF_LIGHTNING[name][rank ^ flipped]} if name in OF_LIGHTNING else {}
        counts = {other: pair[rank ^ flipped if other == name else 0] for other, pair in BATCHES.items()}
        trainer = trainer_of("ours", devices=2, use_distributed_sampler=False, **settings)
        loaders = [loader(count) for count in counts.values()]
        found.append((name, said(lambda t=trainer, both=loaders: t.fit(odd()(), *both))))
    return found


def in_transformers(rank: int) -> list[tuple[str, str]]:
    as_under_torchrun(rank)
    ways.silence()
    draw, found, names = random.Random(2), [], [*OF_TRANSFORMERS]
    for case in draws(44, len(names)):
        name, flipped = names[case % len(names)], draw.randrange(2)
        settings = {"eval_dataset": samples(6), name: OF_TRANSFORMERS[name][rank ^ flipped]}
        found.append((name, said(make("ours", f"case{case}", **settings).train)))
    return found


@pytest.mark.parametrize("library", part(["lightning", "transformers"]))
def test_both_ranks_name_the_setting_in_which_they_differ(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    for found in run_ranks(2, {"lightning": in_lightning, "transformers": in_transformers}[library]):
        for name, told in found:
            assert told.startswith(f"ConfigError: {name}="), (name, told)
            assert "expected the same value on all ranks" in told
