"""Pages of real runs: what they draw is what the folders hold."""

import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from stretto_lab.cli import main
from stretto_lab.observe import read_json_lines
from stretto_lab.page import ReportConfig
from stretto_lab.page import page_of as page_written
from stretto_lab.page.drawing import MOST_POINTS, page
from stretto_lab.page.folder import Contents, Run, UpdateTime
from tests.docs.pages import DOCS, commands
from tests.draws import draws
from tests.page.pages import drawn, needs_chromium, page_of, points

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


def test_points_are_the_evaluations_against_seconds(folders: Path) -> None:
    evaluations = read_json_lines(folders / "run" / "evaluations.jsonl")
    expected = [[one[name] for name in ("step", "training_seconds", "heldout_loss")] for one in evaluations]
    assert np.allclose(points(page_of(folders / "run"), "run"), expected, rtol=1e-5)


def test_a_picture_has_no_more_points_than_it_shows_and_spreads_them_over_the_run() -> None:
    for draw in draws(6):
        count = int(np.random.default_rng(draw).integers(1, 20 * MOST_POINTS))
        steps = np.arange(float(count))
        run = Run("run", np.stack([steps, steps / 7, np.sin(steps)], axis=1), None)
        found = [
            step for step, _, _ in points(page([Contents(name="run", facts={}, runs=[run], gaps=[])]), "run")
        ]
        assert found == list(range(0, count, count // MOST_POINTS + 1))
        assert len(found) <= MOST_POINTS


def test_the_page_leads_with_what_limited_the_run(folders: Path) -> None:
    found = page_of(folders / "run")
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", found))
    (_, whole, compute, exposed, data, _, _) = _cells(found, "run")
    share = {"the link": exposed, "the data": data}
    largest = max(share, key=share.__getitem__)
    assert next(iter(facts)) == "what limited it"
    assert facts["what limited it"].startswith("computing" if share[largest] < 0.2 * whole else largest)
    assert whole == pytest.approx(compute + exposed + data, abs=0.02)
    assert "`" not in facts["what limited it"]  # a page is no Markdown
    assert "link" not in facts


def _cells(found: str, run: str) -> list[float]:
    (row,) = re.findall(rf"<tr><td>{run}</td>((?:<td>[\d,.]+</td>){{6}})</tr>", found)
    return [0.0, *(float(cell.replace(",", "")) for cell in re.findall(r"<td>(.*?)</td>", row))]


def test_the_parts_of_an_average_update_are_those_of_the_steady_records(folders: Path) -> None:
    updates = read_json_lines(folders / "run" / "updates.jsonl")
    steady = updates[3:]  # the first three are left out
    (_, whole, _, exposed, _, _, count) = _cells(page_of(folders / "run"), "run")
    taken = 1000 * (updates[-1]["training_seconds"] - updates[2]["training_seconds"]) / 5
    assert count == 5
    assert whole == pytest.approx(taken, abs=0.01)
    assert exposed == pytest.approx(1000 * sum(one["exposed_seconds"] for one in steady) / 5, abs=0.01)


def test_fewer_than_two_updates_have_no_average() -> None:
    names = ("training_seconds", "exposed_seconds", "wait_seconds", "lane_seconds")
    for count in (0, 1):
        assert UpdateTime.of_updates({name: np.ones(count) for name in names}) is None


def test_the_totals_of_an_arm_are_spread_over_its_updates_as_far_as_they_are_known() -> None:
    totals = {"updates": 4, "seconds": 8.0, "exposed_seconds": 2.0, "lane_seconds": 2.0, "wait_seconds": 1.0}
    found = UpdateTime.of_totals(totals)
    assert found is not None
    assert (found.seconds, found.compute, found.exposed, found.data) == (2.0, 1.25, 0.5, 0.25)
    stock = UpdateTime.of_totals({**totals, "exposed_seconds": None})
    assert stock is not None
    assert np.isnan(stock.compute)
    assert (stock.seconds, stock.data) == (2.0, 0.25)


def test_every_fault_has_a_row(folders: Path) -> None:
    found = page_of(folders / "run")
    incidents = read_json_lines(folders / "run" / "incidents.jsonl")
    strikes = [
        one for rank in (0, 1) for one in read_json_lines(folders / "run" / "strikes" / f"rank-{rank}.jsonl")
    ]
    assert len(incidents) >= 2
    rows = re.findall(r"<tr><td>run</td><td>(\d+)</td><td>(\w+)</td>", found)
    for kind, records in (("fault", strikes), ("incident", incidents)):
        assert [int(step) for step, one in rows if one == kind] == sorted(one["step"] for one in records)
    for strike in strikes:
        assert f"{strike['site']} of rank {strike['rank']} damaged on purpose: flip, 1 value" in found
    for incident in incidents:
        assert f"{incident['site']} damaged ({incident['part']}" in found
        assert incident["action"] in found


def test_the_page_shows_memory_and_speed(folders: Path) -> None:
    found = page_of(folders / "run")
    rises = read_json_lines(folders / "run" / "memory.jsonl")
    assert rises == sorted(rises, key=lambda one: (one["step"], one["peak_bytes"]))
    assert f"<dt>memory of rank 0</dt><dd>{rises[-1]['peak_bytes'] / 1e6:,.0f} MB at most</dd>" in found
    updates = read_json_lines(folders / "run" / "updates.jsonl")
    seconds = updates[-1]["training_seconds"] - updates[2]["training_seconds"]
    rate = sum(one["samples"] for one in updates[3:]) / seconds
    assert f"<dt>speed</dt><dd>{rate:,.3g} samples per second</dd>" in found


def test_a_comparison_lays_its_arms_over_each_other(folders: Path) -> None:
    found = page_of(folders / "arms", folders / "run")
    results = json.loads((folders / "arms" / "compare.json").read_text())["runs"]
    legend = re.findall(r"<li class=c\d>(.*?)</li>", found)
    assert legend == ["zero1 (arms)", "acco (arms)", "run"]
    for name, record in zip(legend, results, strict=False):
        expected = [
            [one[key] for key in ("step", "training_seconds", "heldout_loss")]
            for one in record["evaluations"]
        ]
        assert np.allclose(points(found, name), expected, rtol=1e-5)


def test_folders_of_one_name_are_told_apart(folders: Path) -> None:
    shutil.copytree(folders / "run", "elsewhere/run")
    found = page_of(folders / "run", "elsewhere/run", "elsewhere/run")
    assert re.findall(r"<li class=c\d>(.*?)</li>", found) == [str(folders / "run"), "elsewhere/run"]


def test_a_killed_run_shows_everything_up_to_the_kill(folders: Path) -> None:
    shutil.copytree(folders / "run", "killed")
    content = Path("killed", "updates.jsonl").read_bytes()
    half = sum(map(len, content.splitlines(keepends=True)[:5])) + 20  # in the middle of the sixth line
    Path("killed", "updates.jsonl").write_bytes(content[:half])
    found = page_of("killed")
    assert "<dt>updates</dt><dd>5</dd>" in found
    assert "updates.jsonl ends in the middle of line 6" in found


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
    for paths, written in zip(chosen, pages, strict=True):
        if len(paths) > 1:
            assert page_written(paths[::-1], ReportConfig()) == written
        assert page_written(paths, ReportConfig(out="here.html")) == Path("here.html")


def test_a_page_is_small_fetches_nothing_and_runs_nothing(folders: Path) -> None:
    found = page_of(folders / "run")
    assert "Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"" in found
    assert re.findall(r"<(?:script|link|img|iframe|object|embed)\b|\b(?:src|href)=", found) == []
    assert Path("page.html").stat().st_size < 50_000


@needs_chromium
def test_a_browser_draws_a_run_with_damage_beside_a_comparison(folders: Path) -> None:
    page_of(folders / "run", folders / "arms")
    document = drawn(Path("page.html"))
    assert document.count('<svg class="chart"') == 1
    assert document.count('<svg class="lanes"') == 3
