"""The papers' settings: every one is an option, trains at a small scale, and has the paper's size at full scale."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stretto.strategies.ledger import ledger_of
from stretto_lab.cli import main
from stretto_lab.cli.commands import CONFIGURE
from stretto_lab.cli.options import options_of, parse_options, shown
from stretto_lab.cli.presets import OURS, PRESETS
from stretto_lab.recipes import Language, recipe
from stretto_lab.recipes.classifiers import image_model
from stretto_lab.recipes.language_models import language_model, with_lora
from stretto_lab.train.arms import parse_arm, parse_arms
from stretto_lab.train.configuration import RunConfig
from stretto_lab.train.handle import check_run
from stretto_lab.train.simulation import SimulateConfig, simulate
from tests.docs.pages import DOCS, table
from tests.recipes.files import (
    INSTRUCTIONS,
    STORIES,
    expect_same_bits_after_a_kill,
    refusal,
    write_lines,
)
from tests.terminal import print_on_a_terminal


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of the papers' kinds: stories, instructions, CIFAR."""
    root = tmp_path_factory.mktemp("files")
    write_lines(root / "stories.jsonl", [{"text": story} for story in STORIES * 10])
    write_lines(root / "alpaca.jsonl", INSTRUCTIONS * 15)
    draws = np.random.default_rng(0)
    for name, file, labels in (("cifar10", "data_batch_1.bin", 1), ("cifar100", "train.bin", 2)):
        (root / name).mkdir()
        records = draws.integers(0, 10, (200, labels + 3072), dtype=np.uint8)
        (root / name / file).write_bytes(records.tobytes())
    return root


def data_of(name: str, files: Path) -> str:
    kind = next((word for word in ("alpaca", "cifar100", "cifar10") if word in name), "stories")
    return str(files / kind) + ("" if "cifar" in kind else ".jsonl")


def small(command: str, name: str, files: Path) -> list[str]:
    # With two threads PyTorch 2.13 aborts in the backward pass of a residual network at 0.05, also in a plain loop, and
    # not without oneDNN.
    scale = 0.1 if PRESETS[name].recipe == "images" else 0.05
    words = f"{PRESETS[name].recipe} --preset {name} --scale {scale} --updates 3 --task.readers 0"
    return [*words.split(), "--task.data", data_of(name, files)]


@pytest.mark.parametrize("name", PRESETS)
def test_every_setting_is_an_option_and_has_a_source(name: str) -> None:
    preset = PRESETS[name]
    found: dict[str, Any] = {}
    for command in ("compare", "train"):
        _, run = parse_options(command, [preset.recipe, "--preset", name], CONFIGURE[command])
        found |= {option.name: option.default for option in options_of(run)}
    assert {option: found[option] for option in preset.settings} == {
        option: setting.value for option, setting in preset.settings.items()
    }
    sources = [setting.source for setting in preset.settings.values()]
    assert all(source == OURS or "OpenReview" in source or "github.com" in source for source in sources)


def test_every_value_and_its_source_are_those_of_the_audit() -> None:
    # Written by hand beside the pages: who changes a preset looks at them again, and says so there.
    lines = []
    for name, preset in PRESETS.items():
        lines.append(name)
        lines += [f"    {key} {shown(one.value)} | {one.source}" for key, one in preset.settings.items()]
    assert lines == Path(__file__).with_name("presets.txt").read_text().splitlines()


@pytest.mark.parametrize("name", PRESETS)
def test_every_arm_of_a_preset_can_run_as_the_comparison_says(name: str, files: Path) -> None:
    words = [PRESETS[name].recipe, "--preset", name, "--task.data", data_of(name, files)]
    _, comparison = parse_options("compare", words, CONFIGURE["compare"])
    arms = parse_arms(comparison.strategies, comparison.learning_rates)
    for arm in arms:
        run = comparison.fitted_to(arm).run_of(arm)
        check_run(run, comparison.workers)
        assert (run.samples, run.updates) == (comparison.samples, comparison.updates)
    is_noisy = [comparison.fitted_to(arm).run_of(arm).noise is not None for arm in arms]
    if name.startswith("paft"):  # the first row of its tables is the clean one
        assert is_noisy == [False, *[True] * (len(arms) - 1)]


def test_a_preset_of_noise_trains_otherwise_than_ddp_does(files: Path) -> None:
    words = [*small("simulate", "paft-resnet18-cifar10", files), "--ranks", "2", "--network", "free"]
    losses = []
    for more in ((), ("--noise", "None")):
        _, simulation = parse_options("simulate", [*words, *more], lambda task: SimulateConfig(task=task))
        losses.append(simulate(simulation).values[0].heldout_loss)
    assert losses[0] != losses[1]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains_for_three_updates_at_a_small_scale(name: str, files: Path) -> None:
    words = [*small("simulate", name, files), "--ranks", "2", "--network", "free"]
    _, simulation = parse_options("simulate", words, lambda task: SimulateConfig(task=task))
    first, second = simulate(simulation).values
    assert (first.updates, second.updates) == (3, 3)
    assert first.heldout_loss != first.heldout_before


def test_a_killed_preset_goes_on_to_the_same_bits_echoes_and_crops_included(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One preset, on virtual ranks; `experiments/presets.py` tries all of them on real workers.
    _, run = parse_options("train", small("train", "paft-resnet18-cifar10", files), CONFIGURE["train"])
    run = replace(run, tensorboard=False, updates=4, echo="even:uses=1.5", strategy="paft-sync:interval=2")
    expect_same_bits_after_a_kill(run, monkeypatch, "stretto_lab.recipes.images.class_loss", 7)


# In millions of parameters what the papers, or those who published the models, call them; their last digit is rounded.
LANGUAGE_MODELS = {
    "gpt-neo-36m": (36, 1),
    "gpt-neo-125m": (125, 1),
    "gpt-neo-2.7b": (2700, 100),
    "gpt2": (124, 1),
    "llama-2-7b": (7000, 1000),
}
# He et al. and Sandler et al., with a head for so many classes of CIFAR; 11.2 M is also in the main text of PAFT.
IMAGE_MODELS = {"resnet-18": (10, 11.2), "resnet-50": (100, 23.7), "mobilenet-v2": (10, 2.2)}


def test_the_models_of_all_presets_are_compared_with_the_papers() -> None:
    models = {preset.settings["--task.model"].value for preset in PRESETS.values()}
    assert models == LANGUAGE_MODELS.keys() | IMAGE_MODELS.keys()


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_a_language_model_has_the_size_of_its_paper(name: str) -> None:
    millions, digit = LANGUAGE_MODELS[name]
    vocabulary = 32_000 if "llama" in name else 50_257
    with torch.device("meta"):  # counted without memory
        model = language_model(
            name, vocabulary=vocabulary, length=1024, scale=1.0, dtype=torch.float32, seed=0
        )
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=digit / 2)


def held(run: RunConfig[Any], ranks: int, strategy: str | None = None) -> tuple[float, float]:
    """Parameters, and bytes that a rank holds beside activations, of a language model that has no memory itself."""
    task = run.task
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[task.dtype]
    size = {"vocabulary": 32_000 if "llama" in task.model else 50_257, "length": task.length}
    with torch.device("meta"):
        model = language_model(task.model, **size, scale=1.0, dtype=dtype, seed=0)
        if task.lora_rank is not None:
            model = with_lora(model, task.lora_rank, 2.0 * task.lora_rank, task.lora.dropout, seed=0)
    wide = dtype.itemsize if run.accumulate == "parameter" else 4
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    count = sum(parameter.numel() for parameter in model.parameters())
    chosen = parse_arm(strategy or run.strategy).strategy()
    each = ledger_of(chosen).memory_bytes(
        chosen, parameter=dtype.itemsize, accumulation=wide, world_size=ranks
    )
    return count, trained * each + (count - trained) * dtype.itemsize


def test_the_page_says_what_a_full_run_of_every_language_model_holds() -> None:
    rows = {
        row["preset"].strip("`"): row for row in table(DOCS / "recipes.md", "tests/recipes/test_presets.py")
    }
    assert list(rows) == [name for name, preset in PRESETS.items() if preset.recipe == "language"]
    for name, row in rows.items():
        _, run = parse_options("train", ["language", "--preset", name], CONFIGURE["train"])
        count, held_bytes = held(run, run.workers)
        assert row["millions of parameters"] == f"{count / 1e6:,.0f}"
        assert row["strategy"] == f"`{run.strategy.partition(':')[0]}`"
        assert row["ranks"] == str(run.workers)
        assert row["GB of a rank"] == f"{held_bytes / 1e9:.1f}"


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_an_image_classifier_has_the_size_of_its_paper(name: str) -> None:
    classes, millions = IMAGE_MODELS[name]
    with torch.device("meta"):
        model = image_model(name, classes=classes, size=32, scale=1.0, seed=0)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.05)


def test_what_is_given_by_hand_wins_and_a_scale_shrinks_model_and_updates() -> None:
    words = ["language", "--updates", "7", "--preset", "acco-openwebtext", "--task.lr", "0.5"]
    _, run = parse_options("train", words, CONFIGURE["train"])
    assert (run.updates, run.samples) == (7, None)
    assert (run.task.lr, run.task.length, run.strategy) == (0.5, 1024, "acco")
    _, run = parse_options(
        "train", ["language", "--preset", "acco-openwebtext", "--scale", "0.01"], CONFIGURE["train"]
    )
    assert (run.updates, run.samples, run.task.scale) == (None, 4000, 0.01)
    assert parse_options("train", ["language", "--scale", "0.5"], CONFIGURE["train"])[1].task == Language(
        scale=0.5
    )
    assert parse_options("train", ["stdlib-gpt", "--updates=3"], CONFIGURE["train"])[1].task == recipe(
        "stdlib-gpt"
    )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("language --preset aco-alpaca", "did you mean 'acco-alpaca'?"),
        ("images --preset acco-alpaca", "--preset acco-alpaca is of the recipe language, not of images"),
        ("language --prest acco-alpaca", "did you mean '--preset'?"),
        ("language --scale 2", "--task.scale must be above 0 and at most 1, found 2.0"),
        ("stdlib-gpt --scale 0.5", "--scale 0.5: stdlib-gpt has no --task.scale"),
        ("language --scale half", "--scale half: expected a number"),
        ("language --preset", "--preset takes one value, found none"),
    ],
)
def test_a_mistake_is_one_line(words: str, named: str) -> None:
    assert named in refusal(words)


def test_the_list_names_all_and_one_is_explained_with_its_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*PRESETS]
    assert main(["presets", "--name", "acco-openwebtext"]) == 0
    printed = capsys.readouterr().out
    assert "stretto train language --preset acco-openwebtext --task.data PATH" in printed
    (warmup,) = (line for line in printed.splitlines() if "--task.schedule.warmup" in line)
    value, number = warmup.split()[1:]
    assert value == "63"
    assert f"  {number} 50,000 gradients of micro-batches" in printed
    assert "50B tokens" in printed.replace("\n", " ")
    assert main(["presets", "--name", "acco-openwebtxt"]) == 2
    assert "did you mean 'acco-openwebtext'?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], *(["--name", name] for name in PRESETS)], ids=" ".join)
def test_on_a_terminal_all_of_it_fits(
    words: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_on_a_terminal(monkeypatch)
    assert main(["presets", *words]) == 0
    printed = capfd.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
