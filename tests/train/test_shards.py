"""A run whose model is sharded inside nodes: the run of whole models up to rounding, killed and resumed to the bit."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto_lab.cli import main
from stretto_lab.recipes import Task
from stretto_lab.testing import differing
from stretto_lab.train.configuration import RunConfig
from tests.docs.pages import DOCS, code_blocks
from tests.train.runs import evaluations, records, tiny_run, train
from tests.train.tiny import Tiny

RANKS = 4
ON_ONE_NODE = ["--workers", "2", "--shard", "2", "--updates", "2", "--no-tensorboard", "--run-dir", "run"]


def run_of(folder: str, **settings: Any) -> RunConfig[Any]:
    return tiny_run(folder, **{"workers": RANKS, "shard": 2, "task": Tiny(normed=False), **settings})


def values(folder: str) -> dict[str, torch.Tensor]:
    return dict(torch.load(Path(folder, "model.pt")))


@pytest.mark.long
def test_shards_train_as_whole_models_do_leave_the_same_files_and_go_on_with_whole_models() -> None:
    for folder, shard in (("whole", 1), ("two", 2), ("four", 4)):
        train(run_of(folder, shard=shard), RANKS)
    for folder in ("two", "four"):
        assert [one["samples"] for one in records(folder)] == [one["samples"] for one in records("whole")]
        # AdamW divides by the square root of squared gradients: rounding of tiny ones grows.
        torch.testing.assert_close(values(folder), values("whole"), rtol=0, atol=1e-4)
        torch.testing.assert_close(evaluations(folder), evaluations("whole"), rtol=1e-4, atol=0)
    (outcome, _) = train(dataclasses.replace(run_of("two"), resume=True, shard=1, updates=12))
    assert (outcome.resumed_from, outcome.updates) == (10, 12)


@pytest.mark.long
@pytest.mark.parametrize("lora", [[], ["--task.lora-rank", "2"]], ids=["whole", "lora"])
def test_the_language_recipe_trains_on_shards_and_publishes_what_it_has_trained(
    lora: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    Path("stories").mkdir()
    Path("stories", "one.txt").write_text("Once there was a shard. It was part of a whole.\n" * 40)
    (typed,) = code_blocks(DOCS / "sharded.md", "tests/train/test_shards.py")
    shorter = "--task.documents.unit line --task.readers 0 --task.length 16 --updates 3"
    command = [
        *typed.replace("\\\n", " ").split()[1:],
        *shorter.split(),
        "--no-tensorboard",
        "--run-dir",
        "run",
        *lora,
    ]
    assert main(command) == 0
    first_line = capsys.readouterr().out.splitlines()[0]
    assert first_line.startswith("acco")
    assert first_line.endswith(" on 4 workers, 2 nodes of 2 shards (cpu), run")
    assert main(["resume", "run", "--updates", "4"]) == 0
    assert "nodes of 2 shards" in capsys.readouterr().out
    trained = values("run")
    if lora:
        import safetensors.torch

        published = safetensors.torch.load_file("run/model/adapter_model.safetensors")
        assert published
        for name, value in published.items():
            assert torch.equal(value, trained[name.replace(".weight", ".default.weight")])
        return
    model = transformers.AutoModelForCausalLM.from_pretrained("run/model", local_files_only=True)
    assert differing(model.state_dict(), trained) == []
    assert trained["lm_head.weight"].data_ptr() == trained["model.embed_tokens.weight"].data_ptr()


def smooth(rank: int, world_size: int, seed: int, updates: int | None) -> Task:
    """A recipe of the user's own."""
    return Tiny(normed=False).build(rank, world_size, seed, updates)


@pytest.mark.long
@pytest.mark.parametrize("name", ["stdlib-gpt", f"{__file__}:smooth"], ids=["stdlib-gpt", "one's own"])
def test_recipes_without_batch_normalisation_train_on_shards(name: str) -> None:
    options = ["--size", "0.1m", "--batch", "2", "--evaluation-windows", "4", "--sample", "2"]
    own = [word.replace("--", "--task.") if word[0] == "-" else word for word in options]
    command = ["train", name, *(own if name == "stdlib-gpt" else [])]
    assert main([*command, *ON_ONE_NODE]) == 0


def test_batch_normalisation_is_refused_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "digits-resnet", "--task.width", "4", "--task.batch", "8"]
    assert main([*command, *ON_ONE_NODE]) == 1
    assert "batch normalisation" in capsys.readouterr().err
    assert not Path("run").exists()
    assert main([*command, *ON_ONE_NODE, "--buffers", "*=alone"]) == 0
