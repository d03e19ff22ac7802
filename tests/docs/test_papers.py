"""The page of the papers is made from the runs, and names records that exist."""

from benchmarks.papers import PAGE, RUNS, page, results
from stretto_lab.reproduce import MINUTES, PAPERS, RECORDS, Book, Verdict, chosen
from tests.docs.pages import DOCS, README, ROOT, commands

FOUND = results()


def test_the_tables_of_the_page_are_those_of_the_runs() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text, FOUND) == text, "python benchmarks/papers.py makes them again"


def test_claims_that_do_not_hold_are_shown() -> None:
    text = PAGE.read_text(encoding="utf-8")
    judged = [one for one in FOUND if one.verdict is not Verdict.UNCHECKED]
    assert len(judged) >= 25
    assert any(one.verdict is Verdict.FAILS for one in judged)
    assert all(f"[{one.record.id}](#" in text for one in FOUND)


def test_a_record_whose_runs_are_its_own_shows_its_own_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for one in FOUND:
        if not one.record.unchecked:
            section = text.partition(f"#### {one.record.id}\n")[2].partition("\n####")[0]
            told = section.partition("Its table is that of [")[2].partition("]")[0]
            other = RECORDS[told] if told else one.record
            assert (other.setting, other.cells) == (one.record.setting, one.record.cells)


def test_every_run_of_a_record_that_is_judged_is_in_the_raw_data() -> None:
    known = {(run["words"], run["seed"]) for run in Book(RUNS).runs}
    wanted = {
        (cell.words, seed)
        for one in FOUND
        if one.verdict is not Verdict.UNCHECKED
        for columns in one.cells.values()
        for cell in columns.values()
        if cell.words
        for seed in range(one.seeds)
    }
    assert wanted <= known


def test_the_minutes_of_a_list_are_those_that_the_runs_took() -> None:
    for one in FOUND:
        assert abs(MINUTES.get(one.record.id, 0.0) - one.cpu_seconds / 60) <= 0.1, one.record.id


def test_the_page_names_records_that_exist() -> None:
    for command, *words in commands(PAGE):
        if command == "reproduce":
            chosen([word for word in words[:1] if not word.startswith("-")])
    assert len(RECORDS) >= 25


def test_the_papers_are_linked_where_their_methods_are() -> None:
    linked = {
        "acco": [DOCS / "strategies.md", ROOT / "CITATION.cff"],
        "paft": [DOCS / "strategies.md", DOCS / "paft.md", ROOT / "CITATION.cff"],
        "echo": [DOCS / "strategies.md", DOCS / "echo.md", DOCS / "averaging.md", ROOT / "CITATION.cff"],
    }
    for key, places in linked.items():
        for place in places:
            text = place.read_text(encoding="utf-8")
            assert any(link in text for link in PAPERS[key].links.values()), (key, place.name)
    assert "docs/papers.md" in README.read_text(encoding="utf-8")
