"""The virtual cluster: production code on many ranks in one process, in virtual time."""

from stretto_lab.virtual.cluster import Results, VirtualCluster
from stretto_lab.virtual.group import VirtualGroup
from stretto_lab.virtual.network import NETWORKS, Network, Uplink, parse_network
from stretto_lab.virtual.runtime import Compute, parse_slowness
from stretto_lab.virtual.store import VirtualStore
from stretto_lab.virtual.trace import RankStatus, Span, Trace, Transfer

__all__ = [
    "NETWORKS",
    "Compute",
    "Network",
    "RankStatus",
    "Results",
    "Span",
    "Trace",
    "Transfer",
    "Uplink",
    "VirtualCluster",
    "VirtualGroup",
    "VirtualStore",
    "parse_network",
    "parse_slowness",
]
