"""Checkpoints: written completely or not at all, readable at any world size, bit-identical at the same world size."""

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
