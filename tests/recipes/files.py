"""Small files of the formats that people have, and runs over them on a virtual cluster."""

import importlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.errors import ConfigError
from stretto_lab.cli.commands import CONFIGURE
from stretto_lab.cli.options import parse_options
from stretto_lab.recipes import TaskConfig
from stretto_lab.recipes.gpt import Shape, causal_lm
from stretto_lab.recipes.language_models import SIZES
from stretto_lab.train.configuration import RunConfig
from stretto_lab.train.outcome import Outcome, prepare_run_folder
from stretto_lab.train.rank import RankContext, train_at
from stretto_lab.virtual import VirtualCluster, VirtualGroup
from tests.train.runs import records, written

STORIES = [f"Story {number}: " + "the cat saw a bird. " * (number % 5 + 1) for number in range(40)]
"""Documents of several lengths, all different."""


def write_stories(folder: Path) -> None:
    """Write files and a model with the names that the pages use."""
    (folder / "stories").mkdir()
    for number, story in enumerate(STORIES):
        (folder / "stories" / f"{number}.txt").write_text(story)
    (folder / "wiki.txt").write_text("\n".join(STORIES))
    model: Any = causal_lm("gpt2", Shape(1, 16, 1), vocabulary=300, context=512, dtype=torch.float32, seed=0)
    model.save_pretrained(folder / "my-model")


def smaller(run: RunConfig[Any], updates: int) -> RunConfig[Any]:
    """Return a run over such files with less of everything, for virtual ranks: their link is as fast as they like."""
    model = "my-model/config.json" if run.task.model in SIZES else run.task.model
    task = replace(run.task, readers=0, model=model, length=min(run.task.length, 32))
    seldom = {"evaluate_every": None, "checkpoint_every": None, "tensorboard": False, "run_dir": None}
    chosen = {"updates": updates, "samples": None, "micro_batches": 2, "workers": None, "link": "none"}
    return replace(run, task=task, **chosen, **seldom)


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def refusal(words: str) -> str:
    """Return why `stretto train` with these words is refused."""
    with pytest.raises(ConfigError) as found:
        parse_options("train", words.split(), CONFIGURE["train"])
    return str(found.value)


def run_over(task: TaskConfig, folder: str | None = None, **settings: Any) -> RunConfig[TaskConfig]:
    """A run of a task, without TensorBoard, whose import would take longer than the run."""
    chosen = {"updates": 4, "micro_batches": 2, "evaluate_every": None, "checkpoint_every": None, **settings}
    return RunConfig(task=task, run_dir=folder, tensorboard=False, **chosen)


def train_virtually(run: RunConfig[TaskConfig], ranks: int) -> list[Outcome]:
    """Train on virtual ranks, checkpoints included."""

    def program(rank: int, group: VirtualGroup) -> Outcome:
        context = RankContext(rank=rank, world_size=ranks, device=torch.device("cpu"), group=group)
        return train_at(context, run, warmup_updates=0)

    prepare_run_folder(run)
    return list(VirtualCluster(ranks).run(program).values)


def parameters(folder: str) -> dict[str, torch.Tensor]:
    return torch.load(Path(folder, "model.pt"))


class Killed(BaseException):
    """Nobody catches it, as nobody catches a kill."""


def kill_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss function that ends the process, so to say, at the `call`-th call of all ranks together."""
    calls = itertools.count(1)

    def counted(*args: Any, **settings: Any) -> Any:
        if next(calls) == call:
            raise Killed
        return function(*args, **settings)

    return counted


def expect_same_bits_after_a_kill(
    run: RunConfig[TaskConfig], monkeypatch: pytest.MonkeyPatch, loss: str, call: int
) -> None:
    """Train on two ranks, whole and killed and resumed, with a checkpoint after every update."""
    module, _, name = loss.rpartition(".")
    runs = [replace(run, run_dir=folder, checkpoint_every=1) for folder in ("whole", "killed")]
    train_virtually(runs[0], 2)
    with monkeypatch.context() as patched:
        patched.setattr(loss, kill_at(call, getattr(importlib.import_module(module), name)))
        with pytest.raises(Killed):
            train_virtually(runs[1], 2)
    before = len(records("killed"))
    train_virtually(replace(runs[1], resume=True), 2)
    assert 0 < before < len(records("killed"))
    assert written("killed") == written("whole")
