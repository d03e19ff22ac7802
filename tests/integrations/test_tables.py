"""docs/integrations.md and the list of unchanged names have every argument and callback of installed trainers, once."""

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS, cells
from tests.integrations.regression import said
from tests.integrations.ways import make

PAGE = DOCS / "integrations.md"
BECOMES = {"same", "ours", "differs", "not used", "refused"}


def named(trainer: str) -> dict[str, str]:
    """Return what Stretto does with each name; fail if one is named twice."""
    pytest.importorskip(trainer)
    unchanged = json.loads(Path(__file__).with_name("unchanged.json").read_text(encoding="utf-8"))
    found = dict.fromkeys(unchanged[trainer], "same")
    for names, becomes, _ in cells(PAGE, f"tests/integrations/test_tables.py {trainer}"):
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in found, name
            found[name] = becomes
    assert set(found.values()) <= BECOMES
    return found


def arguments(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def test_every_argument_and_callback_of_transformers_is_named() -> None:
    table = named("transformers")
    import transformers
    from transformers import integrations, trainer_callback

    kinds = inspect.getmembers(trainer_callback, inspect.isclass)
    base = transformers.TrainerCallback
    callbacks = {name for name, kind in kinds if issubclass(kind, base)} - {
        "TrainerCallback",
        "CallbackHandler",
    }
    installed = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    installed |= arguments(transformers.Trainer.__init__) | callbacks
    installed |= {name for name in dir(integrations) if name.endswith("Callback")}
    installed |= {name for name in vars(base) if name.startswith("on_")}
    assert set(table) == installed


def test_every_argument_and_callback_of_lightning_is_named() -> None:
    table = named("lightning")
    from lightning.pytorch import Callback, Trainer, callbacks
    from lightning.pytorch.strategies import DDPStrategy

    installed = arguments(Trainer.__init__) | arguments(DDPStrategy.__init__) | set(callbacks.__all__)
    installed |= {name for name in vars(Callback) if not name.startswith("_")}
    assert set(table) == installed


@pytest.mark.parametrize("name", ["fp16", "fsdp", "auto_find_batch_size", "save_on_each_node"])
def test_an_argument_that_the_table_calls_refused_is_refused(name: str) -> None:
    assert named("transformers")[name] == "refused"
    assert said(lambda: make("ours", "refused", **{name: True})).startswith(
        f"ConfigError: StrettoTrainer does not work with {name}: "
    )


@pytest.mark.parametrize("optimizer", ["lomo", "adalomo", "schedule_free_adamw", "galore_adamw_layerwise"])
def test_an_optimizer_that_steps_by_itself_or_swaps_parameters_is_refused(optimizer: str) -> None:
    named("transformers")
    words = said(lambda: make("ours", "refused", optim=optimizer, optim_target_modules=["layers"]))
    assert words.startswith("ConfigError: StrettoTrainer does not work with optim="), words


def test_the_callbacks_that_the_table_calls_refused_are_those_that_are_refused() -> None:
    table = named("lightning")
    from lightning.pytorch import callbacks as known

    from stretto.integrations.lightning_settings import REFUSED_CALLBACKS

    refused = {name for name in known.__all__ if issubclass(getattr(known, name), tuple(REFUSED_CALLBACKS))}
    called = {name for name in known.__all__ if table[name] == "refused"}
    assert called - {"BatchSizeFinder"} == refused
