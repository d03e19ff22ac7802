"""What a built site must keep, or else the build fails: a hook of mkdocs.

Every public name of the library is on a page, and no page loads anything from another host.
"""

import importlib
import re
from collections.abc import Iterable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocstrings import Inventory

MODULES = (
    "stretto",
    "stretto.checkpoint",
    "stretto.echo",
    "stretto.guards",
    "stretto.strategies",
    "stretto_lab.faults",
    "stretto_lab.plan",
    "stretto_lab.recipes",
    "stretto_lab.testing",
    "stretto_lab.virtual",
)
"""Those whose `__all__` is public."""
LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^\s>]*")
"""A tag that makes a browser ask another host."""


@event_priority(-100)  # behind the plugins that write
def on_post_build(config: MkDocsConfig) -> None:
    """Look at the built site."""
    site = Path(config.site_dir)
    with (site / "objects.inv").open("rb") as inventory:
        missing = missing_names(Inventory.parse_sphinx(inventory))
    if missing:
        raise PluginError(f"no page of docs/reference shows {', '.join(missing)}")
    for page in site.rglob("*.html"):
        if found := LOADED.search(page.read_text(encoding="utf-8")):
            raise PluginError(f"{page.relative_to(site)} loads from another host: {found[0]}")


def missing_names(shown: Iterable[str]) -> list[str]:
    """Return the public names that are not among those that the site shows."""
    found = list(shown)
    public = [f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__]
    # A module stands for what is in it, and so does the function that has a file of its name.
    return [name for name in public if not any(one == name or one.startswith(f"{name}.") for one in found)]
