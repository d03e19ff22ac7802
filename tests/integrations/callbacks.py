"""Callbacks of other libraries and of users, drawn at random, for trainings on two ranks."""

import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.draws import draws
from tests.integrations.regression import Regression, distance, samples, values
from tests.integrations.ways import EVALUATED, KINDS, TOLERANCE, make

Outcome = tuple[Any, ...]


class Noted(Regression):
    """With a buffer that only callbacks write."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("note", torch.zeros(3))


def hooked(hook: str, do: Callable[..., None]) -> Any:
    """Return a callback of transformers with one hook, which gets state, control and model."""
    import transformers

    def call(self: Any, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        do(state, control, model)

    return type("Hooked", (transformers.TrainerCallback,), {hook: call})()


def of_transformers(rank: int, cases: int) -> list[tuple[str, Outcome, Outcome]]:
    """Train with random callbacks under the stock Trainer and ours; return both outcomes of each."""
    import transformers

    def writes(hook: str) -> dict[str, Any]:
        return {"callbacks": [hooked(hook, lambda state, _, model: model.note.add_(state.global_step))]}

    def asks(flag: str, at: int) -> dict[str, Any]:
        def ask(state: Any, control: Any, _: Any) -> None:
            setattr(control, flag, state.global_step == at or getattr(control, flag))

        return {"callbacks": [hooked("on_step_end", ask)]}

    found = []
    best: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    for case in draws(cases):
        draw = random.Random(case)
        patience, steps, at = draw.randint(1, 2), draw.choice([1, 2]), draw.randint(1, 3)
        saved = {"save_strategy": "steps", "save_steps": steps, **best}
        ways: dict[str, Callable[[], dict[str, Any]]] = {
            "EarlyStopping": lambda patience=patience, saved=saved: {
                "callbacks": [transformers.EarlyStoppingCallback(patience, 0.4)],
                **saved,
            },
            "best": lambda: {"save_strategy": "best", **best},
            "limit": lambda saved=saved: {"save_total_limit": 1, **saved},
            "buffer at steps": lambda: writes("on_step_end"),
            "buffer at evaluations": lambda: writes("on_evaluate"),
            "buffer at the end": lambda: writes("on_train_end"),
            "asks to save": lambda at=at: asks("should_save", at),
            "asks to stop": lambda at=at: asks("should_training_stop", at),
        }
        name, length = draw.choice([*ways]), draw.choice([1, 2])
        outcomes = []
        for kind in KINDS:
            settings = {**EVALUATED, **ways[name](), "gradient_accumulation_steps": length, "model": Noted()}
            trainer = make(kind, f"callbacks-{case}", **settings)
            trainer.train()
            outcomes.append(outcome_of(trainer, f"callbacks-{case}-{kind}"))
        found.append((name, *outcomes))
    return found


def outcome_of(trainer: Any, folder: str) -> Outcome:
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    files = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    return [*values(trainer.model), trainer.model.note.clone()], trainer.state.global_step, files, losses


ASKED = {
    ("on_step_end", "should_save"): (4, ["checkpoint-2"]),
    ("on_step_end", "should_evaluate"): (4, []),
    ("on_step_end", "should_training_stop"): (2, []),
    ("on_substep_end", "should_training_stop"): (2, []),
    ("on_evaluate", "should_training_stop"): (2, []),
    ("on_step_end", "should_epoch_stop"): (4, []),
}
"""Hooks of callbacks and what one asks for there; updates and checkpoints that come of it."""


def asked_on_one_rank(rank: int) -> dict[tuple[str, str], Outcome]:
    """Ask on rank 1 alone, at a step or inside one; return what comes of it."""
    found = {}
    for hook, flag in ASKED:

        def ask(state: Any, control: Any, _: Any, flag: str = flag) -> None:
            if rank and state.global_step == 2:
                setattr(control, flag, True)

        evaluated = EVALUATED if hook == "on_evaluate" else {"eval_dataset": samples(7)}
        name = f"{flag}-{hook}"
        trainer = make("ours", name, callbacks=[hooked(hook, ask)], model=Noted(), **evaluated)
        trainer.train()
        found[hook, flag] = outcome_of(trainer, f"{name}-ours")
    return found


def of_lightning(
    fit: Callable[..., Outcome], cases: int, kinds: tuple[str, ...] = KINDS
) -> list[tuple[str, Outcome, Outcome]]:
    """Train with random callbacks under DDP and ours; return both outcomes of each.

    Args:
        fit: Trains with a kind, callbacks, a folder and settings, and returns what it comes to.
        cases: How many.
        kinds: Of strategies.
    """
    import lightning.pytorch.callbacks as known

    def writes(*hooks: str) -> Any:
        def write(self: Any, trainer: Any, module: Any, *_: Any) -> None:
            module.note.add_(trainer.global_step)

        return type("Writes", (known.Callback,), dict.fromkeys(hooks, write))()

    found = []
    for case in draws(cases):
        draw = random.Random(case)
        folder, steps, top = f"callbacks-{case}", draw.choice([1, 2, 3]), draw.choice([1, 2, -1])
        patience = draw.randint(0, 2)
        ways: dict[str, Callable[[], Any]] = {
            "EarlyStopping": lambda patience=patience: known.EarlyStopping(
                "loss", min_delta=0.4, patience=patience
            ),
            "ModelCheckpoint by steps": lambda steps=steps, top=top, folder=folder: known.ModelCheckpoint(
                folder, monitor="loss", save_top_k=top, every_n_train_steps=steps, save_last=True
            ),
            "ModelCheckpoint by epochs": lambda top=top, folder=folder: known.ModelCheckpoint(
                folder, monitor="loss", save_top_k=top
            ),
            "Timer": lambda: known.Timer(timedelta(hours=1)),
            "buffer at batches": lambda: writes("on_train_batch_end"),
            "buffer in validations": lambda: writes("on_validation_epoch_end"),
            "buffer at the end": lambda: writes("on_train_epoch_end", "on_train_end"),
        }
        name = draw.choice([*ways])
        settings = {
            "accumulate_grad_batches": draw.choice([1, 2]),
            "val_check_interval": draw.choice([1.0, 2]),
            "max_epochs": draw.choice([1, 3]),
        }
        outcomes = [fit(kind, [ways[name]()], folder, **settings) for kind in kinds]
        found.append((name, *outcomes))
    return found


def check(found: list[tuple[str, Outcome, Outcome]]) -> None:
    """What they stop, save, choose as the best and write: parameters, steps, files and evaluations are the same."""
    for name, stock, ours in found:
        assert distance(stock[0], ours[0]) <= TOLERANCE, name
        assert stock[1:3] == ours[1:3], name
        assert ours[3] == pytest.approx(stock[3], abs=1e-5), name
