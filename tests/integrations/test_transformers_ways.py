"""`StrettoTrainer` in the ways in which people use the Trainer: equal to the stock one, or refused at the start."""

import importlib.util
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto
from stretto import ACCO
from tests.integrations.language import as_under_torchrun, losses
from tests.integrations.regression import Regression, distance, said, samples, values
from tests.integrations.test_transformers import silence
from tests.processes import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: stretto[recipes]"
)
KINDS = ("stock", "ours")
# SGD: a step is the rate times the gradient. A gradient is a mean of a few numbers, rounded in another order, and there
# are at most ten steps: rate 0.05 × 10 steps × 8 roundings × 2**-24 × gradients up to 10.
TOLERANCE = 2.4e-6


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


# Micro-batches that are left out


def leaving_out(chosen: set[int], twice: set[int]) -> Callable[[Any], Any]:
    """Return what derives a Trainer that leaves these micro-batches out, and takes those in two backward passes."""

    def derive(base: Any) -> Any:
        class Leaves(base):
            num_seen = 0

            def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
                self.num_seen += 1
                if self.num_seen in chosen:
                    return torch.zeros(())
                if self.num_seen in twice:
                    self.accelerator.backward(sum(p.square().sum() for p in model.parameters()) / 64)
                return super().training_step(model, inputs, num_items_in_batch)

        return Leaves

    return derive


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


# On two ranks: data, one rank alone, signals


class Stream(torch.utils.data.IterableDataset[Any]):
    """Without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(samples(24))


class SizedStream(Stream):
    """With one."""

    def __len__(self) -> int:
        return 24


def hugging_face(count: int) -> Any:
    import datasets

    rows = samples(count)
    columns = {"x": [row["x"].tolist() for row in rows], "labels": [float(row["labels"]) for row in rows]}
    return datasets.Dataset.from_dict(columns).with_format("torch")


EPOCHS = {"max_steps": -1, "num_train_epochs": 2}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": samples(7)}
DATA: dict[str, Callable[[], dict[str, Any]]] = {
    "a short last accumulation": lambda: {"train_dataset": samples(22), **EPOCHS},
    "uneven, the last dropped": lambda: {
        "train_dataset": samples(23),
        "dataloader_drop_last": True,
        **EPOCHS,
    },
    "a stream, dispatched": lambda: {
        "train_dataset": Stream(),
        "accelerator_config": {"dispatch_batches": True},
    },
    "a stream, sharded": lambda: {
        "train_dataset": Stream(),
        "accelerator_config": {"dispatch_batches": False},
    },
    "a stream with a length": lambda: {"train_dataset": SizedStream(), **EPOCHS},
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


def dealt_out(rank: int) -> dict[str, list[tuple[Any, ...]]]:
    """Train in each way, once whole and once gone on with; return what each kind came to."""
    as_under_torchrun(rank)
    silence()
    found: dict[str, list[tuple[Any, ...]]] = {}
    for name, settings in DATA.items():
        for kind in KINDS:
            whole = make(kind, name, save_strategy="steps", save_steps=2, **settings())
            whole.train()
            resumed = make(kind, name, **settings())
            resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-2")
            state = (whole.state.global_step, whole.state.epoch)
            gap = distance(values(resumed.model), values(whole.model))
            found.setdefault(name, []).append((values(whole.model), state, gap))
    return found


def one_rank_alone(rank: int) -> dict[str, Any]:
    """Leave micro-batches out on rank 1 alone: the first, and the last, of an accumulation."""
    found: dict[str, Any] = {}
    for name, strategy in {"zero1": None, "acco": ACCO()}.items():
        base = leaving_out({1, 6} if rank else set(), set())
        trainer = make(
            "ours",
            name,
            base=base,
            strategy=strategy,
            include_num_input_tokens_seen="all",
            max_steps=3,
            train_sampling_strategy="sequential",
        )
        trainer.train()
        trainer.save_model(f"{name}-left-out")  # all ranks come here
        found[name] = (trainer.parallel.steps, values(trainer.model))
    return found


def expected_of_one_rank_alone() -> list[Tensor]:
    """A plain loop, in which what is left out is a gradient of zero."""
    model, rate = Regression(), 0.05
    rows = samples()
    for step in range(3):
        loss = torch.zeros(())
        for index in (2 * step, 2 * step + 1):
            for rank in (0, 1):
                if rank and index + 1 in (1, 6):
                    continue
                batch = [rows[4 * index + 2 * rank + row] for row in (0, 1)]
                loss = (
                    loss
                    + model(**{key: torch.stack([row[key] for row in batch]) for key in batch[0]})["loss"] / 4
                )
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * (1 - step / 3) * parameter.grad
    return values(model)


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
            names = {type(one).__name__: one for one in trainer.callback_handler.callbacks}
            names["JITCheckpointCallback"].jit_manager.is_checkpoint_requested = True

    settings = {"strategy": strategy, "enable_jit_checkpoint": True}
    whole = make("ours", f"{name}-whole", **settings)
    whole.train()
    trainer = make("ours", name, callbacks=[Ask()], **settings)
    trainer.train()
    folders = sorted(path.name for path in Path(f"{name}-ours").glob("checkpoint-*"))
    inside_them = [path.name for path in Path(f"{name}-ours", folders[-1], "stretto").glob("0*")]
    resumed = make("ours", name, **settings)
    resumed.train(resume_from_checkpoint=f"{name}-ours/{folders[-1]}")
    return folders, inside_them, resumed.parallel.steps, distance(values(resumed.model), values(whole.model))


def two_ranks(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {"data": dealt_out(rank), "alone": one_rank_alone(rank)}
    found["asked"] = asked(rank, "signal", None, 2, inside=True)
    saved = make("ours", "moves", save_strategy="steps", save_steps=2)
    saved.train()
    found["moves"] = values(saved.model)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both ranks work, and then one."""
    return tmp_path_factory.mktemp("ways")


@pytest.fixture(scope="module")
def two(folder: Path) -> dict[str, Any]:
    """What rank 0 saw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return run_ranks(2, two_ranks)[0]


@pytest.mark.parametrize("name", DATA)
def test_however_the_data_are_dealt_out_it_equals_the_stock_trainer_whole_and_resumed(
    two: dict[str, Any], name: str
) -> None:
    (stock, at, stock_gap), (ours, found_at, gap) = two["data"][name]
    assert found_at == at
    assert distance(ours, stock) <= TOLERANCE
    assert gap <= stock_gap


@pytest.mark.parametrize("name", ["zero1", "acco"])
def test_a_micro_batch_that_one_rank_alone_leaves_out_holds_nobody_up(two: dict[str, Any], name: str) -> None:
    steps, found = two["alone"][name]
    assert steps == 3
    if name == "zero1":
        assert distance(found, expected_of_one_rank_alone()) <= TOLERANCE


def test_a_signal_on_one_rank_saves_on_all_at_the_end_of_the_step(two: dict[str, Any]) -> None:
    assert two["asked"] == (["checkpoint-2"], ["000001-step-2"], 4, 0.0)


# On one process: uses, refusals, exceptions


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
    found["moves"] = make("ours", "moves", per_device_train_batch_size=4)
    found["moves"].train(resume_from_checkpoint="moves-ours/checkpoint-2")
    found["moves"] = values(found["moves"].model)
    for strategy in (None, ACCO(), stretto.WeightPrediction()):
        for inside in (False, True):
            name = f"asked-{type(strategy).__name__}-{inside}"
            found[name] = asked(rank, name, strategy, 2, inside=inside)
    found["exception"] = after_an_exception(rank)
    return found


@pytest.fixture(scope="module")
def one(two: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a process by itself saw, where two ranks have been."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return run_ranks(1, alone, backend=None)[0]


@pytest.mark.parametrize("name", USES)
def test_however_it_is_used_it_equals_the_stock_trainer(one: dict[str, Any], name: str) -> None:
    (stock, at, numbers), (ours, found_at, found) = one[name]
    assert found_at == at
    assert distance(ours, stock) <= TOLERANCE
    for left, right in zip(found, numbers, strict=True):
        assert left == pytest.approx(right, rel=1e-5, abs=1e-5)


def test_what_two_ranks_have_saved_one_goes_on_with(two: dict[str, Any], one: dict[str, Any]) -> None:
    """With batches of twice the size, which hold the same samples."""
    assert distance(two["moves"], one["moves"]) <= TOLERANCE


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
