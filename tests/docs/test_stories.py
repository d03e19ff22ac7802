"""The stories of docs/stories, run small: their commands, on virtual ranks."""

from pathlib import Path
from typing import Any

import pytest

from stretto_lab.cli.commands import CONFIGURE
from stretto_lab.cli.options import parse_alone, parse_options
from stretto_lab.estimate import EstimateConfig, estimate
from stretto_lab.train.configuration import RunConfig
from tests.docs.pages import DOCS, commands
from tests.recipes.files import smaller, train_virtually, write_stories

STORY = {page.stem: page for page in sorted((DOCS / "stories").glob("*.md"))}
RANKS = 2


@pytest.fixture
def files() -> None:
    """The folder in which the commands are typed."""
    write_stories(Path())


def runs(story: str) -> list[RunConfig[Any]]:
    """What the story trains, with less of everything."""
    found = []
    for words in commands(STORY[story]):
        if "train" in words:
            rest = [word for word in words[words.index("train") + 1 :] if word != "--resume"]
            found.append(smaller(parse_options("train", rest, CONFIGURE["train"])[1], 6))
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
