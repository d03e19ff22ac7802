"""No script of the experiments and benchmarks has lost a name that it imports, and importing one changes nothing."""

import importlib
import sys
from pathlib import Path

import pytest

from stretto.exchange import WIRES
from stretto.guards import GUARDS
from stretto.strategies import STRATEGIES
from stretto_lab.peers import PEERS
from stretto_lab.recipes import RECIPES

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    script
    for folder in ("benchmarks", "experiments", "experiments/papers")
    for script in sorted((ROOT / folder).glob("*.py"))
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: f"{script.parent.name}/{script.stem}")
def test_a_script_can_be_imported_and_registers_nothing_before_it_runs(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registries = (WIRES, GUARDS, PEERS, RECIPES, STRATEGIES)
    before = [set(names) for names in registries]
    monkeypatch.syspath_prepend(str(script.parent))
    for sibling in script.parent.glob("*.py"):  # imported by an earlier test, it would do nothing now
        monkeypatch.delitem(sys.modules, sibling.stem, raising=False)
    importlib.import_module(script.stem)
    assert [set(names) for names in registries] == before
