"""What commands print has units, one for each quantity, and names no file that comes with the repository alone."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto_lab.cli import main
from tests.style.source import ROOT, package_files

FOLDERS = re.compile(r"\b(?:docs|benchmarks|examples|experiments|tests)/")
SMALL = "digits-resnet --task.width 4 --task.batch 8 --updates 2 --micro-batches 1"


def printed(path: Path) -> Iterator[tuple[int, str]]:
    """Texts of a file that may reach a user: all but docstrings of modules, functions and constants.

    Docstrings of options and of their classes are what `--help-all` prints.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    silent = {
        node.value
        for owner in ast.walk(tree)
        if isinstance(owner, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef)
        for node in owner.body
        if isinstance(node, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in silent:
            yield node.lineno, node.value


@pytest.mark.parametrize("path", package_files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_text_for_users_names_no_file_of_the_repository_and_no_second_unit_of_rates(path: Path) -> None:
    if path.suffix != ".py":
        return
    texts = list(printed(path))
    assert [(line, text) for line, text in texts if FOLDERS.search(text)] == []
    assert [(line, text) for line, text in texts if re.search(r"\b[kMG]i?B(?:yte)?/s\b", text)] == []


@pytest.mark.long
def test_every_loss_that_a_command_prints_has_its_unit(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(f"simulate {SMALL} --ranks 2".split()) == 0
    assert main(f"compare {SMALL} --workers 1 --strategies zero1 --out compared".split()) == 0
    assert main(f"train {SMALL} --workers 1 --run-dir run".split()) == 0
    assert main(["report", "run"]) == 0
    shown = capfd.readouterr().out
    losses = re.findall(r"held-out loss [\d.]+(.{15})", shown)
    assert len(losses) >= 5
    assert set(losses) == {" nats per image"}
    assert "losses in nats per image" in shown
    assert "nats per image" in Path("run/report.html").read_text(encoding="utf-8")
