"""Flat storage: the place of every element of every parameter, and its owner."""

from stretto.flat.fitting import check_parameters, original_name
from stretto.flat.layout import (
    Bucket,
    FlatSet,
    Layout,
    Slot,
    bucket_bytes_among,
    plan_layout,
    usual_bucket_bytes,
)
from stretto.flat.owned import Block, Owned, Slices
from stretto.flat.parted import Fragments, PartedTensor, Range, Runs, Shares
from stretto.flat.shards import Shard, dealt_numel, is_dtensor, most_rows, shard_of
from stretto.flat.whole import ALIGNMENT

__all__ = [
    "ALIGNMENT",
    "Block",
    "Bucket",
    "FlatSet",
    "Fragments",
    "Layout",
    "Owned",
    "PartedTensor",
    "Range",
    "Runs",
    "Shard",
    "Shares",
    "Slices",
    "Slot",
    "bucket_bytes_among",
    "check_parameters",
    "dealt_numel",
    "is_dtensor",
    "most_rows",
    "original_name",
    "plan_layout",
    "shard_of",
    "usual_bucket_bytes",
]
