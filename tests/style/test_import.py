"""Importing stretto defines names and does nothing else."""

import json
import os
import subprocess
import sys
from importlib import import_module

import pytest

from website.promises import MODULES

EXTRAS = (
    "accelerate",
    "datasets",
    "lightning",
    "sklearn",
    "tensorboard",
    "tokenizers",
    "transformers",
)

IMPORTED = {"importlib", "TYPE_CHECKING", "Any"}
"""What the package's own file imports for itself."""

REPORT = """
import json, os, random, sys, threading, warnings
import torch, numpy, xxhash, torch.distributed, torch.distributed.tensor  # what these change is not ours

def state():
    return {
        "environment": dict(os.environ),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "torch threads": torch.get_num_threads(),
        "torch random": torch.get_rng_state().tolist(),
        "python random": hash(random.getstate()),
        "folder": sorted(os.listdir()),
        "path": list(sys.path),
        "warning filters": len(warnings.filters),
        "default group": torch.distributed.is_initialized(),
    }

before = state()
import stretto
from stretto import *
import stretto_lab
after = state()
changed = sorted(name for name in before if before[name] != after[name])
print(json.dumps({"changed": changed, "modules": sorted(sys.modules)}))
"""


def imported() -> tuple[dict[str, list[str]], str]:
    """What a fresh interpreter says after `import stretto`, and what it wrote besides."""
    process = subprocess.run([sys.executable, "-c", REPORT], capture_output=True, text=True, check=True)
    *noise, report = process.stdout.splitlines()
    return json.loads(report), "\n".join(noise) + process.stderr


def test_import_changes_nothing_and_needs_no_extra() -> None:
    report, written = imported()
    extras = [extra for extra in EXTRAS if extra in report["modules"]]
    assert (report["changed"], extras, written) == ([], [], "")


@pytest.mark.parametrize(("rank", "told"), [("0", 1), ("1", 0)])
def test_pytorch_is_not_imported_before_the_first_line_which_rank_0_prints(rank: str, told: int) -> None:
    program = """
import sys
from stretto_lab.cli import main

class End:
    def find_spec(self, name, *_):
        if name == "torch":
            sys.exit("imported")

sys.meta_path.insert(0, End())
assert [main(["--version"]), main(["--help"]), main(["tarin"])] == [0, 0, 2]
main(["train", "digits-resnet", "--updates", "0"])
"""
    variables = {**os.environ, "RANK": rank, "WORLD_SIZE": "2"}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=variables)
    assert ended.stdout.splitlines().count("loading PyTorch") == told
    assert ended.stderr.splitlines()[-1] == "imported"
    assert "did you mean" in ended.stderr  # so the import came behind the commands that need none


@pytest.mark.parametrize("module", MODULES)
def test_a_package_that_programs_use_needs_no_import_of_its_own(module: str) -> None:
    home, _, name = module.partition(".")
    if name:  # asked directly: an earlier import would have made it an attribute already
        assert import_module(home).__getattr__(name) is import_module(module)


def test_the_public_names_are_exactly_those_listed() -> None:
    import stretto

    for name in stretto.__all__:
        getattr(stretto, name)
    # A submodule becomes an attribute once anybody imports it, so it may be listed but need not.
    submodules = {name for name in vars(stretto) if f"stretto.{name}" in sys.modules}
    public = {name for name in vars(stretto) if not name.startswith("_")} - IMPORTED
    assert set(stretto.__all__) - submodules == public - submodules
    assert len(stretto.__all__) == len(set(stretto.__all__))
