"""No script of the experiments and benchmarks has lost a name that it imports."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    script for folder in ("benchmarks", "experiments") for script in sorted((ROOT / folder).glob("*.py"))
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: f"{script.parent.name}/{script.stem}")
def test_a_script_can_be_imported(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(script.parent))
    importlib.import_module(script.stem)
