"""On a phone no page that somebody comes for scrolls sideways: what is wider scrolls by itself, or is broken."""

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.page.pages import CHROMIUM, needs_chromium

PHONE = 390
AT_ONCE = 8
SCRIPT = """
const found = {}, waiting = PAGES; let open = 0;
function next() {
    if (!waiting.length) {
        if (!open) document.getElementById('found').textContent = JSON.stringify(found);
        return;
    }
    const page = waiting.pop(), frame = document.createElement('iframe');
    open++;
    frame.width = PHONE; frame.height = 800; frame.src = page;
    frame.onload = () => {
        found[page] = MEASURED;
        frame.remove(); open--; next();
    };
    document.body.append(frame);
}
for (let lane = 0; lane < AT_ONCE; lane++) next();
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(
        words, cwd=ROOT, check=True, capture_output=True, env={"NO_MKDOCS_2_WARNING": "1", "PATH": ""}
    )
    return folder


PAGE = "frame.contentDocument.documentElement.scrollWidth"
WIDEST_TABLE = (
    "Math.max(...[...frame.contentDocument.querySelectorAll('article table')].map(one => one.scrollWidth))"
)


def widths(site: Path, pages: list[str], measured: str = PAGE) -> dict[str, int]:
    """How wide each page is on a phone, or what else is measured of it, in pixels."""
    script = (
        SCRIPT.replace("PAGES", json.dumps(pages))
        .replace("MEASURED", measured)
        .replace("PHONE", str(PHONE))
        .replace("AT_ONCE", str(AT_ONCE))
    )
    around = site / "around.html"
    around.write_text(
        f'<!doctype html><body><pre id="found"></pre><script>{script}</script>', encoding="utf-8"
    )
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=60000"]
    words += ["--allow-file-access-from-files", f"--user-data-dir={site / 'profile'}", around.as_uri()]
    ended = subprocess.run([str(CHROMIUM), *words], capture_output=True, text=True, check=True)
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', ended.stdout, re.DOTALL)
    shutil.rmtree(site / "profile", ignore_errors=True)
    return json.loads(html.unescape(found))


@pytest.mark.long
@needs_chromium
@pytest.mark.timeout(900)  # the whole site is built and drawn
def test_no_page_scrolls_sideways_on_a_phone(site: Path) -> None:
    files = [
        *site.glob("*.html"),
        *site.glob("stories/*.html"),
    ]  # what people come for; results are tables alike
    pages = sorted(file.relative_to(site).as_posix() for file in files)
    found = widths(site, pages)
    assert found.keys() == set(pages)
    assert len(pages) > 30
    assert {page: width for page, width in found.items() if width > PHONE} == {}


@needs_chromium
def test_a_phone_shows_the_last_column_of_the_tables_of_the_first_page_and_of_the_calculator(
    site: Path,
) -> None:
    """There it is the answer: what an update then takes, and what Stretto does beside others."""
    found = widths(site, ["index.html", "calculator.html"], WIDEST_TABLE)
    assert {page: width for page, width in found.items() if width > PHONE} == {}


@needs_chromium
def test_a_page_that_is_wider_is_found(tmp_path: Path) -> None:
    (tmp_path / "wide.html").write_text('<!doctype html><div style="width: 700px">wide</div>')
    (tmp_path / "narrow.html").write_text("<!doctype html><p>narrow</p>")
    assert widths(tmp_path, ["wide.html", "narrow.html"]) == {"wide.html": 708, "narrow.html": PHONE}
