"""Replicas that may differ: how they are averaged, and what ranks agree on meanwhile."""

from stretto.averaging.drifting import DriftingReplicas
from stretto.averaging.local import LocalReplicas

__all__ = ["DriftingReplicas", "LocalReplicas"]
