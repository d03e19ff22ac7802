"""What cannot be is said in one line, with exit code 2, before any worker starts."""

import json
from pathlib import Path

import pytest

import stretto
from stretto_lab.cli import main
from stretto_lab.cli.help import COMMANDS

NAMES = [
    (
        "tarin stdlib-gpt",
        f"no command is called 'tarin'; there are {', '.join(COMMANDS)}; did you mean 'train'?",
    ),
    ("train", "train needs a recipe first: stdlib-gpt, digits-resnet"),
    ("train --updates 3", "train needs a recipe first"),
    ("train stdlib", "no recipe is called 'stdlib'; there are stdlib-gpt, digits-resnet"),
    ("train digit-resnet", "did you mean 'digits-resnet'?"),
    ("compare nowhere.py:sine", "there is no recipe file nowhere.py"),
    ("simulate nowhere:sine", "cannot import nowhere: ModuleNotFoundError: No module named 'nowhere'"),
    ("train digits-resnet --width 3", "did you mean '--task.width'?"),
    ("train digits-resnet --verified=yes", "--verified"),
    ("train digits-resnet --verified yes", "a switch takes no value"),
    ("resume", "resume needs the folder of a run"),
    ("resume nothing", "nothing holds no run to resume"),
    ("simulate digits-resnet --network offise", "did you mean 'office'?"),
    ("simulate digits-resnet --jitter 1.5", "jitter is a share of at least 0 and below 1"),
    ("simulate digits-resnet --ranks 0", "--ranks must be at least 1"),
    (
        "train digits-resnet --strategy aco",
        "no strategy is called 'aco'; there are ddp, zero1, dpu, wp, acco, average, local",
    ),
    ("train digits-resnet --strategy acco:frist=1", "acco has no setting 'frist'; there are first"),
    ("train digits-resnet --strategy auto:wire=int4", "'auto:wire=int4': auto takes no settings"),
    ("train digits-resnet --strategy zero1+acco@100", "no strategy is called 'zero1+acco@100'"),
    (
        "compare digits-resnet --strategies auto",
        "only train knows it: expected stretto train --strategy auto",
    ),
    ("train digits-resnet --strategy ACCO", "did you mean 'acco'?"),
    ("train digits-resnet --interval 4", "a setting of a strategy, as --strategy diloco:interval=4"),
    ("train digits-resnet --delay=1", "a setting of a strategy, as --strategy average:delay=1"),
    ("train digits-resnet --outer-lr 1", "a setting of a strategy, as --strategy diloco:outer_lr=1"),
    (
        "compare digits-resnet --fragments 2",
        "a setting of a strategy, as --strategies average:fragments=2",
    ),
    ("train digits-resnet --strategy torch-ddp", "torch-ddp runs only in a comparison"),
    ("train digits-resnet --upadtes 3", "has no option '--upadtes'"),
    ("report --otu page.html", "report needs the folder of a run first"),
    ("train digits-resnet --task.wdith 3", "has no option '--task.wdith'"),
    ("compare digits-resnet --strategies ddp,bogus", "no strategy is called 'bogus'"),
]
VALUES = [
    ("--updates three", "three"),
    ("--updates 0", "--updates must be at least 1, found 0"),
    ("--clock 8", "MIN,MAX"),
    ("--task.batch 1", "--task.batch must be at least 2, found 1"),
    ("--clip-norm -1", "--clip-norm -1.0: expected a positive norm, or None"),
    ("--timeout-seconds 0", "--timeout-seconds 0.0: expected"),
    ("--wire INT4", "did you mean 'int4'?"),
    ("--guards standard,rest", "expected 'standard' alone"),
    ("--guards standrad", "did you mean 'standard'?"),
    ("--guards standard:rate=1", "expected 'standard' without settings"),
    ("--echo evn", "did you mean 'even'?"),
    ("--resume", "set --run-dir"),
    ("--to-loss 1.0 --evaluate-every None", "set --evaluate-every"),
    ("--strategy acco --micro-batches 1", "raise --micro-batches"),
    ("--clock 1,4 --strategy acco:first=1", "remove one of the two"),
    (
        "--wire int2",
        "--wire int2: strategy zero1 sends gradients, which would cost a tenth of a nat on this wire: expected",
    ),
    ("--faults masters:rank=2", "--faults name rank 2; the run has ranks 0 to 1"),
    ("--strategy wp:lr=-1", "lr must be at least 0"),
    ("--strategy ddp:changes=int2", "--changes int2: strategy ddp sends no changes: remove the option"),
    (
        "--strategy diloco:wire=int4:interval=4 --wire int8",
        "--wire int8 and --strategy diloco:wire=int4:interval=4: expected one wire",
    ),
    (
        "--strategy auto --wire int2",
        "--wire int2: stretto plan has prices only for fp32, bf16, int8, rotated2, int4",
    ),
    ("--strategy auto --changes int4", "--changes int4: a plan prices one format"),
]
"""Of options of `train digits-resnet`."""


@pytest.mark.parametrize(
    ("words", "named"), [*NAMES, *((f"train digits-resnet {words}", named) for words, named in VALUES)]
)
def test_a_name_or_a_value_that_cannot_be_is_one_line_and_exit_code_2(
    words: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("stretto: ")
    assert named in line
    assert captured.out == ""
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "command", [None, [], "train", {}, {"recipe": "x"}, {"recipe": 1, "digest": None, "options": []},
    {"recipe": "digits-resnet", "digest": None, "options": "--updates"}, {"recipe": "x", "digest": 1, "options": [2]}],
)  # fmt: skip
def test_a_configuration_that_does_not_say_what_made_the_run_is_refused(
    command: object, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run").mkdir()
    Path("run", "config.json").write_text(json.dumps({"command": command}))
    assert main(["resume", "run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stretto: run/config.json does not say which command made the run")


@pytest.mark.parametrize("digest", [None, "of another content"])
@pytest.mark.parametrize(
    "place", ["run/model.py:f", "model.py:f", "run.model:f", "run:f", "run.inside.model:f", "run/gone.py:f"]
)
def test_a_folder_from_somebody_else_has_no_code_of_its_own_run(
    place: str, digest: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run/inside").mkdir(parents=True)
    for name in (
        "run/model.py",
        "model.py",
        "run/__init__.py",
        "run/inside/__init__.py",
        "run/inside/model.py",
    ):
        Path(name).write_text("open('it-has-run', 'w')")
    command = {"recipe": place, "digest": digest, "options": ["--task.lr", "0.1"]}
    Path("run/config.json").write_text(json.dumps({"command": command}))
    assert main(["resume", "run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"stretto: run/config.json names the recipe {place}, whose code would run, and ")
    assert line.endswith(f"name it: stretto resume run {place}")
    assert not Path("it-has-run").exists()


@pytest.mark.parametrize(
    ("words", "told"), [("--run-dir run", "MASTER_ADDR and MASTER_PORT not set: expected"), ("", "--run-dir")]
)
def test_ranks_of_a_launcher_need_all_its_variables_and_a_folder_to_agree_on(
    words: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "digits-resnet", *words.split()]) == 2
    assert told in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"stretto {stretto.__version__}\n"
