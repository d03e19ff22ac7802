"""The wheel holds the whole package and nothing else, and the tutorial works from it, where the repository is not."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import stretto
from stretto_lab.observe import read_json_lines
from tests.docs.pages import DOCS, code_blocks, table, typed
from tests.style.source import ROOT, package_files

TUTORIAL = DOCS / "tutorial.md"
TEXT = TUTORIAL.read_text(encoding="utf-8")
OWN_TEXT = """
stretto train language --task.data stories --task.model llama-tiny --task.length 32 --updates 4 --run-dir own
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what belongs into it, so that no build folder stays in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
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
    install(wheel, folder)
    return folder / "bin"


def install(wheel: Path, folder: Path) -> None:
    """Install the wheel alone into an environment."""
    words = ["install", "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *words, wheel], check=True)


def run(*words: str, path: Path) -> str:
    """Run a command of the folder `path`, without a way back to the repository, and return what it prints."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    clean["PATH"] = f"{path}:{clean['PATH']}"
    ended = subprocess.run(words, env=clean, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_wheel_holds_every_module_and_no_test(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    about = f"stretto-{stretto.__version__}.dist-info"
    modules = {str(file.relative_to(ROOT / "src")) for file in package_files()}
    listed = {
        f"{about}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "top_level.txt", "entry_points.txt")
    }
    assert names == modules | listed | {
        "stretto/exchange/rotated.c",
        "stretto/py.typed",
        "stretto_lab/py.typed",
        "stretto_lab/page/page.css",
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


@pytest.mark.long
def test_the_tutorial_and_a_model_of_own_text_work_as_typed_in_an_empty_folder(installed: Path) -> None:
    sources = code_blocks(TUTORIAL, "tests/wheel/test_wheel.py")
    for name, source in zip(re.findall(r"`(\w+\.py)`[:.]", TEXT), sources, strict=True):
        Path(name).write_text(source)
    Path("stories").mkdir()
    for number in range(20):
        Path("stories", f"{number}.txt").write_text(
            f"Once upon a time there were {number} little pigs. " * 20
        )
    install, *blocks = typed(TUTORIAL)
    assert install == "pip install '.[all]'\n"  # the wheel is installed instead
    script = [
        "set -e",
        # A port that is free, not the one that all launches on a machine share.
        'torchrun() { python -m torch.distributed.run --standalone "$@"; }',
        'python -c "import stretto; print(stretto.__file__)"',
        *blocks,
        OWN_TEXT,
    ]
    shown = run("bash", "-c", "\n".join(script), path=installed)

    assert Path(shown.splitlines()[0]).is_relative_to(installed.parent)
    plain, ours, together = map(float, re.findall(r"^loss ([\d.e-]+)$", shown, re.MULTILINE))
    assert plain == ours
    assert together != ours
    assert together == pytest.approx(ours, rel=0.5)  # half as many updates of the same training
    waits, hides = ([*read_json_lines(Path(name, "updates.jsonl"))] for name in ("waits", "hides"))
    assert [row["step"] for row in waits] == [row["step"] for row in hides] == list(range(1, 17))
    assert sum(row["sent_bytes"] for row in hides) < sum(row["sent_bytes"] for row in waits)
    for name in ("waits", "hides"):
        first, *_, last = [row["heldout_loss"] for row in read_json_lines(Path(name, "evaluations.jsonl"))]
        assert last < first / 4
    seconds = re.findall(r"updates in ([\d.]+) virtual s", shown)
    waited = re.findall(r"waited for communication ([\d.]+)%", shown)
    shares = [f"{share} %" for share in waited]
    rows = table(TUTORIAL, "tests/wheel/test_wheel.py")
    assert [(row["virtual seconds"], row["waits"]) for row in rows] == list(zip(seconds, shares, strict=True))
    before, *_, behind = [row["heldout_loss"] for row in read_json_lines(Path("own", "evaluations.jsonl"))]
    assert behind < before
    assert Path("own", "model", "model.safetensors").is_file()


@pytest.mark.long
def test_an_installed_wheel_brings_the_command(installed: Path) -> None:
    assert run("stretto", "--help", path=installed).startswith("usage: stretto COMMAND")


def test_an_estimate_needs_nothing_but_the_wheel_and_a_second(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An environment without PyTorch, NumPy or anything else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    install(wheel, folder)
    assert (
        run(str(python), "-c", "import importlib.util as u; print(u.find_spec('torch'))", path=folder)
        == "None\n"
    )
    timed = "import resource, sys; from stretto_lab.cli import main; main(sys.argv[1:]); "
    timed += "used = resource.getrusage(resource.RUSAGE_SELF); print(used.ru_utime + used.ru_stime)"
    words = "estimate --parameters 124M --update-seconds 1.0 --ranks 4 --network 1gbit"
    *shown, seconds = run(str(python), "-c", timed, *words.split(), path=folder / "bin").splitlines()
    assert any(line.startswith("First choice: --strategy") for line in shown)
    assert float(seconds) < 1
