"""The virtual cluster: production code on many ranks in one process, in virtual time."""

from stretto.virtual.cluster import Results, VirtualCluster
from stretto.virtual.compute import Compute, parse_slowness
from stretto.virtual.group import VirtualGroup
from stretto.virtual.network import NETWORKS, Network, Outage, Uplink, parse_network
from stretto.virtual.standing import Standing
from stretto.virtual.store import VirtualStore
from stretto.virtual.trace import Span, Trace, Transfer

__all__ = [
    "NETWORKS",
    "Compute",
    "Network",
    "Outage",
    "Results",
    "Span",
    "Standing",
    "Trace",
    "Transfer",
    "Uplink",
    "VirtualCluster",
    "VirtualGroup",
    "VirtualStore",
    "parse_network",
    "parse_slowness",
]
