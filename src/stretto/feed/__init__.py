"""Batches for the user's loop, and the end of the data."""

from stretto.feed.feed import Batch, Feed, num_samples

__all__ = ["Batch", "Feed", "num_samples"]
