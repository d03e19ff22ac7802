"""Replicas that may differ: their averages, and the counts on which ranks agree in between."""

from stretto.averaging.diverging import DivergingReplica
from stretto.averaging.local import LocalReplica

__all__ = ["DivergingReplica", "LocalReplica"]
