"""The build fails where a public name of the library is on no page. A hook of mkdocs."""

import importlib
from collections.abc import Iterable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocstrings import Inventory

MODULES = ("", ".checkpoint", ".echo", ".faults", ".guards", ".recipes", ".strategies", ".testing", ".virtual")
"""Parts of stretto whose `__all__` is public."""


@event_priority(-100)  # behind the plugin that writes the inventory
def on_post_build(config: MkDocsConfig) -> None:
    """Compare what the built site shows with `__all__` of every public module."""
    with (Path(config.site_dir) / "objects.inv").open("rb") as file:
        missing = missing_names(Inventory.parse_sphinx(file))
    if missing:
        raise PluginError(f"no page of docs/reference shows {', '.join(missing)}")


def missing_names(shown: Iterable[str]) -> list[str]:
    """Return the public names that are not among those that the site shows."""
    found = list(shown)
    public = [f"stretto{part}.{name}" for part in MODULES for name in importlib.import_module(f"stretto{part}").__all__]
    # A module stands for what is in it, and so does the function that has a file of its name.
    return [name for name in public if not any(one == name or one.startswith(f"{name}.") for one in found)]
