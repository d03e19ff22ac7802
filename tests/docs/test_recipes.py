"""What docs/recipes.md prints is run: the recipe that it builds from nothing, and commands over files of such names."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from stretto_lab.cli import main
from stretto_lab.cli.commands import CONFIGURE
from stretto_lab.cli.options import parse_options
from stretto_lab.observe import read_json_lines
from stretto_lab.recipes import RECIPES
from stretto_lab.recipes.gpt import Shape, causal_lm
from stretto_lab.recipes.language_models import SIZES
from stretto_lab.train.handle import check_run
from tests.docs.pages import DOCS, code_blocks, commands
from tests.recipes.files import INSTRUCTIONS, STORIES, train_virtually, write_lines

PAGE = DOCS / "recipes.md"
MARKER = "tests/docs/test_recipes.py"


def test_the_commands_of_the_page_train_its_recipe(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = (block for block in code_blocks(PAGE, MARKER) if block.startswith("import"))
    monkeypatch.syspath_prepend(str(Path.cwd()))  # taken back at the end, with the file's folder
    Path("line.py").write_text(source)
    (block,) = PAGE.read_text().partition("\nThen:\n")[2].split("```")[1:2]
    commands = [shlex.split(line)[1:] for line in block.strip().splitlines()]
    shown = []
    for words in commands:
        assert main(words) == 0
        shown.append(capfd.readouterr().out)
    losses = [row["heldout_loss"] for row in read_json_lines(Path("first/evaluations.jsonl"))]
    assert losses[-1] < losses[0] / 100
    assert [row["step"] for row in read_json_lines(Path("first/updates.jsonl"))] == list(range(1, 91))
    assert "--task.lr FLOAT           Learning rate of SGD [0.1]" in shown[2]
    assert "acco on 8 virtual ranks, network internet" in shown[3]


OVER_FILES = [
    words for words in commands(PAGE) if words[0] == "presets" or words[1] in ("language", "images")
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files and folders with the names that the page uses."""
    import datasets

    root = tmp_path_factory.mktemp("page")
    for folder in ("stories", "cifar-10-batches-bin", "pictures/cat", "pictures/dog"):
        (root / folder).mkdir(parents=True)
    for number, story in enumerate(STORIES):
        (root / "stories" / f"{number}.txt").write_text(story)
    (root / "wiki.txt").write_text("\n".join(STORIES))
    write_lines(root / "alpaca.jsonl", INSTRUCTIONS)
    model: Any = causal_lm("gpt2", Shape(1, 16, 1), vocabulary=300, context=512, dtype=torch.float32, seed=0)
    model.save_pretrained(root / "my-model")
    pixels = np.random.default_rng(0).integers(0, 10, (40, 3073), dtype=np.uint8)
    (root / "cifar-10-batches-bin" / "data_batch_1.bin").write_bytes(pixels.tobytes())
    for number in range(4):
        Image.fromarray(pixels[: 30 + number, :30]).save(
            root / "pictures" / ["cat", "dog"][number % 2] / f"{number}.png"
        )
    pictures = [{"image": path.read_bytes(), "label": 1} for path in sorted(root.glob("pictures/*/*.png"))]
    datasets.Dataset.from_list(pictures).to_parquet(str(root / "pictures.parquet"))
    return root


@pytest.mark.parametrize("words", OVER_FILES, ids=" ".join)
def test_a_command_over_files_trains_with_less_of_everything(
    words: list[str], files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    if words[0] == "presets":
        assert main(words) == 0
        return
    _, run = parse_options("train", words[1:], CONFIGURE["train"])
    check_run(run, 2)
    task = replace(run.task, readers=0, scale=run.task.scale if run.task.scale < 1 else 0.2)
    if task.model in SIZES and run.task.scale == 1:
        task = replace(task, model="my-model/config.json")
    if task.model.startswith("my-model"):
        task = replace(task, scale=1.0)
    small = replace(
        run, task=task, updates=1, samples=None, micro_batches=2, evaluate_every=None, checkpoint_every=None
    )
    first, second = train_virtually(replace(small, tensorboard=False), 2)
    assert first.updates == second.updates == 1


def test_the_page_prints_commands_over_files_for_both_recipes_and_the_presets() -> None:
    assert {words[1] for words in OVER_FILES if words[0] == "train"} == {"language", "images"}
    assert sum("--preset" in words for words in OVER_FILES) == 3


def test_the_lengths_of_the_page_are_those_of_runs() -> None:
    given = {"--updates", "--samples", "--tokens"}
    printed = [words for words in commands(PAGE) if given & set(words) and words[1] in RECIPES]
    runs = [parse_options("train", words[1:], CONFIGURE["train"])[1] for words in printed]
    for run in runs:
        check_run(run, 2)
    assert [run.planned_samples for run in runs] == [4000, 3907, 3000]
