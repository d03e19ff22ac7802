"""A full or read-only disk costs one line: nothing is lost, and the run goes on once there is room."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto import checkpoint
from stretto.errors import StrettoError
from stretto_lab.cli import main
from stretto_lab.observe import read_json_lines
from tests.train.damages import OPTIONS, RECIPE, perform, written

LONGER = [*OPTIONS, "--updates", "14"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own with room for two checkpoints."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=150k", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a disk cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def remount(disk: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(disk)], check=True)


@pytest.mark.long
def test_a_run_outlives_a_full_disk_and_goes_on_once_there_is_room(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, whole = disk / "run", tmp_path / "whole"
    with pytest.raises(
        StrettoError, match=r"No space left on device|bytes are free there|is the disk full"
    ) as caught:
        perform([RECIPE, *LONGER, "--run-dir", str(run)])
    assert len(str(caught.value).splitlines()) == 1
    latest = checkpoint.latest(run / "checkpoints")
    assert latest is not None
    saved_at = int(latest.name.rpartition("-")[2])
    assert [record["step"] for record in read_json_lines(run / "updates.jsonl")][:saved_at] == [
        *range(1, saved_at + 1)
    ]

    remount(disk, "ro")
    assert main(["resume", str(run)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"stretto: {run}/.lock cannot be written: Read-only file system"

    remount(disk, "rw,size=20m")
    perform([RECIPE, *LONGER, "--run-dir", str(run), "--resume"])
    perform([RECIPE, *LONGER, "--run-dir", str(whole)])
    for name in ("records", "evaluations", "model"):
        assert written(run, name) == written(whole, name)
