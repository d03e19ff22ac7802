"""A file of results that is written as a whole."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def replace_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content`, making the folder where there is none, in one step: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    unfinished.replace(path)
