"""Trainers of transformers that a test derives, trains and asks for a checkpoint at a signal."""

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.errors.test_failures import default_store
from tests.integrations.regression import Regression, samples, values

KINDS = ("stock", "ours")
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": samples(7)}
# SGD: a step is the rate times the gradient. A gradient is a mean of a few numbers, rounded in another order, and there
# are at most ten steps: rate 0.05 × 10 steps × 8 roundings × 2**-24 × gradients up to 10.
TOLERANCE = 2.4e-6


class Stream(torch.utils.data.IterableDataset[Any]):
    """Without a length."""

    def __init__(self, rows: list[dict[str, Tensor]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def silence() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def make(kind: str, name: str, *, base: Callable[[Any], Any] = lambda cls: cls, **settings: Any) -> Any:
    """Return a Trainer of this kind, or the one that `base` derives from its class.

    Settings are arguments of the Trainer, or of its `TrainingArguments`.
    """
    import transformers

    from stretto.integrations.transformers import StrettoTrainer

    names = transformers.TrainingArguments.__dataclass_fields__
    arguments = {
        "output_dir": f"{name}-{kind}",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.05,
        "optim": "sgd",
        "max_grad_norm": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        **{name: value for name, value in settings.items() if name in names},
    }
    rest = {name: value for name, value in settings.items() if name not in names}
    if "model_init" not in rest:
        rest.setdefault("model", Regression())
    rest.setdefault("train_dataset", samples())
    kinds: dict[str, Any] = {"stock": transformers.Trainer, "ours": StrettoTrainer}
    return base(kinds[kind])(args=transformers.TrainingArguments(**arguments), **rest)


def leaving_out(chosen: set[int], twice: set[int], *, keeps_last: bool = False) -> Callable[[Any], Any]:
    """Return what derives a Trainer that leaves these micro-batches out, and takes those in two backward passes.

    With `keeps_last` it leaves out none that ends an accumulation, full or short.
    """

    def derive(base: Any) -> Any:
        class Leaves(base):
            num_seen = 0

            def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
                self.num_seen += 1
                if self.num_seen in chosen and not (keeps_last and self.accelerator.sync_gradients):
                    return torch.zeros(())
                if self.num_seen in twice:
                    self.accelerator.backward(sum(p.square().sum() for p in model.parameters()) / 64)
                return super().training_step(model, inputs, num_items_in_batch)

        return Leaves

    return derive


def marked(rank: int) -> bool:
    """Save at a signal on two ranks; return whether the folder is marked as incomplete.

    Rank 1 looks while it saves, after all that rank 0 does without it; rank 0 looks at the end of the training.
    """
    folder, found = Path("marked-ours", "checkpoint-1"), []

    def is_marked() -> bool:
        return (folder / "checkpoint-is-incomplete.txt").exists()

    def late(base: Any) -> Any:
        class Late(base):
            def training_step(self, *args: Any, **kwargs: Any) -> Any:
                jit_manager_of(self).is_checkpoint_requested = True
                return super().training_step(*args, **kwargs)

            def _save_rng_state(self, output_dir: str) -> None:
                super()._save_rng_state(output_dir)
                if rank == 1:
                    with contextlib.suppress(torch.distributed.DistStoreError):
                        default_store().wait(["rank 0 has saved"], timedelta(seconds=1))
                    found.append(is_marked())

            def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
                super()._save_checkpoint(*args, **kwargs)
                default_store().set(f"rank {rank} has saved", "")

        return Late

    make("ours", "marked", base=late, enable_jit_checkpoint=True).train()
    return found[0] if rank == 1 else is_marked()


def jit_manager_of(trainer: Any) -> Any:
    """Return what saves at a signal."""
    names = {type(one).__name__: one for one in trainer.callback_handler.callbacks}
    return names["JITCheckpointCallback"].jit_manager


def asked(rank: int, name: str, strategy: Any, at: int, *, inside: bool) -> tuple[Any, ...]:
    """Ask rank 1 (or the only one) for a checkpoint, inside step `at` or after it; return what going on comes to."""
    import transformers

    class Ask(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not inside and state.global_step == at:
                request()

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if inside and state.global_step == at - 1:
                request()

    def request() -> None:
        if rank == int(torch.distributed.is_initialized()):
            jit_manager_of(trainer).is_checkpoint_requested = True

    settings = {"strategy": strategy, "enable_jit_checkpoint": True}
    trainer = make("ours", name, callbacks=[Ask()], **settings)
    trainer.train()
    folders = sorted(path.name for path in Path(f"{name}-ours").glob("checkpoint-*"))
    inside_them = [path.name for path in Path(f"{name}-ours", folders[-1], "stretto").glob("0*")]
    resumed = make("ours", name, **settings)
    resumed.train(resume_from_checkpoint=f"{name}-ours/{folders[-1]}")
    return folders, inside_them, resumed.parallel.steps, values(resumed.model)
