"""Pages that are made of folders, and what is read in them again: by a parser, or by a browser that has drawn them."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stretto_lab.page import ReportConfig, report

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
    document = _opened(page)
    (root,) = re.findall(r"<html[^>]*>", document)
    assert "data-drawn" in root  # the last line of the script was reached
    return document


def used(page: Path) -> dict[str, Any]:
    """What comes of using a page with mouse and keyboard, as `use.js` does in a frame around it."""
    around = page.with_name("around.html")
    script = Path(__file__).with_name("use.js").read_text(encoding="utf-8")
    frame = f'<iframe id="frame" src="{page.resolve().as_uri()}" width="1200" height="4000"></iframe>'
    around.write_text(
        f'<!doctype html>{frame}<pre id="found"></pre><script>{script}</script>', encoding="utf-8"
    )
    has_mouse = "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4"
    document = _opened(around, "--allow-file-access-from-files", "--window-size=1300,4100", has_mouse)
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', document, re.DOTALL)
    return json.loads(html.unescape(found))


def _opened(page: Path, *words: str) -> str:
    """The document that a browser has after it has opened a page, without a complaint."""
    common = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    common.append("--virtual-time-budget=20000")  # the page unpacks its library when it has been loaded
    own = f"--user-data-dir={page.resolve().parent / 'profile'}"
    ended = subprocess.run(
        [str(CHROMIUM), *common, *words, own, page.resolve().as_uri()],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert [line for line in ended.stderr.splitlines() if "CONSOLE" in line] == []
    return ended.stdout
