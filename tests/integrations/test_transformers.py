"""`StrettoTrainer` beside the stock `Trainer` under PyTorch's DDP, on two ranks: the same data, settings and seeds."""

import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto import ACCO, Strategy, WeightPrediction, errors
from tests.bits import unequal
from tests.docs.pages import DOCS, code_blocks
from tests.integrations.language import as_under_torchrun, losses, texts, tiny_gpt2, tiny_llama
from tests.processes import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: stretto[recipes]"
)
TRAINER, ACCELERATE = code_blocks(DOCS / "integrations.md", "tests/integrations/test_transformers.py")
STEPS = 50
CLIPPED_STEPS = 12
OVERLAPPING = {"acco": ACCO(), "wp": WeightPrediction()}


@dataclasses.dataclass(frozen=True)
class Run:
    """What one rank saw of one training."""

    logs: list[dict[str, Any]]
    parameters: list[Tensor]
    folders: list[str]
    """The checkpoints that are left."""
    turned: int
    """How often the schedule was turned."""
    steps: list[tuple[int, int, int]]
    """At the end of each step and of each saving: the Trainer's, the job's, and that of the last update."""


def make(name: str, model: nn.Module, strategy: Strategy | None = None, **settings: Any) -> Any:
    """Return the stock Trainer, where the name ends with "stock", or ours."""
    import transformers

    from stretto.integrations.transformers import StrettoTrainer

    arguments = transformers.TrainingArguments(
        **{
            "output_dir": name,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,  # ten batches in an epoch: the last accumulation has two
            "learning_rate": 1e-2,
            "warmup_steps": 5,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 20,
            "save_steps": 20,
            **settings,
        }
    )
    data: dict[str, Any] = {"args": arguments, "train_dataset": texts(40), "eval_dataset": texts(8, seed=1)}
    if name.endswith("stock"):
        return transformers.Trainer(model, **data)
    return StrettoTrainer(model, **data, strategy=strategy)


def train(name: str, model: nn.Module, resume: str | None = None, **settings: Any) -> Run:
    """Train with the Trainer of this name."""
    import transformers

    trainer = make(name, model, **settings)
    steps = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not name.endswith("stock"):
                update = trainer.last_update
                steps.append(
                    (state.global_step, trainer.parallel.steps, 0 if update is None else update.step)
                )

        on_save = on_step_end

    trainer.add_callback(Watch())
    trainer.train(resume_from_checkpoint=resume)
    return Run(
        logs=trainer.state.log_history,
        parameters=[parameter.detach().clone() for parameter in trainer.model.parameters()],
        folders=sorted(path.name for path in Path(name).glob("checkpoint-*")),
        turned=trainer.lr_scheduler.last_epoch,
        steps=steps,
    )


def evaluated(folder: str) -> float:
    """The loss of a saved model, as the stock Trainer finds it."""
    import transformers

    loss: float = make("stock", transformers.AutoModelForCausalLM.from_pretrained(folder)).evaluate()[
        "eval_loss"
    ]
    return loss


def of_the_page() -> dict[str, Any]:
    """Run both blocks of the page, and the loop of Accelerate's own documentation."""
    import accelerate
    import transformers

    arguments = make("page-stock", tiny_gpt2(), max_steps=4, save_strategy="no", eval_strategy="no").args
    names = {"model": tiny_gpt2(), "arguments": arguments, "dataset": texts(40), "stretto": stretto}
    exec(compile(TRAINER, "integrations.md", "exec"), names)
    torch.distributed.barrier()  # rank 0 writes
    saved = transformers.AutoModelForCausalLM.from_pretrained("trained")
    found: dict[str, Any] = {
        "steps": names["trainer"].parallel.steps,
        "trained": [parameter.detach().clone() for parameter in names["trainer"].model.parameters()],
        "saved": [parameter.detach().clone() for parameter in saved.parameters()],
    }
    for kind in ("accelerate-stock", "accelerate"):
        model = tiny_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = torch.utils.data.DataLoader(texts(32), batch_size=2)
        names = {"accelerate": accelerate, "model": model, "optimizer": optimizer, "loader": loader}
        names |= {"stretto": stretto, "loss_function": lambda model, batch: model(**batch).loss}
        if kind == "accelerate":
            exec(compile(ACCELERATE, "integrations.md", "exec"), names)
        else:
            accelerator = accelerate.Accelerator(gradient_accumulation_steps=4)
            wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            for batch in loader:
                with accelerator.accumulate(wrapped):
                    accelerator.backward(wrapped(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
        found[kind] = [parameter.detach().clone() for parameter in model.parameters()]
    return found


def silence() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def two_ranks(rank: int) -> dict[str, Any]:
    as_under_torchrun(rank)
    silence()
    clipped: dict[str, Any] = {
        "max_steps": CLIPPED_STEPS,
        "eval_steps": 4,
        "save_steps": 4,
        "max_grad_norm": 0.5,
        "gradient_accumulation_steps": 3,  # ten batches in an epoch: the last accumulation has one
        "load_best_model_at_end": True,
        "save_total_limit": 2,
    }
    found: dict[str, Any] = {
        "gpt2-stock": train("gpt2-stock", tiny_gpt2(), max_grad_norm=0),
        "gpt2": train("gpt2", tiny_gpt2(), max_grad_norm=0),
        "gpt2-resumed": train("gpt2", tiny_gpt2(), "gpt2/checkpoint-40", max_grad_norm=0),
        "llama-stock": train("llama-stock", tiny_llama(), **clipped),
        "llama": train("llama", tiny_llama(), **clipped),
    }
    short: dict[str, Any] = {"max_steps": 8, "eval_steps": 4, "save_steps": 4, "warmup_steps": 2}
    for name, strategy in OVERLAPPING.items():
        short["strategy"] = strategy
        found[name] = train(name, tiny_gpt2(), **short)
        found[f"{name}-resumed"] = train(name, tiny_gpt2(), f"{name}/checkpoint-4", **short)
        found[f"{name}-saved"] = [evaluated(f"{name}/checkpoint-{step}") for step in (4, 8)]
    extras: dict[str, Any] = {"bf16": True, "gradient_checkpointing": True, "label_smoothing_factor": 0.1}
    for name in ("extras-stock", "extras"):
        found[name] = train(name, tiny_gpt2(), max_steps=3, eval_strategy="no", save_strategy="no", **extras)
    return found | of_the_page()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 saw; both ranks work in one folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("trainers"))
        return run_ranks(2, two_ranks)[0]


def test_the_default_strategy_equals_the_stock_trainer_to_the_bit(runs: dict[str, Any]) -> None:
    """All divide by two, four or eight, which is exact, and a sum of two numbers has no order."""
    stock, ours = runs["gpt2-stock"], runs["gpt2"]
    for key in ("loss", "eval_loss", "learning_rate"):
        assert losses(ours.logs, key) == losses(stock.logs, key), key
    assert len(losses(ours.logs)) == ours.turned == STEPS
    assert len(losses(ours.logs, "eval_loss")) == 3  # and at the end
    assert unequal(ours.parameters, stock.parameters) == []


def test_clipped_by_threes_and_with_the_best_model_loaded_it_equals_the_stock_trainer(
    runs: dict[str, Any],
) -> None:
    """Thirds and the norm are rounded elsewhere: a gradient differs by at most 8 roundings, each 2**-24 of it.

    Adam turns this into lr × 8 × 2**-24 per element and step, √6000 times that in norm, and a loss whose gradient has a
    norm of at most 2 follows: 12 × 0.01 × 4.8e-7 × 78 × 2. The norms are means of the same gradients.
    """
    stock, ours = runs["llama-stock"], runs["llama"]
    for key in ("loss", "eval_loss", "grad_norm"):
        assert losses(ours.logs, key) == pytest.approx(losses(stock.logs, key), rel=0, abs=1e-5), key
    assert max(losses(ours.logs, "grad_norm")) > 0.5  # so some were clipped
    assert losses(ours.logs, "learning_rate") == losses(stock.logs, "learning_rate")
    assert ours.folders == stock.folders
    assert len(ours.folders) == 2
    best = dict(zip(losses(ours.logs, "eval_loss"), range(4, CLIPPED_STEPS + 1, 4), strict=True))
    assert f"checkpoint-{best[min(best)]}" in ours.folders
    for left, right in zip(ours.parameters, stock.parameters, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", *OVERLAPPING])
def test_a_resumed_run_equals_one_that_never_stopped_to_the_bit(runs: dict[str, Any], name: str) -> None:
    whole, resumed = runs[name], runs[f"{name}-resumed"]
    for key in ("loss", "eval_loss", "learning_rate"):
        assert losses(resumed.logs, key) == losses(whole.logs, key), key
    assert unequal(resumed.parameters, whole.parameters) == []


@pytest.mark.parametrize("name", OVERLAPPING)
def test_what_is_evaluated_and_saved_is_what_was_committed(runs: dict[str, Any], name: str) -> None:
    """`from_pretrained` and the stock Trainer find the loss that was logged; both halves of a step have landed."""
    assert runs[f"{name}-saved"] == losses(runs[name].logs, "eval_loss")
    at_saving = [steps for steps in runs[name].steps if steps[0] == steps[1]]
    assert {(4, 4, 4), (8, 8, 8)} <= set(at_saving)


@pytest.mark.parametrize("name", OVERLAPPING)
def test_between_evaluations_an_update_lands_after_its_step(runs: dict[str, Any], name: str) -> None:
    """Step 3 ends an epoch with a short accumulation, and steps 4 and 8 evaluate: there all lands."""
    expected = [(1, 0, 0), (2, 1, 1), (3, 3, 3), (4, 3, 3), (4, 4, 4), (5, 4, 4), (6, 6, 6), (7, 6, 6)]
    assert runs[name].steps == [*expected, (8, 7, 7), (8, 8, 8)]
    assert runs[name].turned == 8
    assert losses(runs[name].logs, "learning_rate") == losses(runs[f"{name}-resumed"].logs, "learning_rate")
    assert losses(runs[name].logs)[-1] < losses(runs[name].logs)[0]


def test_bf16_checkpointed_activations_and_smoothed_labels_equal_the_stock_trainer(
    runs: dict[str, Any],
) -> None:
    """Before any step the loss is the same to the bit, and the others follow it: clipping is on."""
    stock, ours = losses(runs["extras-stock"].logs), losses(runs["extras"].logs)
    assert ours[0] == stock[0]
    assert ours == pytest.approx(stock, rel=0, abs=1e-5)


def test_the_code_of_the_page_trains_and_saves_what_was_committed(runs: dict[str, Any]) -> None:
    assert runs["steps"] == 4
    assert unequal(runs["saved"], runs["trained"]) == []
    assert unequal(runs["accelerate"], runs["accelerate-stock"]) == []


def ended_inside_accumulations() -> tuple[int, int]:
    """Train two epochs, each of which a callback ends after six of its batches; return both counts of updates."""
    import transformers

    class End(transformers.TrainerCallback):
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            self.batches = 0

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.batches += 1
            control.should_epoch_stop = self.batches == 5  # and one that was the last of an accumulation

    epochs: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "epoch"}
    trainer = make("ended", tiny_gpt2(), strategy=ACCO(), **epochs)
    trainer.add_callback(End())
    trainer.train()
    return trainer.state.global_step, trainer.parallel.steps


def without_a_length() -> list[tuple[int, ...]]:
    """Train on a stream of six batches, in accumulations of four; return the micro-batches of each update."""
    import transformers

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return iter(texts(12))

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            counts.append(trainer.last_update.micro_batches)

    counts: list[tuple[int, ...]] = []
    trainer = make("unsized", tiny_gpt2(), max_steps=3, eval_strategy="no", save_strategy="no")
    trainer.train_dataset = Stream()
    trainer.add_callback(Watch())
    trainer.train()
    return counts


def alone(rank: int) -> dict[str, Any]:
    silence()
    short: dict[str, Any] = {"max_steps": 6, "save_strategy": "epoch", "warmup_steps": 2, "max_grad_norm": 0}
    found: dict[str, Any] = {
        "stock": train("stock", tiny_gpt2(), **short),
        "ours": train("ours", tiny_gpt2(), **short),
    }
    found["ended"] = ended_inside_accumulations()
    found["unsized"] = without_a_length()
    trainer = make("again", tiny_gpt2(), max_steps=1)
    trainer.train()
    attempts = {
        "again": trainer.train,
        "foreign": lambda: train("ours", tiny_gpt2(), "stock/checkpoint-5", **short),
        "fp16": lambda: make("ours", tiny_gpt2(), fp16=True),
        "fsdp": lambda: make("ours", tiny_gpt2(), fsdp=True),
        "batch size": lambda: make("ours", tiny_gpt2(), auto_find_batch_size=True),
        "acco": lambda: train("ours", tiny_gpt2(), strategy=ACCO(), gradient_accumulation_steps=1),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except errors.StrettoError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process by itself saw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("trainer"))
        return run_ranks(1, alone, backend=None)[0]


def test_one_process_equals_the_stock_trainer_to_the_bit(one: dict[str, Any]) -> None:
    assert losses(one["ours"].logs) == losses(one["stock"].logs)
    assert one["ours"].folders == one["stock"].folders
    # Without clipping, whose stock norm is one of norms by parameter, and ours one of flat slices.
    assert unequal(one["ours"].parameters, one["stock"].parameters) == []


def test_an_accumulation_that_a_callback_ends_becomes_an_update_of_its_own(one: dict[str, Any]) -> None:
    assert one["ended"] == (2, 4)


def test_what_a_stream_leaves_of_an_accumulation_is_left_out(one: dict[str, Any]) -> None:
    assert one["unsized"] == [(4,), (4,), (4,)]


def test_what_cannot_work_is_refused_in_one_line(one: dict[str, Any]) -> None:
    expected = {
        "again": "UsageError: train() was called before",
        "foreign": "CheckpointError: stock/checkpoint-5: expected a folder 'stretto'",
        "fp16": "ConfigError: StrettoTrainer does not work with fp16: use bf16=True",
        "fsdp": "ConfigError: StrettoTrainer does not work with fsdp",
        "batch size": "ConfigError: StrettoTrainer does not work with auto_find_batch_size",
        "acco": "ConfigError: acco needs at least 2 micro-batches",
    }
    for name, words in expected.items():
        assert one[name].startswith(words), one[name]
        assert "\n" not in one[name]
