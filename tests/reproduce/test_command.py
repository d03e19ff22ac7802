"""`stretto reproduce` from the command line: a record at a tiny scale, stopped and resumed, and on real data."""

import json
import random
from pathlib import Path

import pytest

from benchmarks.papers import results
from stretto_lab.cli import main
from stretto_lab.cli.reproduction import print_found
from stretto_lab.reproduce import RECORDS
from stretto_lab.reproduce.tables import cells_table, effects_table
from tests.terminal import print_on_a_terminal

RECORD = "acco.convolutions"


def lines(folder: Path) -> list[str]:
    return (folder / "runs.jsonl").read_text().splitlines()


def without_time(line: str) -> dict[str, object]:
    found = json.loads(line)
    assert found.pop("cpu_seconds") > 0
    return found


def test_the_list_has_every_record_below_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list"]) == 0
    printed = capsys.readouterr().out
    head, *rows = printed.splitlines()
    assert head.startswith("stretto reproduce ")
    assert [row.split()[0] for row in rows] == [*RECORDS]


def test_on_a_terminal_the_list_and_what_every_record_says_fit(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    all_found = results()
    print_on_a_terminal(monkeypatch)
    assert main(["reproduce", "--list"]) == 0
    for found in all_found:
        print_found(found)
    printed = capfd.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    words = set(printed.split())
    for found in all_found:
        tables = () if found.record.unchecked else (cells_table(found), effects_table(found))
        for cell in (cell for head, rows in tables for cells in (head, *rows) for cell in cells):
            assert words >= set(cell.split()), cell


def test_an_unknown_record_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "paft.table9"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_a_scale_without_data_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", RECORD, "--scale", "0.5"]) == 2
    assert "needs data" in capsys.readouterr().err


def test_a_record_is_run_judged_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["reproduce", RECORD, "--seeds", "1", "--out", str(tmp_path)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert f"{RECORD} cannot be checked: one seed has no interval" in printed
    whole = lines(tmp_path)
    assert len(whole) == 2

    # As a process leaves it that is killed while it writes.
    (tmp_path / "runs.jsonl").write_text(whole[0] + "\n" + whole[1][:30])
    assert main(words) == 0
    assert "1 runs to make" in capsys.readouterr().out
    assert lines(tmp_path)[0] == whole[0]
    assert without_time(lines(tmp_path)[1]) == without_time(whole[1])

    assert main(words) == 0
    assert "to make" not in capsys.readouterr().out


def test_a_record_that_cannot_be_checked_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "paft.cifar", "--out", str(tmp_path)]) == 0
    assert "cannot be checked: needs CIFAR-10" in capsys.readouterr().out
    assert not (tmp_path / "runs.jsonl").exists()


def cifar(folder: Path) -> Path:
    """Files in CIFAR-10's binary format: a label and 3,072 bytes a picture."""
    folder.mkdir()
    draw = random.Random(0)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        pictures = [bytes([draw.randrange(10)]) + draw.randbytes(3072) for _ in range(64)]
        (folder / name).write_bytes(b"".join(pictures))
    return folder


def test_the_same_command_takes_the_papers_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = cifar(tmp_path / "cifar-10-batches-bin")
    words = [
        "paft.large-bursts",
        "--data",
        str(data),
        "--scale",
        "0.0001",
        "--seeds",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(["reproduce", *words]) == 0, capsys.readouterr().err
    made = [json.loads(line) for line in lines(tmp_path / "out")]
    assert len(made) == 4
    assert all("--preset paft-resnet18-cifar10" in run["words"] and run["updates"] >= 4 for run in made)
