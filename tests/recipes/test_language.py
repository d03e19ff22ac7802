"""Language models over people's own files."""

import importlib
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.errors import ConfigError
from stretto_lab.cli import main
from stretto_lab.observe import read_json_lines
from stretto_lab.recipes import Language
from stretto_lab.recipes.blocks import Packed, Streams
from stretto_lab.recipes.gpt import Shape, causal_lm
from stretto_lab.recipes.language import Documents, OwnTokens
from stretto_lab.recipes.rows import Heldout, divided, read_rows
from stretto_lab.recipes.task import Task
from stretto_lab.recipes.text import Subwords
from stretto_lab.testing import differing
from stretto_lab.train.outcome import check_folder
from tests.recipes.files import (
    STORIES,
    expect_same_bits_after_a_kill,
    parameters,
    run_over,
    train_virtually,
    write_lines,
)

BYTES = Subwords.trained((), 257)
END = BYTES.end
(NEW_LINE,) = BYTES.encode(b"\n")
ALONE = {"rank": 0, "world_size": 1, "seed": 0}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same stories in every format, and a model folder with a tokenizer."""
    import datasets

    root = tmp_path_factory.mktemp("files")
    rows = datasets.Dataset.from_dict({"text": STORIES})
    rows.save_to_disk(str(root / "saved"))
    datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(str(root / "splits"))
    rows.to_parquet(str(root / "stories.parquet"))
    write_lines(root / "stories.jsonl", [{"text": story} for story in STORIES])
    (root / "folder" / "deep").mkdir(parents=True)
    for number, story in enumerate(STORIES):
        Path(root, "folder", "deep" if number % 2 else "", f"{number:02}.txt").write_text(story)
    (root / "lines.txt").write_text("\n".join(STORIES) + "\n")
    model: Any = causal_lm("gpt2", Shape(2, 16, 2), vocabulary=257, context=64, dtype=torch.float32, seed=3)
    model.save_pretrained(root / "model")
    BYTES.write(root / "tokens")
    for file in (root / "tokens").iterdir():
        (root / "model" / file.name).write_bytes(file.read_bytes())
    return root


def over(place: Path, **settings: Any) -> Language:
    """A model of 12,000 parameters on one of the files."""
    small = {
        "model": str(place.parent / "model" / "config.json"),
        "length": 32,
        "batch": 2,
        "readers": 0,
    }
    return Language(
        **{
            "data": str(place),
            **small,
            "heldout": Heldout(samples=4),
            "sample": 2,
            **settings,
        }
    )


def task_over(place: Path, **settings: Any) -> Task:
    return over(place, **settings).build(0, 1, 0, updates=8)


@pytest.mark.parametrize(
    ("name", "documents"),
    [("saved", "file"), ("splits", "file"), ("stories.parquet", "file"), ("stories.jsonl", "file"),
     ("folder", "file"), ("lines.txt", "line")],
)  # fmt: skip
def test_every_format_gives_the_documents_that_were_written(files: Path, name: str, documents: Any) -> None:
    assert sorted(row["text"] for row in read_rows(str(files / name), documents)) == sorted(STORIES)


def test_of_a_folder_with_parts_for_training_only_these_are_read() -> None:
    for name in ("train-1", "train-2", "test-1", "validation"):
        write_lines(Path(f"{name}.jsonl"), [{"text": name}])
    Path("README.md").write_text("what it is")
    assert read_rows(".")["text"][:] == ["train-1", "train-2"]
    assert read_rows("test-1.jsonl")["text"][:] == ["test-1"]


def test_a_file_that_changes_is_read_anew() -> None:
    for text in ("before", "after"):
        write_lines(Path("rows.jsonl"), [{"text": text}])
        assert read_rows("rows.jsonl")["text"] == [text]


def test_an_epoch_of_blocks_is_the_training_documents_and_nothing_that_is_held_out(files: Path) -> None:
    kept, heldout = divided(len(STORIES), 0.05)
    assert sorted([*kept, *heldout]) == list(range(40))
    rows = over(files / "stories.jsonl")._sides().train
    assert rows["text"] == [STORIES[index] for index in kept]
    packed = Packed(Streams(rows, "text", BYTES), length=32, size=1, **ALONE)
    blocks = sum(
        -(-len(STORIES[index]) // 32) for index in kept
    )  # every document is a parcel of its own here
    tokens = [token for window in islice(packed, blocks) for token in window.inputs[0].tolist()]
    documents = BYTES.decode([token if token != END else NEW_LINE for token in tokens]).split("\n")
    assert sorted(filter(None, documents)) == sorted(STORIES[index] for index in kept)


def test_a_saved_order_of_other_blocks_is_refused(files: Path) -> None:
    state = task_over(files / "stories.jsonl").loader.state_dict()
    with pytest.raises(ConfigError, match="saved with blocks of 32 tokens, now 16"):
        task_over(files / "stories.jsonl", length=16).loader.load_state_dict(state)


def test_workers_read_ahead_in_the_same_order(files: Path) -> None:
    alone = task_over(files / "stories.jsonl")
    before = torch.get_rng_state()
    ahead = task_over(files / "stories.jsonl", readers=1)
    pairs = list(islice(zip(alone.loader, ahead.loader, strict=True), 9))
    assert [(one, other) for one, other in pairs if not torch.equal(one.inputs, other.inputs)] == []
    assert alone.loader.state_dict() == ahead.loader.state_dict()
    assert torch.equal(torch.get_rng_state(), before)  # or a resumed run would draw other dropout


def test_lora_trains_its_adapters_alone(files: Path) -> None:
    import safetensors.torch

    task = over(files / "stories.jsonl", model=str(files / "model"), lora_rank=2)
    start = {name: value.clone() for name, value in task.build(0, 1, 0, None).model.state_dict().items()}
    train_virtually(run_over(task, "run"), 2)
    changed = {name for name, value in parameters("run").items() if not torch.equal(value, start[name])}
    assert changed == {name for name in start if "lora_" in name}
    published = safetensors.torch.load_file("run/model/adapter_model.safetensors")
    trained = {name.replace(".default", ""): parameters("run")[name] for name in changed}
    assert differing(trained, published) == []
    assert not Path("run/model/model.safetensors").exists()
    assert task.build(0, 1, 0, None).model.peft_config["default"].lora_alpha == 2.0 * task.lora_rank


def test_a_model_folder_brings_parameters_and_a_configuration_new_ones(files: Path) -> None:
    import safetensors.torch

    stored = safetensors.torch.load_file(files / "model" / "model.safetensors")
    tuned = task_over(files / "stories.jsonl", model=str(files / "model")).model
    assert tuned.training
    assert differing(stored, {name: tuned.state_dict()[name] for name in stored}) == []
    fresh = task_over(files / "stories.jsonl", model=str(files / "model" / "config.json")).model
    assert fresh.config.n_embd == 16
    assert not torch.equal(fresh.state_dict()["transformer.wte.weight"], stored["transformer.wte.weight"])


def test_a_run_ends_with_a_folder_that_transformers_reads(files: Path) -> None:
    run = run_over(over(files / "stories.jsonl", model=str(files / "model")), "run")
    train_virtually(run, 2)
    transformers = importlib.import_module("transformers")
    published = transformers.AutoModelForCausalLM.from_pretrained("run/model").state_dict()
    assert differing(parameters("run"), {name: published[name] for name in parameters("run")}) == []
    assert Subwords.read("run/model").encode(b"the cat") == Subwords.read(str(files / "tokens")).encode(
        b"the cat"
    )


def test_a_tokenizer_is_trained_once_and_then_read_from_the_folder_of_the_run(files: Path) -> None:
    options = over(
        files / "stories.jsonl", own_tokens=OwnTokens(vocabulary=270), model="llama-tiny", length=32
    )
    kept = options.kept_in("run")
    assert kept.own_tokens.folder == "run/tokenizer"
    Path("run").mkdir()
    first = next(iter(kept.build(0, 1, 0, None).loader))
    again = Subwords.read("run/tokenizer")
    assert (again.vocabulary, again.end) == (270, 0)
    text = "the cat saw ünïcödé  \n"
    trained = Subwords.trained([row["text"].encode() for row in options._sides().train], 270)
    assert again.encode(text.encode()) == trained.encode(text.encode())
    # What it was trained on does not matter any more.
    other = replace(kept, data=str(files / "lines.txt"), documents=Documents(unit="line"))
    assert other.build(0, 1, 0, None).model.config.vocab_size == 270
    assert torch.equal(next(iter(kept.build(0, 1, 0, None).loader)).inputs, first.inputs)
    assert replace(options, tokenizer=str(files / "tokens")).kept_in("run").own_tokens.folder is None


@pytest.mark.long
def test_a_killed_run_goes_on_to_the_same_bits(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_over(over(files / "stories.jsonl"), strategy="acco")
    expect_same_bits_after_a_kill(run, monkeypatch, "stretto_lab.recipes.language.next_token_loss", 15)


@pytest.mark.parametrize(
    ("content", "settings", "named"),
    [
        (None, {}, "there are no data at data.jsonl"),
        ("", {}, "data.jsonl is empty"),
        ("{broken\n", {}, "data.jsonl cannot be read: ArrowInvalid"),
        ('{"body": "x"}\n' * 9, {}, "data.jsonl has no column 'text', only body"),
        ('{"text": "x"}\n', {}, "1 sample cannot be divided"),
        ('{"text": "x"}\n' * 9, {"--task.model": "gpt3"}, "did you mean 'gpt2'?"),
        ('{"text": "x"}\n' * 9, {"--task.model": "data.jsonl"}, "--task.model data.jsonl is not the configuration"),
        ('{"text": "x"}\n' * 9, {"--task.tokenizer": "nowhere"}, "--task.tokenizer nowhere is not a folder"),
        ('{"text": "x"}\n' * 9, {"--task.documents.unit": "lines"}, "did you mean 'line'?"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line_before_anything_starts(
    content: str | None, settings: dict[str, str], named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        Path("data.jsonl").write_text(content)
    there = sorted(Path().iterdir())
    words = [word for pair in settings.items() for word in pair]
    assert main(["train", "language", "--task.data", "data.jsonl", *words]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert named in line
    assert sorted(Path().iterdir()) == there


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"data": None}, "data is missing"),
    ({"data": "empty"}, "empty holds none of them: expected files of one format"),
    ({"data": "mixed"}, "mixed holds json and text"),
    ({"data": "bad.parquet"}, "bad.parquet cannot be read: ArrowInvalid"),
    ({"model": "half"}, "model half has no model.safetensors"),
    ({"model": "model", "length": 65}, "length 65 is longer than the 64 positions"),
    ({"model": "model", "tokenizer": "larger"}, "270 tokens and .* knows 257"),
    ({"tokenizer": "saved"}, "holds no tokenizer that can be read"),
]


def test_wrong_folders_and_what_does_not_fit_are_named(files: Path) -> None:
    for folder, file, content in (
        ("empty", None, ""),
        ("half", "config.json", '{"model_type": "gpt2"}'),
        ("mixed", "a.txt", "x"),
        ("mixed", "b.jsonl", "{}"),
    ):
        Path(folder).mkdir(exist_ok=True)
        if file:
            Path(folder, file).write_text(content)
    Path("bad.parquet").write_bytes(b"PAR1 and so on")
    Subwords.trained([story.encode() for story in STORIES], 270).write(Path("larger"))
    for settings, named in WRONG:
        found = {
            name: str(files / value) if value in ("model", "saved") else value
            for name, value in settings.items()
        }
        with pytest.raises(ConfigError, match=named):
            task_over(files / "stories.jsonl", **found)


@pytest.mark.long
def test_the_command_line_trains_with_a_reader_and_keeps_the_tokenizer_for_a_resume(
    files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = "--task.model llama-tiny --task.sample 2 --workers 1 --updates 2 --no-tensorboard --run-dir run"
    assert main(["train", "language", "--task.data", str(files / "stories.jsonl"), *words.split()]) == 0
    assert capfd.readouterr().err == ""
    assert len(read_json_lines(Path("run/updates.jsonl"))) == 2
    assert Subwords.read("run/tokenizer").vocabulary == 257
    check_folder(Path("run"), resume=True)
