"""Replicas that may differ: how they are averaged, and what ranks agree on meanwhile."""

from stretto.averaging.at_rest import LocalAtRest
from stretto.averaging.drifting import DriftingReplica

__all__ = ["DriftingReplica", "LocalAtRest"]
