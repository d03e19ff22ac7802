"""One table of the ways in which people feed and use the Trainer: `StrettoTrainer` equals the stock one in each.

Each row is trained whole, and gone on with from the checkpoint of the second step. Ways of data run on two ranks; their
checkpoints are gone on with by one rank too. Ways of use run on one.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.draws import part
from tests.integrations.language import as_under_torchrun, language, losses, tiny_llama
from tests.integrations.regression import Regression, distance, samples, values
from tests.integrations.ways import EVALUATED, KINDS, TOLERANCE, Stream, make, silence
from tests.processes import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: stretto[recipes]"
)
Row = Callable[[], dict[str, Any]]
"""Arguments of the Trainer, or of its `TrainingArguments`, made anew for each training."""


# How the data are dealt out


class SizedStream(Stream):
    """With a length."""

    def __len__(self) -> int:
        return len(self.rows)


def hugging_face(count: int) -> Any:
    import datasets

    rows = samples(count)
    columns = {"x": [row["x"].tolist() for row in rows], "labels": [float(row["labels"]) for row in rows]}
    return datasets.Dataset.from_dict(columns).with_format("torch")


EPOCHS = {"max_steps": -1, "num_train_epochs": 2}
DATA: dict[str, Row] = {
    "unequal tokens": lambda: language(save_steps=2),
    "a short last accumulation": lambda: {"train_dataset": samples(22), **EPOCHS},
    "uneven, the last dropped": lambda: {
        "train_dataset": samples(23),
        "dataloader_drop_last": True,
        **EPOCHS,
    },
    "a stream, dispatched": lambda: {
        "train_dataset": Stream(samples(24)),
        "accelerator_config": {"dispatch_batches": True},
    },
    "clipped by threes, the best loaded": lambda: {
        **language(model=tiny_llama(), max_grad_norm=0.5, gradient_accumulation_steps=3),
        **{"eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True, "save_total_limit": 4},
    },
    "a stream, sharded": lambda: {
        "train_dataset": Stream(samples(24)),
        "accelerator_config": {"dispatch_batches": False},
    },
    "a stream with a length": lambda: {"train_dataset": SizedStream(samples(24)), **EPOCHS},
    "split batches": lambda: {
        "per_device_train_batch_size": 4,
        "accelerator_config": {"split_batches": True},
    },
    "even batches off": lambda: {"accelerator_config": {"even_batches": False}},
    "datasets, streamed": lambda: {"train_dataset": hugging_face(24).to_iterable_dataset(num_shards=4)},
    "datasets, workers": lambda: {
        "train_dataset": hugging_face(24),
        "dataloader_num_workers": 1,
        "dataloader_persistent_workers": True,
        "max_steps": 3,
    },
    "evaluated at each step": lambda: {"eval_on_start": True, **EVALUATED},
    "plateau": lambda: {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0},
        **EVALUATED,
    },
    "longer accumulations than epochs": lambda: {
        "train_dataset": samples(12),
        "max_steps": 3,
        "gradient_accumulation_steps": 16,
    },
}
EXACT = {"unequal tokens"}
"""All that divides is a power of two, and a sum of two numbers has no order."""


# How it is used


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


def lora() -> Any:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["layers.0"], modules_to_save=["layers.2"])
    model: Any = Regression()
    torch.manual_seed(0)
    return peft.get_peft_model(model, config)


def makes_optimizer(trainer: type[Any]) -> type[Any]:
    """Derive a Trainer that makes its optimizer itself."""

    class Makes(trainer):  # type: ignore[misc]  # known when it runs
        def create_optimizer(self, *_: Any) -> torch.optim.Optimizer:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
            return self.optimizer

    return Makes


def makes_schedule(trainer: type[Any]) -> type[Any]:
    """Derive a Trainer that makes its schedule itself, over the optimizer that it has."""

    class Makes(trainer):  # type: ignore[misc]  # known when it runs
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer or self.optimizer, 2)
            return self.lr_scheduler

    return Makes


USES: dict[str, Row] = {
    "an optimizer of a subclass": lambda: {"base": makes_optimizer},
    "a schedule of a subclass": lambda: {"base": makes_schedule},
    "own optimizer and schedule": lambda: own_optimizer(schedule=True),
    "own optimizer": lambda: own_optimizer(schedule=False),
    "summed losses": lambda: {"compute_loss_func": summed},
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
    "warm-up, stable, decay": lambda: {
        "lr_scheduler_type": "warmup_stable_decay",
        "warmup_steps": 1,
        "lr_scheduler_kwargs": {"num_decay_steps": 2},
    },
    "greedy": lambda: {"lr_scheduler_type": "greedy", **EVALUATED},
    "clipped": lambda: {"max_grad_norm": 0.5},
    "synchronized at each batch": lambda: {
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    },
    "bf16, checkpointed activations, smoothed labels": lambda: language(
        save_steps=2, bf16=True, gradient_checkpointing=True, label_smoothing_factor=0.1
    ),
}


Found = dict[tuple[str, str, str], tuple[Any, ...]]
"""What a training came to: by row, column and kind of Trainer."""


def seen(trainer: Any) -> tuple[Any, ...]:
    """Return parameters, step and epoch, and logged numbers."""
    logs = trainer.state.log_history
    numbers = [losses(logs, key) for key in ("loss", "learning_rate", "grad_norm", "eval_loss")]
    return values(trainer.model), (trainer.state.global_step, trainer.state.epoch), numbers


def whole_and_gone_on_with(rows: dict[str, Row]) -> Found:
    silence()
    found = {}
    for name, row in rows.items():
        for kind in KINDS:
            whole = make(kind, name, **{"save_strategy": "steps", "save_steps": 2, **row()})
            whole.train()
            found[name, "whole", kind] = seen(whole)
            resumed = make(kind, name, **row())
            resumed.train(resume_from_checkpoint=f"{name}-{kind}/checkpoint-2")
            found[name, "gone on with", kind] = seen(resumed)
    return found


def fed(rank: int) -> Found:
    as_under_torchrun(rank)
    return whole_and_gone_on_with(dict(part(DATA.items())))


def fed_by_one_rank(rank: int) -> Found:
    """In batches of twice the size, which hold the same samples."""
    silence()
    found = {}
    for name, row in part(DATA.items()):
        for kind in KINDS:
            settings = row()
            settings["per_device_train_batch_size"] = 2 * settings.get("per_device_train_batch_size", 2)
            trainer = make(kind, name, **settings)
            trainer.train(resume_from_checkpoint=f"{name}-{kind}/checkpoint-2")
            found[name, "gone on with by one rank", kind] = seen(trainer)
    return found


def used(rank: int) -> Found:
    return whole_and_gone_on_with(dict(part(USES.items())))


def check(found: Found) -> None:
    for (name, column, kind), (ours, at, numbers) in found.items():
        if kind == "ours":
            stock, expected_at, expected = found[name, column, "stock"]
            assert at == expected_at, (name, column)
            assert distance(ours, stock) <= (0.0 if name in EXACT else TOLERANCE), (name, column)
            for left, right in zip(numbers, expected, strict=True):
                assert left == pytest.approx(right, rel=1e-5, abs=1e-5), (name, column)


def test_however_it_is_fed_it_equals_the_stock_trainer() -> None:
    check(run_ranks(2, fed)[0])
    check(run_ranks(1, fed_by_one_rank, backend=None)[0])


def test_however_it_is_used_it_equals_the_stock_trainer() -> None:
    check(run_ranks(1, used, backend=None)[0])
