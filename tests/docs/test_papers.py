"""The page of the papers is made from the runs."""

import claims
from book import Book

from tests.docs.pages import DOCS, README, ROOT

PAPERS, RECORDS = claims.load()


def test_the_tables_of_the_page_are_those_of_the_runs() -> None:
    site = claims.Site(Book(claims.RUNS))
    results = [site.found(record) for record in RECORDS.values()]
    text = claims.PAGE.read_text(encoding="utf-8")
    assert claims.page(text, PAPERS, results) == text, "claims.py --page makes them again"
    assert any(one.verdict is claims.Verdict.FAILS for one in results)


def test_the_papers_are_linked_where_their_methods_are() -> None:
    linked = {
        "acco": [DOCS / "strategies.md", ROOT / "CITATION.cff"],
        "paft": [DOCS / "strategies.md", DOCS / "paft.md", ROOT / "CITATION.cff"],
        "echo": [DOCS / "strategies.md", DOCS / "echo.md", DOCS / "averaging.md", ROOT / "CITATION.cff"],
    }
    for key, places in linked.items():
        for place in places:
            text = place.read_text(encoding="utf-8")
            assert any(link in text for link in PAPERS[key]["links"].values()), (key, place.name)
    assert "docs/papers.md" in README.read_text(encoding="utf-8")
