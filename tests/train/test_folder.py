"""The folder of a run: what is not a run's is refused before anything is written, and records outlive a full disk."""

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto.disk import replace_file
from stretto.errors import ConfigError, DiskError
from stretto_lab.observe import JsonLines, append_json_line, read_json_lines
from stretto_lab.train.outcome import prepare_run_folder
from tests.train.runs import tiny_run


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "fill",
    [
        lambda folder: (folder / "config.json").write_text('{"model_type": "llama"}'),
        lambda folder: (folder / "config.json").write_text("[" * 100_000),
        lambda folder: (folder / "config.json").mkdir(),
        lambda folder: (folder / "thesis.tex").write_text("years of work"),
        lambda folder: (folder / "thesis.tex").mkdir(),
    ],
)
def test_a_folder_of_others_is_refused_before_anything_is_written(
    fill: Callable[[Path], object], resume: bool
) -> None:
    fill(Path())
    Path("notes.txt").write_text("mine")
    before = contents(Path())
    with pytest.raises(ConfigError, match="name another --run-dir"):
        prepare_run_folder(tiny_run(".", resume=resume))
    assert contents(Path()) == before


def test_what_a_run_may_begin_in_and_go_on_in() -> None:
    folder = Path("run")
    prepare_run_folder(tiny_run(str(folder)))
    with pytest.raises(ConfigError, match="holds a run already: continue it with --resume"):
        prepare_run_folder(tiny_run(str(folder)))
    (folder / "slurm.out").write_text("a log of the launcher")
    prepare_run_folder(tiny_run(str(folder), resume=True))
    (folder / "model.pt").symlink_to("/etc/hostname")
    with pytest.raises(ConfigError, match=r"model\.pt is not from a run"):
        prepare_run_folder(tiny_run(str(folder), resume=True))
    with pytest.raises(ConfigError, match="cannot be the folder of a run: Not a directory"):
        prepare_run_folder(tiny_run(str(folder / "slurm.out")))


def test_records_outlive_a_full_disk() -> None:
    path = Path("updates.jsonl")
    lines = JsonLines(path, keep_until=None)
    lines.write({"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (0, 5):  # nothing of the next record, or a part of it
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, limits[1]))
        try:
            with pytest.raises(DiskError, match=r"updates\.jsonl cannot be written: ") as caught:
                lines.write({"step": 2, "loss": 0.5})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert len(str(caught.value).splitlines()) == 1
        assert read_json_lines(path) == [{"step": 1}]
    lines.write({"step": 2})
    assert read_json_lines(path) == [{"step": 1}, {"step": 2}]
    lines.close()


@pytest.mark.parametrize(
    "torn", [b'{"step": 3', b'{"step": 3{"step": 4}\n', b"[" * 100_000 + b"\n", b"\0\0\n"]
)
def test_a_last_line_that_is_torn_or_joined_is_left_out(torn: bytes) -> None:
    path = Path("updates.jsonl")
    whole = b'{"step": 1}\n{"step": 2}\n'
    path.write_bytes(whole + torn)
    assert read_json_lines(path) == [{"step": 1}, {"step": 2}]
    append_json_line(path, {"step": 3})
    assert path.read_bytes() == whole + b'{"step": 3}\n'
    path.write_bytes(whole + torn)
    JsonLines(path, keep_until=9).close()
    assert path.read_bytes() == whole
    path.write_bytes(torn.rstrip(b"\n") + b"\n" + whole)
    with pytest.raises(ConfigError, match="line 1: expected one JSON object"):
        JsonLines(path, keep_until=9)


def test_a_file_that_cannot_be_replaced_is_what_it_was() -> None:
    path = Path("model.pt")
    path.write_text("old")

    def fail(unfinished: Path) -> None:
        unfinished.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(DiskError, match=r"model\.pt cannot be written: No space left on device"):
        replace_file(path, fail)
    assert contents(Path()) == {"model.pt": b"old"}
    replace_file(path, lambda unfinished: unfinished.write_text(json.dumps("new")))
    assert contents(Path()) == {"model.pt": b'"new"'}
