"""Batches for the user's loop, and the end of the data."""

from stretto.echo.statistics import num_samples
from stretto.engine import Job
from stretto.feed.feed import Batch, Feed
from stretto.feed.node_feed import NodeFeed

__all__ = ["Batch", "Feed", "feed_of", "num_samples"]


def feed_of(job: Job) -> Feed:
    """Return the feed of one rank of a job."""
    return Feed(job) if job.node_group is None else NodeFeed(job, job.node_group)
