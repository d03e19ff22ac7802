"""Replicas that may differ: how they are averaged, and what ranks agree on meanwhile."""

from stretto.averaging.diverging import DivergingReplica
from stretto.averaging.local import LocalReplica

__all__ = ["DivergingReplica", "LocalReplica"]
