"""Checkpoints: written whole or not at all, read at any world size, continued to the bit at the same."""

from stretto.checkpoint.background import check, wait
from stretto.checkpoint.files import complete, latest, newest_first, step_of
from stretto.checkpoint.load import Restored, continued, export, hold, load, read
from stretto.checkpoint.save import save
from stretto.share import Held

__all__ = [
    "Held",
    "Restored",
    "check",
    "complete",
    "continued",
    "export",
    "hold",
    "latest",
    "load",
    "newest_first",
    "read",
    "save",
    "step_of",
    "wait",
]
