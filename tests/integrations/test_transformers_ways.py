"""`StrettoTrainer` in the ways in which people use the Trainer: equal to the stock one, or refused at the start."""

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto
from stretto import ACCO
from tests.integrations.language import losses
from tests.integrations.regression import Regression, distance, said, samples, values
from tests.integrations.test_transformers import silence
from tests.integrations.ways import EVALUATED, KINDS, TOLERANCE, asked, leaving_out, make
from tests.processes import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: stretto[recipes]"
)
# Micro-batches that are left out


def left_out(rank: int) -> list[tuple[Any, ...]]:
    silence()
    draw, found = random.Random(0), []
    for _case in range(100):
        length, rate = draw.choice([1, 2, 3, 4]), draw.choice([0.1, 0.4, 0.8])
        chosen = {index for index in range(40) if draw.random() < rate}
        twice = {index for index in range(40) if draw.random() < 0.2}
        settings: dict[str, Any] = {
            "gradient_accumulation_steps": length,
            "max_steps": 3,
            "optim": draw.choice(["sgd", "adamw_torch"]),
            "weight_decay": 0.1,
            "logging_strategy": "no",
        }
        ends = []
        for kind in KINDS:
            trainer = make(kind, "left-out", base=leaving_out(chosen, twice), **settings)
            trainer.train()
            ends.append((values(trainer.model), trainer.state.global_step, trainer.lr_scheduler.last_epoch))
        found.append((distance(ends[0][0], ends[1][0]), ends[0][1:], ends[1][1:], trainer.parallel.steps))
    return found


def test_a_micro_batch_that_is_left_out_or_taken_twice_counts_as_in_the_stock_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: gradients are the same sums, and are divided by one."""
    monkeypatch.chdir(tmp_path)
    found = run_ranks(1, left_out, backend=None)[0]
    for gap, stock, ours, steps in found:
        assert (gap, ours, steps) == (0.0, stock, stock[0])


# Uses, refusals, exceptions


def averages() -> Any:
    """A moving average that is put into the model at the end."""
    import transformers

    class Averages(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.average = values(model)

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            for average, parameter in zip(self.average, model.parameters(), strict=True):
                average.lerp_(parameter.detach(), 0.1)

        def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            with torch.no_grad():
                for average, parameter in zip(self.average, model.parameters(), strict=True):
                    parameter.copy_(average)

    return Averages()


def stops() -> Any:
    """End the training after the first micro-batch of step 3."""
    import transformers

    class Stops(transformers.TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 2

    return Stops()


def unfreezes() -> Any:
    """Train a part from step 3 on, which is frozen as the training begins."""
    import transformers

    class Unfreezes(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            model.layers[0].requires_grad_(False)

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            model.layers[0].requires_grad_(state.global_step >= 2)

    return Unfreezes()


def own_optimizer(*, schedule: bool) -> dict[str, Any]:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    turned = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4) if schedule else None
    return {"model": model, "optimizers": (optimizer, turned)}


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    loss = (outputs["logits"].squeeze(-1) - labels).square().sum()
    return loss / (num_items_in_batch if num_items_in_batch is not None else len(labels))


def mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return (outputs["logits"].squeeze(-1) - labels).square().mean()


def lora() -> Any:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["layers.0"], modules_to_save=["layers.2"])
    model: Any = Regression()
    torch.manual_seed(0)
    return peft.get_peft_model(model, config)


USES: dict[str, Callable[[], dict[str, Any]]] = {
    "own optimizer and schedule": lambda: own_optimizer(schedule=True),
    "own optimizer": lambda: own_optimizer(schedule=False),
    "summed losses": lambda: {"compute_loss_func": summed},
    "mean losses": lambda: {"compute_loss_func": mean},
    "items of a rank": lambda: {"compute_loss_func": summed, "average_tokens_across_devices": False},
    "stopped inside an accumulation": lambda: {
        "callbacks": [stops()],
        "gradient_accumulation_steps": 4,
        "train_dataset": samples(48),
    },
    "an average put in at the end": lambda: {"callbacks": [averages()]},
    "a part trains later": lambda: {"callbacks": [unfreezes()]},
    "lora and modules to save": lambda: {"model": lora()},
    "model_init": lambda: {"model_init": Regression},
    "adafactor": lambda: {"optim": "adafactor"},
    "fused adamw": lambda: {"optim": "adamw_torch_fused"},
    "rmsprop": lambda: {"optim": "rmsprop"},
    "cosine with a least rate": lambda: {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-3},
    },
    "warm-up, stable, decay": lambda: {
        "lr_scheduler_type": "warmup_stable_decay",
        "warmup_steps": 1,
        "lr_scheduler_kwargs": {"num_decay_steps": 2},
    },
    "greedy": lambda: {"lr_scheduler_type": "greedy", **EVALUATED},
    "in order": lambda: {"train_sampling_strategy": "sequential"},
    "clipped": lambda: {"max_grad_norm": 0.5},
    "synchronized at each batch": lambda: {
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    },
}


def looks(hook: str) -> Any:
    import transformers

    return type("Looks", (transformers.TrainerCallback,), {hook: lambda *_, **__: None})()


def with_adafactor_schedule() -> Any:
    from transformers.optimization import Adafactor, AdafactorSchedule

    model = Regression()
    optimizer = Adafactor(model.parameters(), lr=None, relative_step=True, warmup_init=True)
    return make("ours", "refused", model=model, optimizers=(optimizer, AdafactorSchedule(optimizer)))


def after_an_exception(rank: int) -> tuple[str, float]:
    """Fail in step 3, and save the model by hand behind it."""
    import transformers

    class Fails(transformers.TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                raise ValueError("a bad sample")

    models = []
    for kind in KINDS:
        trainer = make(kind, "fails", callbacks=[Fails()])
        cause = said(trainer.train)
        trainer.save_model(f"fails-{kind}")
        models.append(values(trainer.model))
    return cause, distance(*models)


def alone(rank: int) -> dict[str, Any]:
    silence()
    found: dict[str, Any] = {}
    for name, settings in USES.items():
        for kind in KINDS:
            trainer = make(kind, "use", **settings())
            trainer.train()
            logs = trainer.state.log_history
            numbers = [losses(logs, key) for key in ("loss", "learning_rate", "grad_norm")]
            found.setdefault(name, []).append((values(trainer.model), trainer.state.global_step, numbers))
    for hook in ("on_pre_optimizer_step", "on_optimizer_step"):
        found[hook] = said(make("ours", "refused", callbacks=[looks(hook)]).train)
    found["AdafactorSchedule"] = said(with_adafactor_schedule().train)
    for strategy in (None, ACCO(), stretto.WeightPrediction()):
        for inside in (False, True):
            name = f"asked-{type(strategy).__name__}-{inside}"
            found[name] = asked(rank, name, strategy, 2, inside=inside)
    found["exception"] = after_an_exception(rank)
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process by itself saw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("ways"))
        return run_ranks(1, alone, backend=None)[0]


@pytest.mark.parametrize("name", USES)
def test_however_it_is_used_it_equals_the_stock_trainer(one: dict[str, Any], name: str) -> None:
    (stock, at, numbers), (ours, found_at, found) = one[name]
    assert found_at == at
    assert distance(ours, stock) <= TOLERANCE
    for left, right in zip(found, numbers, strict=True):
        assert left == pytest.approx(right, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", ["NoneType", "ACCO", "WeightPrediction"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_checkpoint_at_a_signal_has_the_updates_in_its_name(
    one: dict[str, Any], name: str, inside: bool
) -> None:
    folders, inside_them, steps, gap = one[f"asked-{name}-{inside}"]
    number = folders[-1].removeprefix("checkpoint-")
    assert (len(folders), inside_them, steps) == (1, [f"000001-step-{number}"], 4)
    if name == "NoneType":  # landing earlier starts the next update as the first one did
        assert gap == 0.0


@pytest.mark.parametrize("name", ["on_pre_optimizer_step", "on_optimizer_step", "AdafactorSchedule"])
def test_what_would_look_at_gradients_or_the_optimizer_is_refused_at_the_start(
    one: dict[str, Any], name: str
) -> None:
    assert one[name].startswith("ConfigError: StrettoTrainer does not work with ")
    assert name in one[name]
    assert "\n" not in one[name]


def test_after_an_exception_a_process_by_itself_shows_and_saves_its_last_update(one: dict[str, Any]) -> None:
    assert one["exception"] == ("ValueError: a bad sample", 0.0)
