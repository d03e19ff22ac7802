"""The wheel holds the whole package and nothing else, and works where the repository is not."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import stretto
from tests.style.source import PACKAGE, ROOT, package_files

TRAINING = """
import torch
import stretto

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
parallel = stretto.DataParallel(model, optimizer, stretto.ZeRO1(), micro_batches=1)
for _ in range(10):
    parallel.backward(model(torch.ones(2, 4)).square().mean())
parallel.finish()
print(parallel.steps, stretto.__version__, stretto.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what belongs into it, so that no build folder stays in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(PACKAGE, folder / "src" / "stretto", ignore=shutil.ignore_patterns("__pycache__"))
    words = ("wheel", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", "dist", ".")
    subprocess.run([sys.executable, "-m", "pip", *words], cwd=folder, check=True)
    (built,) = (folder / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a fresh environment with the wheel, and with a path to the packages that it needs."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    # Not this environment's own .pth files: the one of the editable install would lead back to the repository.
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    install = ("install", "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check", str(wheel))
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), *install], check=True
    )
    return folder / "bin"


def run(*words: str | Path) -> str:
    """Run a command in the test's empty folder, without a way back to the repository, and return what it prints."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(list(map(str, words)), env=clean, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_wheel_holds_every_module_and_no_test(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    about = f"stretto-{stretto.__version__}.dist-info"
    modules = {str(file.relative_to(PACKAGE.parent)) for file in package_files()}
    listed = {
        f"{about}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "top_level.txt", "entry_points.txt")
    }
    assert names == modules | listed | {
        "stretto/py.typed",
        "stretto/page/page.css",
        "stretto/page/page.js",
        f"{about}/licenses/LICENSE",
    }


def test_the_wheel_says_its_version_its_licence_and_its_readme(wheel: Path) -> None:
    about = f"stretto-{stretto.__version__}.dist-info"
    head, _, body = zipfile.ZipFile(wheel).read(f"{about}/METADATA").decode("utf-8").partition("\n\n")
    fields = head.splitlines()
    assert f"Version: {stretto.__version__}" in fields
    assert "License-Expression: Apache-2.0" in fields
    assert "License-File: LICENSE" in fields
    assert body.startswith("# Stretto")


def test_an_installed_wheel_trains_in_an_empty_folder(installed: Path) -> None:
    steps, version, file = run(installed / "python", "-c", TRAINING).split()
    assert (steps, version) == ("10", stretto.__version__)
    assert Path(file).is_relative_to(installed.parent)
    assert list(Path.cwd().iterdir()) == []


def test_an_installed_wheel_brings_the_command(installed: Path) -> None:
    assert run(installed / "stretto", "--help").startswith("usage: stretto COMMAND")
