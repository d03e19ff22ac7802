"""Pages that are made of folders, and what is read in them again: by a parser, or by a browser that has drawn them."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stretto.page import ReportConfig, report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: pages are not drawn")


def page_of(*folders: Path | str, out: str = "page.html", **options: Any) -> str:
    """The text of the page of some folders."""
    report([Path(folder) for folder in folders], ReportConfig(out=out, **options))
    return Path(out).read_text(encoding="utf-8")


def numbers(page: str) -> dict[str, Any]:
    """The numbers that a page draws."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def shown(page: str) -> str:
    """A page without its scripts, its style and its numbers."""
    return re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)


def drawn(page: Path) -> str:
    """What a headless browser makes of a page, which nothing in it may complain about."""
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    own = f"--user-data-dir={page.resolve().parent / 'profile'}"
    ended = subprocess.run(
        [str(CHROMIUM), *words, own, page.resolve().as_uri()], capture_output=True, text=True, check=True
    )
    assert [line for line in ended.stderr.splitlines() if "CONSOLE" in line] == []
    (root,) = re.findall(r"<html[^>]*>", ended.stdout)
    assert "data-drawn" in root  # the last line of the script was reached
    return ended.stdout
