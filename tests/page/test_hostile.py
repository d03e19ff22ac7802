"""Folders that are damaged, empty or made to harm: one line, or a page that names what is missing."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto_lab.cli import main
from stretto_lab.page.records import number
from tests.page.pages import drawn, needs_chromium, page_of, points

ATTACK = "</script><script>document.documentElement.dataset.hacked=1</script><img src=x onerror=alert(1)>\u202e\x1b[31m"


def folder(name: str, **files: Any) -> Path:
    """A folder with files of JSON lines (lists), of JSON (dicts) or of text."""
    place = Path(name)
    for file, content in files.items():
        path = place / file.replace("__", "/").replace("_json", ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(line) + "\n" for line in content)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return place


def update(step: Any, **different: Any) -> dict[str, Any]:
    return {
        "step": step, "loss": 1.0, "samples": 8, "training_seconds": 0.5, "sent_bytes": 4, "exposed_seconds": 0.0,
        "lane_seconds": 0.0, "wait_seconds": 0.0, "fresh": 1, "echoed": 1, "micro_batches": [[1, 1]], "rounds": [],
        "skipped_rounds": 0, **different,
    }  # fmt: skip


def hostile() -> Path:
    """A run in which every text attacks the page."""
    task = {ATTACK: ATTACK}
    incident = {"step": 2, **dict.fromkeys(("site", "part", "guard", "action"), ATTACK), "ranks": [ATTACK]}
    return folder(
        "<b onmouseover=alert(1)>",
        config_json={
            "strategy": ATTACK, "task": task, "wire": ATTACK, "environment": {"torch": ATTACK, "cuda": ATTACK},
            "command": {"recipe": ATTACK, "options": [ATTACK]}, "faults": [{"site": ATTACK}],
        },
        updates_jsonl=[update(step, training_seconds=step) for step in range(1, 9)],
        evaluations_jsonl=[{"step": 0, "heldout_loss": 2.0, "training_seconds": 0.0}],
        incidents_jsonl=[incident, {"step": ATTACK}],
        quarantine_jsonl=[{"cause": ATTACK, "left_out": [ATTACK], "incidents": [incident]}],
    )  # fmt: skip


def test_no_text_of_a_folder_is_html() -> None:
    page = page_of(hostile())
    assert "<script" not in page
    assert "<img" not in page
    assert "onmouseover=alert" not in page.replace("&lt;b onmouseover=alert(1)&gt;", "")
    assert not {"\u202e", "\x1b"} & set(page)
    assert "&lt;/script&gt;&lt;script&gt;" in page  # as text


@needs_chromium
def test_a_browser_runs_nothing_of_a_hostile_folder() -> None:
    page_of(hostile())
    document = drawn(Path("page.html"))
    assert "data-hacked" not in document.partition("<head>")[0]
    assert "<img" not in document


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3, 3.0), (2.5, 2.5), (True, math.nan), ("3", math.nan), (None, math.nan), (math.inf, math.nan),
     (10**400, math.nan), (1e101, math.nan), ([], math.nan)],
)  # fmt: skip
def test_a_number_is_finite_or_missing(value: object, expected: float) -> None:
    assert number(value) == pytest.approx(expected, nan_ok=True)


def test_numbers_that_are_missing_or_huge_leave_holes_and_no_more() -> None:
    odd = [None, "NaN", 1e308, -1e308, {}, math.nan, 10**300, 2.0]
    run = folder(
        "run",
        config_json={"strategy": "acco"},
        updates_jsonl=[
            update(step, loss=loss, training_seconds=loss) for step, loss in enumerate(odd, start=1)
        ]
        + [update(None), update(1e300, skipped_rounds=math.inf, rounds=[[None]], micro_batches="x")],
        evaluations_jsonl=[
            {"step": 1e300, "heldout_loss": None},
            {},
            {"step": 4, "heldout_loss": 1.5},
            {"step": 4, "heldout_loss": 1.5, "training_seconds": 2},
        ],
    )
    assert points(page_of(run), "run") == [[4, 2, 1.5]]


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no updates": (lambda run: (run / "updates.jsonl").unlink(), "updates.jsonl is missing"),
    "empty updates": (lambda run: (run / "updates.jsonl").write_text(""), "no update is recorded"),
    "a damaged line": (
        lambda run: (run / "updates.jsonl").write_text('{"step": 1}\n\x00\x01\n[]\n{"step": 4}\n'),
        "updates.jsonl: 2 damaged lines are skipped (2, 3)",
    ),
    "deep nesting": (
        lambda run: (run / "updates.jsonl").write_text("[" * 100_000 + "\n"),
        "updates.jsonl: 1 damaged line is skipped (1)",
    ),
    "a folder for a file": (
        lambda run: ((run / "updates.jsonl").unlink(), (run / "updates.jsonl").mkdir()),
        "updates.jsonl is no file",
    ),
    "a damaged strike": (
        lambda run: ((run / "strikes").mkdir(), (run / "strikes" / "rank-1.jsonl").write_text("{}\nx\n")),
        "strikes/rank-1.jsonl: 1 damaged line is skipped (2)",
    ),
    "half a configuration": (
        lambda run: (run / "config.json").write_text('{"strategy": "zer'),
        "config.json is damaged: it is no JSON",
    ),
    "a list for a configuration": (
        lambda run: (run / "config.json").write_text("[]"),
        "config.json is damaged: it holds no object",
    ),
    "no configuration": (lambda run: (run / "config.json").unlink(), "config.json is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_makes_a_page_that_names_the_gap(
    damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder(
        "run",
        config_json={"strategy": "zero1"},
        updates_jsonl=[update(1), update(2, training_seconds=1.0)],
        evaluations_jsonl=[{"step": 0, "heldout_loss": 2.0, "training_seconds": 0.0}],
    )
    harm, gap = DAMAGES[damage]
    harm(run)
    assert main(["report", "run"]) == 0
    assert f"missing: run: {gap}" in capsys.readouterr().out.splitlines()
    assert gap in Path("run/report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "content", ["{}", '{"runs": [1, {}], "sites": [{}], "broken": 3}', "[[", '{"runs": {}}']
)
def test_damaged_results_make_a_page_too(content: str) -> None:
    folder("results", compare_json=content)
    assert "results" in page_of("results")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("report", "report needs the folder of a run first: stretto report FOLDER..."),
        (
            "report nowhere",
            "nowhere: expected the folder of a run or a comparison, found no folder",
        ),
        ("report empty", "found no config.json, compare.json"),
        ("report run --otu x", "did you mean '--out'?"),
        ("report run --out empty", "empty cannot be written: Is a directory"),
    ],
)
def test_what_cannot_be_is_one_line(words: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    folder("run", config_json={"strategy": "zero1"}, updates_jsonl=[update(1)], evaluations_jsonl="")
    assert main(words.split()) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line
