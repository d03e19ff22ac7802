"""Flat storage: which element of which parameter lies where, and who owns it."""

from stretto.flat.layout import Bucket, FlatSet, Layout, Slot, check_parameters, original_name, plan_layout
from stretto.flat.parted import Fragments, PartedTensor, Shares
from stretto.flat.whole import ALIGNMENT

__all__ = [
    "ALIGNMENT",
    "Bucket",
    "FlatSet",
    "Fragments",
    "Layout",
    "PartedTensor",
    "Shares",
    "Slot",
    "check_parameters",
    "original_name",
    "plan_layout",
]
