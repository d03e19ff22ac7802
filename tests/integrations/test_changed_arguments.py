"""An argument that a job has taken over, changed by a callback while it trains, ends the run in one line."""

import importlib.util
from typing import Any

import pytest

from tests.integrations import fits, ways
from tests.integrations.fits import loader, odd, trainer_of
from tests.integrations.regression import said
from tests.integrations.ways import make
from tests.processes import run_ranks

OF_LIGHTNING = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
OF_TRANSFORMERS = {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5}


def changed_in_lightning(rank: int) -> dict[str, str]:
    import lightning.pytorch.callbacks as known

    fits.silence()
    found = {}
    for name, value in OF_LIGHTNING.items():

        def change(_: Any, trainer: Any, *__: Any, name: str = name, value: Any = value) -> None:
            setattr(trainer, name, value)

        changes = type("Changes", (known.Callback,), {"on_train_batch_end": change})
        trainer = trainer_of("ours", callbacks=[changes()])
        found[name] = said(lambda trainer=trainer: trainer.fit(odd()(), loader()))
    return found


def without_optimizer(rank: int) -> str:
    fits.silence()
    nothing = type("Nothing", (odd(),), {"configure_optimizers": lambda _: None})
    return said(lambda: trainer_of("ours").fit(nothing(), loader()))


def changed_in_transformers(rank: int) -> dict[str, str]:
    import transformers

    ways.silence()
    found = {}
    for name, value in OF_TRANSFORMERS.items():

        def change(_: Any, args: Any, *__: Any, name: str = name, value: Any = value, **___: Any) -> None:
            setattr(args, name, value)

        changes = type("Changes", (transformers.TrainerCallback,), {"on_step_end": change})
        found[name] = said(make("ours", name, callbacks=[changes()]).train)
    return found


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_the_line_names_the_argument_and_both_values(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    program = {"lightning": changed_in_lightning, "transformers": changed_in_transformers}[library]
    (found,) = run_ranks(1, program, backend=None)
    for name, line in found.items():
        assert line.startswith(f"UsageError: {name}: expected "), line
        assert "found 3" in line or "found 0.5" in line


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
def test_a_module_without_an_optimizer_is_told_what_is_missing() -> None:
    (told,) = run_ranks(1, without_optimizer, backend=None)
    assert told.startswith("ConfigError: ")
    assert "found none" in told
