"""What a person runs, and what code is tried with: the command line, and kits for authors of extensions.

It is built on the library, `stretto`, which never imports it.
"""

import importlib
from typing import Any

_PACKAGES = ("faults", "plan", "recipes", "testing", "virtual")
"""What programs use by its full name, as `stretto_lab.virtual.VirtualCluster`."""


def __getattr__(name: str) -> Any:
    """Return a package of the lab; Python asks here for each one once."""
    if name not in _PACKAGES:
        raise AttributeError(f"module 'stretto_lab' has no attribute {name!r}")
    return importlib.import_module(f"stretto_lab.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES})
