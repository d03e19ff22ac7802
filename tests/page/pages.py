"""Pages that are made of folders, and what is read in them again, also by a browser."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from stretto_lab.page import ReportConfig, report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: pages are not drawn")


def page_of(*folders: Path | str, out: str = "page.html") -> str:
    """The text of the page of some folders, without its style."""
    report([Path(folder) for folder in folders], ReportConfig(out=out))
    return re.sub(r"<style>.*?</style>", "", Path(out).read_text(encoding="utf-8"), flags=re.DOTALL)


def points(page: str, run: str) -> list[list[float]]:
    """The held-out losses that a page draws of a run: after so many updates and seconds, and how large."""
    found = re.findall(rf"<title>{re.escape(run)}, (\S+) updates, (\S+) s: ([^<]*)</title>", page)
    return [list(map(float, one)) for one in found]


def drawn(page: Path) -> str:
    """What a headless browser makes of a page, which nothing in it may complain about."""
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    own = f"--user-data-dir={page.resolve().parent / 'profile'}"
    ended = subprocess.run(
        [str(CHROMIUM), *words, own, page.resolve().as_uri()], capture_output=True, text=True, check=True
    )
    assert [line for line in ended.stderr.splitlines() if "CONSOLE" in line] == []
    return ended.stdout
