"""Every command line that the pages print can be read."""

import dataclasses
import re
import shlex

import pytest
from torch.distributed.run import get_args_parser

from stretto_lab.cli.help import COMMANDS as KNOWN
from stretto_lab.cli.options import parse_alone, parse_options
from stretto_lab.estimate import EstimateConfig
from stretto_lab.page import ReportConfig
from stretto_lab.plan import PlanConfig
from stretto_lab.train.arms import parse_arms
from stretto_lab.train.configuration import CompareConfig, DiagnoseConfig, RunConfig
from stretto_lab.train.meet import MeetConfig
from stretto_lab.train.simulation import SimulateConfig
from tests.docs.pages import ROOT, commands, links, pages, typed

# Those of docs/recipes.md are run, by the page's own test.
COMMANDS = [words for page in pages() if page.name != "recipes.md" for words in commands(page)]
ALONE = {"estimate": EstimateConfig, "meet": MeetConfig}
"""The options of commands that take nothing else."""
AFTER_NAMES = {"report": ReportConfig}
"""The options of commands that take folders or records before them."""


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_printed_command_has_options_and_arms_that_exist(words: list[str]) -> None:
    command, *rest = words
    if rest and rest[0].startswith("examples/"):
        rest[0] = str(ROOT / rest[0])
    if command == "resume":
        return  # what follows is a folder
    if command == "train":
        _, run = parse_options("train", rest, lambda task: RunConfig(task=task))
        parse_arms([run.strategy])
    elif command == "simulate":
        _, simulation = parse_options("simulate", rest, lambda task: SimulateConfig(task=task))
        simulation.as_run()
        simulation.cluster()
    elif command in AFTER_NAMES:
        count = next((at for at, word in enumerate(rest) if word.startswith("-")), len(rest))
        parse_alone(command, rest[count:], AFTER_NAMES[command]())
    elif command in ALONE:
        parse_alone(command, rest, ALONE[command]())
    elif command == "plan":
        parse_options("plan", rest, lambda task: PlanConfig(task=task))
    elif command == "diagnose":
        parse_options("diagnose", rest, lambda task: DiagnoseConfig(task=task))
    else:
        assert command == "compare"
        _, comparison = parse_options("compare", rest, lambda task: CompareConfig(task=task))
        parse_arms(comparison.strategies)


def test_the_pages_print_commands() -> None:
    assert {words[0] for words in COMMANDS} == KNOWN.keys()


WIDEST = 100
"""Characters of code that the site shows beside both side bars, on a screen of 1280 pixels."""


def test_a_printed_command_is_seen_whole() -> None:
    commands = ("stretto ", "torchrun ", "python ", "    --", "    -m ")
    wide = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in pages()
        for block in typed(page)
        if any(f"{word}" in block for word in commands[:3])
        for line in block.splitlines()
        if line.startswith(commands) and len(line) > WIDEST
    ]
    assert wide == []


OF_A_CHECKOUT = re.compile(
    r"(?:^|(?<=[\s'\"]))(?:examples|benchmarks|tests|docs|src|\.venv)/[\w./-]*|^make\b|'\.\[\w+\]'", re.M
)
"""What somebody who has the wheel alone does not have."""


def test_a_command_with_a_path_of_the_repository_says_where_its_reader_has_it_from() -> None:
    """From a checkout, in so many words, or from the site, by a link to the file."""
    unexplained = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        targets = {(page.parent / target.partition("#")[0]).resolve() for target in links(page)}
        for block in typed(page):
            before = text.partition(block)[0]
            for path in OF_A_CHECKOUT.findall(block):
                file = (ROOT / path.partition(":")[0]).resolve()
                if "checkout" not in before and file not in targets and file.parent not in targets:
                    unexplained.append(f"{page.relative_to(ROOT)}: {path}")
    assert unexplained == []


BY_TORCHRUN = [
    shlex.split(line.partition("torchrun ")[2])
    for page in pages()
    for block in typed(page)
    for line in block.replace("\\\n", " ").splitlines()
    if "torchrun " in line
]
OF_EXAMPLES = [
    ["example.py", name, "1"]
    for file in sorted((ROOT / "examples").rglob("*.py"))
    for name in re.findall(r'add_argument\(\s*"(--[\w-]+)"', file.read_text(encoding="utf-8"))
]

OF_TRAIN = [
    ["-m", "stretto", "train", f"--{one.name.replace('_', '-')}", "1"]
    for one in dataclasses.fields(RunConfig)
]


@pytest.mark.parametrize("words", BY_TORCHRUN + OF_EXAMPLES + OF_TRAIN, ids=" ".join)
def test_torchrun_leaves_a_script_its_options(words: list[str]) -> None:
    """It refuses those with which two or more of its own begin, also after the script's name."""
    read = get_args_parser().parse_args(words)
    assert read.training_script_args == words[words.index(read.training_script) + 1 :]
