"""Flat storage: which element of which parameter lies where, and who owns it."""

from stretto.flat.gradients import GradientBuffer
from stretto.flat.layout import ALIGNMENT, Bucket, FlatSet, Layout, Slot
from stretto.flat.parted import PartedTensor
from stretto.flat.plan import plan_layout
from stretto.flat.shares import Fragments, Shares

__all__ = [
    "ALIGNMENT",
    "Bucket",
    "FlatSet",
    "Fragments",
    "GradientBuffer",
    "Layout",
    "PartedTensor",
    "Shares",
    "Slot",
    "plan_layout",
]
