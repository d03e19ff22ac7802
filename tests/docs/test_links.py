"""No page points into the void, and outside of it only to addresses that somebody has looked up."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, anchors, links, pages


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_a_file_that_a_page_names_is_there() -> None:
    path = re.compile(r"`((?:benchmarks|examples|experiments|src|tests|website)/[\w./-]+)`")
    named = {(page.name, name) for page in pages() for name in path.findall(page.read_text(encoding="utf-8"))}
    of_an_example = {("adding-a-strategy.md", "src/stretto/strategies/pipe_sgd.py")}
    assert {(page, name) for page, name in named if not (ROOT / name).exists()} == of_an_example


OUTSIDE = {
    "arxiv.org",
    "creativecommons.org",  # in figures, which matplotlib signs
    "download.pytorch.org",
    "openreview.net",
    "purl.org",
    "ui.perfetto.dev",
    "www.w3.org",
}
"""Hosts that exist and are not ours. We have no address of our own yet: pages link to each other by their paths."""
PATTERNS = (
    "*.md", "*.toml", "*.cff", "mkdocs.yml", "docs/**/*.*", "benchmarks/results/*/*.md", "examples/**/*.*",
    "src/**/*.py", "website/**/*.py",
)  # fmt: skip
READ = [
    file for pattern in PATTERNS for file in sorted(ROOT.glob(pattern)) if "__pycache__" not in file.parts
]


def test_a_link_to_the_outside_goes_to_a_host_that_exists() -> None:
    host = re.compile(r"\bhttps?://([^/\s\"'<>)`:{]+)")
    found = {(name, file.name) for file in READ for name in host.findall(file.read_text(encoding="utf-8"))}
    assert sorted((name, file) for name, file in found if name not in OUTSIDE) == []
    assert {name for name, _ in found} == OUTSIDE
