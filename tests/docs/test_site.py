"""The hooks of the site: where links lead, and what is missing. `make site` builds the whole, warnings being errors."""

import re
from importlib import import_module

import pytest

from tests.docs.pages import ROOT, without_code
from website.pages import FIRST, on_page_content, source_of_pages, with_links_of_site
from website.promises import LOADED, MODULES, answers, missing_names


@pytest.mark.parametrize(
    ("page", "written", "on_site"),
    [
        ("index.md", "docs/loops.md#models", "loops.md#models"),
        ("index.md", "docs/figures/lanes.svg", "figures/lanes.svg"),
        (
            "echo.md",
            "decisions/0030-an-echo-is-another-update.md",
            "files/docs/decisions/0030-an-echo-is-another-update.md.txt",
        ),
        ("index.md", "examples/lora.py", "examples/lora.md"),
        ("index.md", "LICENSE", "files/LICENSE"),
        ("contributing.md", ".github/workflows/ci.yml", "files/github/workflows/ci.yml"),
        ("echo.md", "../benchmarks/results/2026-11-21-echo-speed/", "results/2026-11-21-echo-speed.md"),
        ("results/2026-11-21-echo-speed.md", "../../../docs/virtual-cluster.md", "../virtual-cluster.md"),
        (
            "results/2026-11-21-echo-speed.md",
            "two.json",
            "../files/benchmarks/results/2026-11-21-echo-speed/two.json",
        ),
        ("index.md", "no-such-file.md", "no-such-file.md"),
        ("index.md", "https://pytorch.org/docs", "https://pytorch.org/docs"),
    ],
)
def test_a_link_leads_to_the_page_that_its_target_has_become_or_to_the_file(
    page: str, written: str, on_site: str
) -> None:
    assert with_links_of_site(f"See [this]({written}).", page) == f"See [this]({on_site})."


@pytest.mark.parametrize("code", ["`[a](docs/loops.md)`", "```\n[a](docs/loops.md)\n```\n"])
def test_code_is_left_as_it_is(code: str) -> None:
    assert with_links_of_site(code, "index.md") == code


def test_every_page_of_the_repository_is_a_page_of_the_site() -> None:
    placed = set(source_of_pages().values())
    found = {
        file.relative_to(ROOT).as_posix()
        for pattern in ("*.md", "docs/**/*.md", "benchmarks/results/*/*.md", "examples/**/*.py")
        for file in ROOT.glob(pattern)
        if file.parent.name != "decisions"
    }
    assert found - placed == set()


def test_every_list_has_an_empty_line_before_it() -> None:
    """Code hosts do without it; Python-Markdown would put the items into the paragraph."""
    item = re.compile(r"\s*(?:- |\d+\. )")
    begun_late = [
        f"{place}: {paragraph[:60]}"
        for place in source_of_pages().values()
        if place.endswith(".md")
        for paragraph in without_code((ROOT / place).read_text(encoding="utf-8")).split("\n\n")
        if not item.match(paragraph) and any(map(item.match, paragraph.split("\n")))
    ]
    assert begun_late == []


def test_a_long_name_in_a_table_may_be_broken_behind_its_colons() -> None:
    cell = "<td><code>average:30:fragments=10:wire=int4</code></td><td><code>a:b</code></td>"
    page = f"<table>{cell}</table><p><code>average:30:fragments=10:wire=int4</code>"
    broken = on_page_content(page, page=None, config=None, files=None)
    assert broken == page.replace(
        cell, cell.replace(":30:fragments=10:wire", ":<wbr>30:<wbr>fragments=10:<wbr>wire")
    )


def test_a_public_name_that_no_page_shows_is_missed() -> None:
    public = {f"{module}.{name}" for module in MODULES for name in import_module(module).__all__}
    assert missing_names(public) == []
    assert missing_names(public - {"stretto_lab.recipes.reshard"}) == ["stretto_lab.recipes.reshard"]
    shown_in_its_file = public - {"stretto.checkpoint.save"} | {"stretto.checkpoint.save.save"}
    assert missing_names(shown_in_its_file) == []


def test_what_a_browser_would_load_from_another_host_is_found() -> None:
    assert LOADED.search('<script src="https://unpkg.com/shim"></script>')
    assert LOADED.search('<link rel="stylesheet" href="//fonts.example/style.css">')
    assert not LOADED.search(
        '<a href="https://pytorch.org">PyTorch</a> <script src="../assets/bundle.js"></script>'
    )


def test_a_search_shows_the_section_with_the_word_in_its_title_on_a_page_that_says_how() -> None:
    index = {
        "config": {"separator": r"[\s\-,:]+"},
        "docs": [
            {"location": "results.html", "title": "Hangs", "text": "hang hang", "boost": FIRST["Measured"]},
            {"location": "loops.html", "title": "Loops", "text": "<p>A loop that <b>hangs</b>: look.</p>"},
            {"location": "faq.html", "title": "My run hangs", "text": "Look.", "boost": FIRST["Start"]},
            {"location": "other.html", "title": "Other", "text": "changes"},
        ],
    }
    assert answers(index, "hang") == ["faq.html", "results.html", "loops.html"]
    assert answers(index, "Hangs look") == ["faq.html", "loops.html"]
    assert answers(index, "no-such-word") == []
