"""Replicas that may differ: how they are averaged, and what ranks agree on meanwhile."""

from stretto.averaging.drifting import DriftingReplica
from stretto.averaging.local import LocalReplica

__all__ = ["DriftingReplica", "LocalReplica"]
