"""What cannot be is said in one line, with exit code 2, before any worker starts."""

import json
from pathlib import Path

import pytest

import stretto
from stretto_lab.cli import main
from stretto_lab.cli.help import COMMANDS


@pytest.mark.parametrize(
    ("words", "named"),
    [
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
        ("resume nothing", "nothing holds no run that could be resumed"),
        ("simulate digits-resnet --network offise", "did you mean 'office'?"),
        (
            "train digits-resnet --strategy aco",
            "no strategy is called 'aco'; there are ddp, zero1, dpu, wp, acco, average, local",
        ),
        ("train digits-resnet --strategy acco:frist=1", "acco has no setting 'frist'; there are first"),
        ("train digits-resnet --strategy auto:wire=int4", "'auto:wire=int4': auto takes no settings"),
        ("train digits-resnet --strategy zero1+acco@100", "no strategy is called 'zero1+acco@100'"),
        ("compare digits-resnet --strategies auto", "of train alone: expected --strategy auto there"),
        ("train digits-resnet --strategy ACCO", "did you mean 'acco'?"),
        ("train digits-resnet --interval 4", "a setting of a strategy, as --strategy diloco:interval=4"),
        ("train digits-resnet --delay=1", "a setting of a strategy, as --strategy average:delay=1"),
        ("train digits-resnet --outer-lr 1", "a setting of a strategy, as --strategy diloco:outer_lr=1"),
        (
            "compare digits-resnet --fragments 2",
            "a setting of a strategy, as --strategies average:fragments=2",
        ),
        ("train digits-resnet --strategy torch-ddp", "torch-ddp is there to compare with"),
        ("train digits-resnet --upadtes 3", "has no option '--upadtes'"),
        ("report --otu page.html", "report needs the folder of a run first"),
        ("train digits-resnet --task.wdith 3", "has no option '--task.wdith'"),
        ("compare digits-resnet --strategies ddp,bogus", "no strategy is called 'bogus'"),
    ],
)
def test_a_name_that_does_not_exist_is_one_line_and_exit_code_2(
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
    ("words", "named"),
    [
        ("--updates three", "three"),
        ("--updates 0", "--updates must be at least 1, found 0"),
        ("--clock 8", "MIN,MAX"),
        ("--clock 8,2", "1 <= minimum <= maximum"),
        ("--link fast", "cannot read the link"),
        ("--wire fp8", "bf16"),
        ("--task.batch 1", "--task.batch must be at least 2, found 1"),
        ("--seconds -1", "--seconds must be positive, found -1"),
        ("--clip-norm -1", "--clip-norm -1.0: expected a positive norm, or None"),
        ("--timeout-seconds 0", "--timeout-seconds 0.0: expected"),
        ("--wire INT4", "did you mean 'int4'?"),
        ("--wire fp3", "did you mean 'fp32'?"),
        ("--guards rset", "did you mean 'rest'?"),
        ("--guards standard,rest", "expected 'standard' alone"),
        ("--guards standrad", "did you mean 'standard'?"),
        ("--guards standard:rate=1", "expected 'standard' without settings"),
        ("--echo evn", "did you mean 'even'?"),
        ("--resume", "set --run-dir"),
        ("--to-loss 1.0 --evaluate-every None", "set --evaluate-every"),
        ("--strategy acco --micro-batches 1", "raise --micro-batches"),
        ("--clock 1,4 --strategy acco:first=1", "leave out one of the two"),
        (
            "--wire int2",
            "--wire int2: strategy zero1 sends gradients, which lose a tenth of a nat: expected",
        ),
        ("--faults masters:rank=2", "--faults name rank 2; the run has ranks 0 to 1"),
        ("--strategy wp:lr=-1", "lr must be at least 0"),
        ("--strategy ddp:changes=int2", "--changes int2: strategy ddp sends no changes: leave it out"),
        (
            "--strategy diloco:wire=int4:interval=4 --wire int8",
            "--wire int8 and --strategy diloco:wire=int4:interval=4: expected one wire",
        ),
        (
            "--strategy auto --wire int2",
            "--wire int2: a plan knows the prices of fp32, bf16, int8, rotated2, int4 alone",
        ),
        ("--strategy auto --changes int4", "--changes int4: a plan prices one format"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_exit_code_2(
    words: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "digits-resnet", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line
    assert list(Path().iterdir()) == []


def test_a_folder_that_holds_a_run_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("run", "config.json").write_text('{"task": {}, "strategy": "zero1", "environment": {}}')
    assert main(["train", "digits-resnet", "--run-dir", "run"]) == 2
    assert "run holds a run already: continue it with --resume" in capsys.readouterr().err


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


def test_a_launcher_with_half_its_variables_is_told_which_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "digits-resnet", "--run-dir", "run"]) == 2
    assert "MASTER_ADDR and MASTER_PORT not set: expected" in capsys.readouterr().err


def test_ranks_of_a_launcher_need_a_folder_to_agree_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "digits-resnet"]) == 2
    assert "--run-dir" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "code"), [("", 2), ("--help", 0), ("-h", 0)])
def test_the_program_alone_says_what_it_can_do(
    words: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == code
    assert "train" in capsys.readouterr().out


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"stretto {stretto.__version__}\n"
