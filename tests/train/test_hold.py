"""One run at a time is in a folder; a run that was killed keeps nobody out."""

import json
import os
import sys
import threading
from pathlib import Path

import pytest

from stretto.errors import ConfigError, DiskError
from stretto_lab.cli import main
from stretto_lab.train.hold import LOCK, held
from stretto_lab.train.outcome import check_folder
from tests.processes import Command


def hold() -> None:
    with held(Path("run")):
        sys.stdout.write("held\n")
        sys.stdout.flush()
        threading.Event().wait()


def test_a_second_run_is_refused_until_the_first_has_died() -> None:
    with Command(function=hold) as other:
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(
                ConfigError, match=rf"run is in use by another run \(process {other.pid} on "
            ) as caught,
            held(Path("run")),
        ):
            pass
        assert len(str(caught.value).splitlines()) == 1
        with held(Path("another")):
            pass
        other.kill()
        other.wait()
    with held(Path("run")):
        assert Path("run", LOCK).read_text().startswith(f"process {os.getpid()} on ")


def test_the_command_refuses_a_folder_that_is_in_use_and_changes_nothing_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = {"recipe": "digits-resnet", "digest": None, "options": []}
    config = json.dumps({"task": {}, "strategy": "zero1", "environment": {}, "command": command})
    Path("run").mkdir()
    Path("run", "config.json").write_text(config)
    with held(Path("run")):
        assert main(["train", "digits-resnet", "--run-dir", "run", "--resume"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stretto: run is in use by another run (process ")
    assert Path("run", "config.json").read_text() == config


def test_a_lock_that_is_left_over_is_no_content() -> None:
    with held(Path()):
        pass
    check_folder(Path(), resume=False)


def test_a_lock_that_is_a_link_or_a_folder_is_one_line() -> None:
    Path("precious").write_text("mine")
    Path("linked").mkdir()
    Path("linked", LOCK).symlink_to(Path("precious").absolute())
    Path("taken", LOCK).mkdir(parents=True)
    for name in ("linked", "taken"):
        with pytest.raises(DiskError, match=rf"{name}/\.lock cannot be written: "), held(Path(name)):
            pass
    assert Path("precious").read_text() == "mine"
