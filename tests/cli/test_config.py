"""Options come from a file that `--print-config` has written, or that a run has left."""

import json
from pathlib import Path

import pytest

from stretto_lab.cli import main
from stretto_lab.cli.commands import CONFIGURE
from stretto_lab.cli.options import parse_options, with_files

GIVEN = {
    "train": "--strategy acco --wire int8 --no-tensorboard --guards replica,audit --clock 1,4 --task.lr 0.1",
    "compare": "--strategies zero1,acco:clock=1,8 --samples 4096 --noise 0.5",
    "simulate": "--ranks 8 --slow 3=2.5,7=1.2 --faults masters:rank=1:instant=3",
    "diagnose": "--batches 8 --task.sgd.momentum=0.5",
    "plan": "--ranks 8,64 --allow-loss 0.1",
}


def test_a_printed_configuration_is_read_as_the_same_options(capsys: pytest.CaptureFixture[str]) -> None:
    for command, options in GIVEN.items():
        words = ["digits-resnet", *options.split()]
        assert main([command, *words, "--print-config"]) == 0
        Path("options.json").write_text(capsys.readouterr().out)
        again = with_files(["digits-resnet", "--config", "options.json"])
        assert len(again) > len(words) + 10  # those that were not given stand there too
        found, expected = (parse_options(command, one, CONFIGURE[command]) for one in (again, words))
        assert found == expected


def test_options_behind_a_file_count_and_a_run_leaves_such_a_file() -> None:
    Path("config.json").write_text(
        json.dumps({"seed": 3, "command": {"options": ["--seed", "3", "--updates", "9"]}})
    )
    words = with_files(["digits-resnet", "--config=config.json", "--seed", "4"])
    _, run = parse_options("train", words, CONFIGURE["train"])
    assert (run.seed, run.updates) == (4, 9)


def test_a_file_of_another_kind_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for content in (None, "[]", "{}", "{", '{"command": 3}'):
        if content is not None:
            Path("options.json").write_text(content)
        assert main(["train", "digits-resnet", "--config", "options.json"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("stretto: --config options.json: expected the config.json of a run"), content
