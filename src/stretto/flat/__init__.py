"""Flat storage: which element of which parameter lies where, and who owns it."""

from stretto.flat.layout import ALIGNMENT, Bucket, FlatSet, Layout, Slot, original_name, plan_layout
from stretto.flat.parted import Fragments, PartedTensor, Shares

__all__ = [
    "ALIGNMENT",
    "Bucket",
    "FlatSet",
    "Fragments",
    "Layout",
    "PartedTensor",
    "Shares",
    "Slot",
    "original_name",
    "plan_layout",
]
