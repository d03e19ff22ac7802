"""Flat storage: which element of which parameter lies where, and who owns it."""

from stretto.flat.gradients import GradientBuffer
from stretto.flat.layout import ALIGNMENT, Bucket, FlatSet, Layout, Slot
from stretto.flat.plan import plan_layout

__all__ = ["ALIGNMENT", "Bucket", "FlatSet", "GradientBuffer", "Layout", "Slot", "plan_layout"]
