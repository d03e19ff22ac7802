"""`StrettoTrainer` on two ranks, however the Trainer deals its data out: equal to the stock one, whole and resumed."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto import ACCO
from tests.integrations.language import as_under_torchrun
from tests.integrations.regression import Regression, distance, samples, values
from tests.integrations.test_transformers import silence
from tests.integrations.ways import EVALUATED, KINDS, TOLERANCE, asked, leaving_out, make
from tests.processes import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: stretto[recipes]"
)


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


def two_ranks(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {"data": dealt_out(rank), "alone": one_rank_alone(rank)}
    found["asked"] = asked(rank, "signal", None, 2, inside=True)
    saved = make("ours", "moves", save_strategy="steps", save_steps=2)
    saved.train()
    found["moves"] = values(saved.model)
    return found


def goes_on(rank: int) -> list[Tensor]:
    """With batches of twice the size, which hold the same samples."""
    silence()
    trainer = make("ours", "moves", per_device_train_batch_size=4)
    trainer.train(resume_from_checkpoint="moves-ours/checkpoint-2")
    return values(trainer.model)


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


def test_what_two_ranks_have_saved_one_goes_on_with(
    two: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert distance(run_ranks(1, goes_on, backend=None)[0], two["moves"]) <= TOLERANCE
