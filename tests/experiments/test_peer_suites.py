"""`experiments/peer_suites.py` on a made-up checkout: differences that have a reason, and those that have none."""

import importlib.util
from pathlib import Path

import pytest

from tests.processes import Command

SCRIPT = Path(__file__).parents[2] / "experiments" / "peer_suites.py"
MADE_UP = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel

SETTINGS = {"fast_dev_run": True, "enable_progress_bar": False, "enable_model_summary": False, "logger": False}


def test_that_is_the_same():
    Trainer(**SETTINGS).fit(BoringModel())


def test_that_differs():
    trainer = Trainer(**SETTINGS)
    trainer.fit(ManualOptimBoringModel())
"""


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
def test_a_difference_is_told_with_its_reason_and_ends_in_an_error_without_one() -> None:
    folder = Path("tests") / "tests_pytorch"
    folder.mkdir(parents=True)
    (folder / "test_made_up.py").write_text(MADE_UP)
    with Command(str(SCRIPT), ".") as command:
        printed, complaints = command.communicate()
    assert "passed: stock 2, ours 1; differ: 1" in printed, complaints
    assert "1 x refused at the start" in printed
    assert "test_made_up.py::test_that_differs: stretto.errors.ConfigError" in printed
    assert command.returncode == 0


@pytest.mark.parametrize(
    ("message", "known"),
    [("StrettoStrategy does not work with ModelPruning: x", True), ("assert 1 == 2", False)],
)
def test_a_reason_is_found_by_what_a_test_says(
    monkeypatch: pytest.MonkeyPatch, message: str, known: bool
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    script = importlib.import_module("peer_suites")
    assert (script.reason("lightning", "test_x", message) is not None) == known
