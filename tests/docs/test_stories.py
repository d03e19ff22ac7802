"""The stories of docs/stories, run small: their commands, on virtual ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto_lab.cli.commands import CONFIGURE
from stretto_lab.cli.options import parse_alone, parse_options
from stretto_lab.estimate import EstimateConfig, estimate
from stretto_lab.recipes.gpt import Shape, causal_lm
from stretto_lab.recipes.language_models import SIZES
from stretto_lab.train.configuration import RunConfig
from tests.docs.pages import DOCS, commands
from tests.recipes.files import STORIES, train_virtually

STORY = {page.stem: page for page in sorted((DOCS / "stories").glob("*.md"))}
RANKS = 2


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files with the names that the stories use, in the folder in which they are typed."""
    monkeypatch.chdir(tmp_path)
    Path("stories").mkdir()
    for number, story in enumerate(STORIES):
        Path("stories", f"{number}.txt").write_text(story)
    model: Any = causal_lm("gpt2", Shape(1, 16, 1), vocabulary=300, context=512, dtype=torch.float32, seed=0)
    model.save_pretrained("my-model")


def runs(story: str) -> list[RunConfig[Any]]:
    """What the story trains, with less of everything; on virtual ranks, whose link is as fast as they like."""
    found = []
    for words in commands(STORY[story]):
        if "train" not in words:
            continue
        rest = words[words.index("train") + 1 :]
        _, run = parse_options("train", [word for word in rest if word != "--resume"], CONFIGURE["train"])
        own = run.task.model not in SIZES
        task = replace(
            run.task, readers=0, model=run.task.model if own else "my-model/config.json", length=32
        )
        small = replace(
            run, task=task, updates=6, micro_batches=2, evaluate_every=None, checkpoint_every=None, link="none",
            tensorboard=False, workers=None, run_dir=None,
        )  # fmt: skip
        found.append(small)
    return found


@pytest.mark.parametrize(
    ("story", "choice"),
    [("two-homes", "--strategy acco --wire rotated2"), ("four-nodes", "--strategy acco --wire rotated2")],
)
def test_the_first_choice_that_a_story_tells_is_that_of_its_estimate(story: str, choice: str) -> None:
    (words,) = (words for words in commands(STORY[story]) if words[0] == "estimate")
    config = parse_alone("estimate", words[1:], EstimateConfig())
    _, first = estimate(config.work, config.allow_loss)
    assert first.options == choice


@pytest.mark.long
@pytest.mark.usefixtures("files")
def test_two_homes_train_alike() -> None:
    plain, hidden, launched = runs("two-homes")
    for run in (plain, hidden, launched):
        first, second = train_virtually(run, RANKS)
        assert first.updates == second.updates == 6
    assert (hidden.strategy, hidden.wire) == (launched.strategy, launched.wire) == ("acco", "rotated2")
