"""Pages of real runs: what they draw is what the folders hold, and a browser draws it."""

import base64
import gzip
import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

from stretto_lab.cli import main
from stretto_lab.observe import read_json_lines
from stretto_lab.page import ReportConfig
from stretto_lab.page import page_of as page_written
from tests.docs.pages import DOCS, commands
from tests.page.pages import drawn, needs_chromium, numbers, page_of, shown, used

TINY = f"{Path(__file__).parents[1] / 'train' / 'tiny.py'}:Tiny"
COMMON = [TINY, "--micro-batches", "2", "--evaluate-every", "4"]
FAULTS = "masters:rank=1:instant=3,contribution:rank=0:instant=5"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of a run with damage and echoes, and of a comparison."""
    place = tmp_path_factory.mktemp("folders")
    run = ["--updates", "8", "--no-tensorboard", "--guards", "standard", "--faults", FAULTS]
    run += ["--echo", "even:uses=2", "--checkpoint-every", "4", "--run-dir", str(place / "run")]
    assert main(["train", *COMMON, *run]) == 0
    arms = ["--strategies", "zero1,acco", "--updates", "5", "--out", str(place / "arms")]
    assert main(["compare", *COMMON, *arms]) == 0
    return place


def test_curves_are_the_records_on_every_axis(folders: Path) -> None:
    updates = read_json_lines(folders / "run" / "updates.jsonl")
    evaluations = read_json_lines(folders / "run" / "evaluations.jsonl")
    (run,) = numbers(page_of(folders / "run"))["runs"]
    assert run["loss"]["y"] == [one["loss"] for one in updates]
    assert run["loss"]["updates"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert run["loss"]["seconds"] == [one["training_seconds"] for one in updates]
    assert run["loss"]["samples"] == list(itertools.accumulate(one["samples"] for one in updates))
    assert run["loss"]["loads"] == list(itertools.accumulate(one["fresh_samples"] for one in updates))
    assert 0 < run["loss"]["loads"][-1] < run["loss"]["samples"][-1]  # every second use is an echo
    assert run["loss"]["bytes"] == list(itertools.accumulate(one["sent_bytes"] for one in updates))
    assert run["heldout"]["y"] == [one["heldout_loss"] for one in evaluations]
    assert run["heldout"]["updates"] == [0, 4, 8]
    assert run["heldout"]["samples"] == [0, *(run["loss"]["samples"][step - 1] for step in (4, 8))]


def test_the_page_leads_with_what_limited_the_run(folders: Path) -> None:
    page = page_of(folders / "run")
    (run,) = numbers(page)["runs"]
    facts = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", shown(page))
    share = {name: run["time"][name] for name in ("exposed", "data")}
    whole = run["time"]["compute"] + sum(share.values())
    largest = max(share, key=share.__getitem__)
    limit = (
        "computing" if share[largest] < 0.2 * whole else {"exposed": "the link", "data": "the data"}[largest]
    )
    assert facts[0][0] == "what limited it"
    assert facts[0][1].startswith(limit)
    assert "`" not in facts[0][1]  # a page is no Markdown
    assert ("link", "none") not in facts


def test_the_parts_of_an_average_update_add_up_to_its_time(folders: Path) -> None:
    updates = read_json_lines(folders / "run" / "updates.jsonl")
    (run,) = numbers(page_of(folders / "run"))["runs"]
    steady = updates[3:]  # the first three are left out
    whole = 1000 * (updates[-1]["training_seconds"] - updates[2]["training_seconds"]) / 5
    time = run["time"]
    assert time["exposed"] == pytest.approx(1000 * sum(one["exposed_seconds"] for one in steady) / 5)
    assert time["compute"] + time["exposed"] + time["data"] == pytest.approx(whole)


def test_every_fault_has_its_place_on_the_curve_and_a_row(folders: Path) -> None:
    page = page_of(folders / "run")
    incidents = read_json_lines(folders / "run" / "incidents.jsonl")
    (run,) = numbers(page)["runs"]
    strikes = [
        one for rank in (0, 1) for one in read_json_lines(folders / "run" / "strikes" / f"rank-{rank}.jsonl")
    ]
    assert len(incidents) >= 2
    of_kind = {"fault": strikes, "incident": incidents}
    for kind, records in of_kind.items():
        places = zip(run["events"]["kind"], run["events"]["updates"], strict=True)
        assert [step for found, step in places if found == kind] == sorted(one["step"] for one in records)
    assert [(one["rank"], one["site"], one["pattern"]) for one in strikes] == [
        (0, "contribution", "flip"),
        (1, "masters", "flip"),
    ]
    for strike in strikes:
        assert f"{strike['site']} of rank {strike['rank']} damaged on purpose: flip, 1 value" in shown(page)
    for incident in incidents:
        assert f"{incident['site']} damaged ({incident['part']}" in shown(page)
        assert incident["action"] in shown(page)
    assert "damage on purpose" in page


def test_the_page_shows_the_memory_of_rank_0(folders: Path) -> None:
    page = page_of(folders / "run")
    rises = read_json_lines(folders / "run" / "memory.jsonl")
    assert rises == sorted(rises, key=lambda one: (one["step"], one["peak_bytes"]))
    assert f"<dt>memory of rank 0</dt><dd>{rises[-1]['peak_bytes'] / 1e6:,.0f} MB at most</dd>" in shown(page)


def test_a_comparison_lays_its_arms_over_each_other(folders: Path) -> None:
    page = page_of(folders / "arms", folders / "run")
    results = json.loads((folders / "arms" / "compare.json").read_text())["runs"]
    runs = numbers(page)["runs"]
    assert [run["name"] for run in runs] == ["zero1 (arms)", "acco (arms)", "run"]
    for run, record in zip(runs, results, strict=False):
        assert run["heldout"]["y"] == [one["heldout_loss"] for one in record["evaluations"]]
        assert run["heldout"]["seconds"] == [one["training_seconds"] for one in record["evaluations"]]
        assert run["heldout"]["samples"][-1] == record["samples"]
        assert run["heldout"]["loads"][-1] == record["fresh_samples"]
        assert f"{record['heldout_loss']:.4f}" in shown(page)


def test_folders_of_one_name_are_told_apart(folders: Path) -> None:
    shutil.copytree(folders / "run", "elsewhere/run")
    page = page_of(folders / "run", "elsewhere/run", "elsewhere/run")
    assert [run["name"] for run in numbers(page)["runs"]] == [str(folders / "run"), "elsewhere/run"]


def test_a_killed_run_shows_everything_up_to_the_kill(folders: Path) -> None:
    shutil.copytree(folders / "run", "killed")
    content = Path("killed", "updates.jsonl").read_bytes()
    half = sum(map(len, content.splitlines(keepends=True)[:5])) + 20  # in the middle of the sixth line
    Path("killed", "updates.jsonl").write_bytes(content[:half])
    page = page_of("killed")
    assert numbers(page)["runs"][0]["loss"]["updates"] == [1, 2, 3, 4, 5]
    assert "updates.jsonl ends in the middle of line 6" in shown(page)


def test_the_commands_of_the_page_about_reports_work(folders: Path) -> None:
    for name, folder in (("first", "run"), ("arms", "arms")):
        shutil.copytree(folders / folder, Path("runs", name))
    printed = [words for words in commands(DOCS / "report.md") if words[0] == "report"]
    assert [main(words) for words in printed] == [0] * 2
    assert Path("runs/first/report.html").exists()
    assert {"first.html", "both.html"} <= {path.name for path in Path().iterdir()}


def test_pages_of_different_folders_are_different_files_and_of_the_same_folders_the_same_one() -> None:
    named = ["a", "b", "c", "x/a", "x/b"]
    chosen = [
        [Path(name) for name in some] for count in (1, 2, 3) for some in itertools.combinations(named, count)
    ]
    pages = [page_written(paths, ReportConfig()) for paths in chosen]
    assert len(set(pages)) == len(chosen)
    for paths, page in zip(chosen, pages, strict=True):
        if len(paths) > 1:
            assert page_written(paths[::-1], ReportConfig()) == page
        assert page_written(paths, ReportConfig(out="here.html")) == Path("here.html")


def test_pages_below_runs_share_plotly_and_are_small_and_a_page_alone_has_it_in_two_megabytes(
    folders: Path,
) -> None:
    for name in ("first", "second"):
        shutil.copytree(folders / "run", Path("runs", name))
        assert main(["report", f"runs/{name}"]) == 0
        assert Path("runs", name, "report.html").stat().st_size < 1_000_000
    (shared,) = Path("runs/assets").iterdir()
    assert shared.read_text(encoding="utf-8") == get_plotlyjs()
    page_of(folders / "run")
    assert Path("page.html").stat().st_size < 2_000_000


@needs_chromium
def test_a_browser_draws_a_page_that_shares_plotly(folders: Path) -> None:
    shutil.copytree(folders / "run", Path("runs", "first"))
    assert main(["report", "runs/first"]) == 0
    assert 'class="main-svg"' in drawn(Path("runs/first/report.html"))


def test_what_is_packed_into_a_page_is_plotly(folders: Path) -> None:
    (packed,) = re.findall(r'<script type="text/plain" id="plotly">(.*?)</script>', page_of(folders / "run"))
    assert gzip.decompress(base64.b85decode(packed.replace(",", "<"))).decode() == get_plotlyjs()


def test_a_page_fetches_nothing_and_runs_only_its_own_scripts(folders: Path) -> None:
    page = page_of(folders / "run")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.partition("style-src")[0]
    assert re.findall(r"<(?:link|img|iframe|object|embed)\b|\b(?:src|href)=", shown(page)) == []


@needs_chromium
def test_a_browser_draws_a_run_with_damage_beside_a_comparison(folders: Path) -> None:
    page_of(folders / "run", folders / "arms")
    document = drawn(Path("page.html"))
    for chart in ("loss", "time"):
        (part,) = re.findall(rf'<div[^>]*class="chart[^>]*id="{chart}".*?</section>', document, re.DOTALL)
        assert 'class="main-svg"' in part
        assert re.search(r'<path class="js-line"|<g class="point', part), chart


@needs_chromium
def test_a_reader_hovers_zooms_and_chooses_with_mouse_and_keyboard(folders: Path) -> None:
    page_of(folders / "run")
    updates = read_json_lines(folders / "run" / "updates.jsonl")
    found = used(Path("page.html"))
    (hover,) = found["hover"]
    assert hover == f"run, training{updates[4]['loss']:.5g}"
    assert found["seconds"] == [one["training_seconds"] for one in updates]
    assert found["scale"] == "log"
    begin, end = found["whole"]
    assert found["dragged"] == pytest.approx(
        [begin + (end - begin) * share for share in (0.25, 0.75)], rel=0.02
    )
