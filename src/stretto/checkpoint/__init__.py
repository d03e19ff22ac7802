"""Checkpoints: written whole or not at all, read at any world size, continued to the bit at the same one."""

from stretto.checkpoint.folder import complete, latest
from stretto.checkpoint.loading import Restored, load
from stretto.checkpoint.saving import save

__all__ = ["Restored", "complete", "latest", "load", "save"]
