"""The page: an HTML file that opens offline and runs nothing but its own scripts.

What run folders hold is text or numbers: text is escaped where it is put into the page, numbers are JSON in an element
that no browser runs. A content security policy names the scripts by their digests and forbids all else, also every
request. A page below a folder `runs` shares Plotly with the others there, in `runs/assets`: its policy lets it load
scripts from where it lies itself. Any other page has Plotly in it, packed.
"""

import base64
import gzip
import hashlib
import json
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from stretto.disk import replace_file
from stretto.errors import MissingExtra
from stretto_lab.page.contents import Contents
from stretto_lab.page.curves import curves
from stretto_lab.page.sections import sections, text

MOST_RUNS = 40
"""Whose curves are drawn."""


def write_page(folders: Sequence[Contents], out: Path) -> None:
    """Write the page of what some folders hold.

    Args:
        folders: In the order of the page.
        out: The file.

    Raises:
        MissingExtra: plotly is not installed.
        DiskError: The file cannot be written.
    """
    runs = [run for folder in folders for run in folder.runs][:MOST_RUNS]
    data = {"runs": [curves(run) for run in runs]}
    body = "\n".join(sections(folders, runs))
    whole = _whole(folders, body, data, _shared(out))
    replace_file(out, lambda path: path.write_text(whole, encoding="utf-8"))


SHARED = "runs"
"""Name of the folder below which pages share Plotly."""


def _shared(out: Path) -> str | None:
    """Return where a page finds the Plotly that it shares, which is put there; None where it shares none."""
    folder = next((one for one in out.resolve().parents if one.name == SHARED), None)
    if folder is None:
        return None
    plotly = _plotly()
    file = folder / "assets" / f"plotly-{hashlib.sha256(plotly.encode()).hexdigest()[:12]}.js"
    if not file.exists():
        replace_file(file, lambda path: path.write_text(plotly, encoding="utf-8"))
    return Path(os.path.relpath(file, out.resolve().parent)).as_posix()


def _whole(folders: Sequence[Contents], body: str, data: dict[str, Any], shared: str | None) -> str:
    """Return the whole file."""
    plotly, own = _plotly(), _own("page.js")
    if shared is None:
        inside = [_own("unpack.js"), plotly, own]
        # The first script makes an element of the second one, and of the third after it.
        packed = [f'<script type="text/plain" id="plotly">{_packed(plotly)}</script>']
        packed += [f'<script type="text/plain" id="page">{own}</script>', f"<script>{inside[0]}</script>"]
        allowed = ""
    else:
        inside, packed = [own], [f'<script src="{text(shared)}"></script>', f"<script>{own}</script>"]
        allowed = "'self' file: "
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {allowed}" + " ".join(f"'sha256-{_digest(script)}'" for script in inside),
            "style-src 'unsafe-inline'",  # Plotly makes its own style element
            "img-src data: blob:",
        ]
    )
    names = text(", ".join(folder.name for folder in folders))
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{names} - Stretto</title>",
            f"<style>\n{_own('page.css')}</style></head><body>",
            f"<header><h1>{names}</h1></header>",
            "<noscript><p class=note>The charts need JavaScript; the tables do not.</p></noscript>",
            body,
            # No text in it can end the element, whatever it says.
            f'<script type="application/json" id="data">{_json(data)}</script>',
            *packed,
            "</body></html>\n",
        ]
    )


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _packed(script: str) -> str:
    """Return a script as text that no browser runs: gzip in base 85, a comma for the sign that could begin a tag."""
    return base64.b85encode(gzip.compress(script.encode(), 9, mtime=0)).decode().replace("<", ",")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _own(name: str) -> str:
    return resources.files("stretto_lab.page").joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingExtra("plotly", "cli", "the page of a report") from error
    return str(get_plotlyjs())
