"""The changes are those of the version that is installed, and a release has a page of them."""

import re

import stretto
from tests.docs.pages import ROOT

TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
RELEASES = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]


def test_the_newest_changes_are_those_of_this_version() -> None:
    assert RELEASES[0].splitlines()[0] == stretto.__version__.removesuffix(".dev0")


def test_the_changes_of_a_release_are_one_page() -> None:
    assert [release.splitlines()[0] for release in RELEASES if len(release.splitlines()) > 80] == []
