"""The network model: how long the bytes that ranks send take to arrive.

Every rank has its own full-duplex link, and ranks may share uplinks. A link carries one transmission after the
other, in the order in which collectives begin. A collective begins when its last rank has entered it, and is over on
all ranks when its last byte has arrived:

    over = max over links of  max(begun, link free) + bytes / rate + latency

The links belong to the participating ranks, and the uplinks connect some of these ranks with others. Bytes over an
uplink cross the ranks' own links too, unless it is `direct`. `bytes` come from the table in
`stretto.groups.collectives`. The throttled group models its link in the same way. Sending costs no computing time,
and switches drop nothing.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from stretto.errors import ConfigError
from stretto.fields import check_fields
from stretto.groups.collectives import Pattern
from stretto.link import Link
from stretto_lab.links import LINKS, parse_link

_PICOSECONDS_PER_NANOSECOND = 1000
_FREE = Link()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Uplink:
    """A link that several ranks share towards all others, such as a rack's or a site's link."""

    ranks: tuple[int, ...]
    """The ranks that share it."""
    link: Link
    """Its rate and latency, in addition to the ranks' own links."""
    direct: bool = False
    """Whether data to other ranks cross only this link, like a node's network card, because the ranks' own links
    connect ranks of the node; behind a rack's switch each rank also uses its own link."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The links of a virtual cluster; by default they take no time."""

    link: Link = _FREE
    """Every rank's own link, in each direction."""
    links: Mapping[int, Link] = dataclasses.field(default_factory=dict)
    """Links of single ranks, which replace `link`."""
    uplinks: tuple[Uplink, ...] = ()
    """Links that ranks share."""

    def __post_init__(self) -> None:
        check_fields(self)

    def between(self, nodes: int, world_size: int) -> "Network":
        """Return a network of nodes: each node has the link that a rank has here, and links inside nodes are free.

        Raises:
            ConfigError: The ranks cannot be divided equally among the nodes.
        """
        if nodes < 1 or world_size % nodes:
            raise ConfigError(f"nodes={nodes}: expected a divisor of the {world_size} ranks")
        each = world_size // nodes
        return Network(
            uplinks=tuple(
                Uplink(ranks=tuple(range(node * each, (node + 1) * each)), link=self.link)
                for node in range(nodes)
            )
        )

    def check(self, world_size: int) -> None:
        """Check that every rank that the network names exists.

        Raises:
            ConfigError: A rank does not exist.
        """
        shared = [rank for uplink in self.uplinks for rank in uplink.ranks]
        named = {*self.links, *shared}
        if outside := sorted(rank for rank in named if not 0 <= rank < world_size):
            raise ConfigError(
                f"the network names ranks {outside}; the cluster has ranks 0 to {world_size - 1}"
            )


class Wires:
    """The links of one run, and the time until which each of them is busy.

    Args:
        network: Rates and latencies.
        world_size: Number of ranks.
    """

    def __init__(self, network: Network, world_size: int) -> None:
        own = [network.links.get(rank, network.link) for rank in range(world_size)]
        shared = [uplink.link for uplink in network.uplinks]
        self._world_size = world_size
        self._rates = np.array([_picoseconds_per_byte(link) for link in own + shared], dtype=np.int64)
        self._latencies = np.array([round(link.latency_seconds * 1e9) for link in own + shared], np.int64)
        self._members = [np.array(uplink.ranks, dtype=np.int64) for uplink in network.uplinks]
        self._are_direct = [uplink.direct for uplink in network.uplinks]
        self._free_from = np.zeros(len(self._rates), dtype=np.int64)

    def carry(
        self,
        begun_ns: int,
        sent_bytes: Sequence[int],
        pattern: Pattern,
        parts: Sequence[Sequence[int]] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> int:
        """Return when all bytes of one collective have arrived.

        Args:
            begun_ns: When the last rank has entered it.
            sent_bytes: By participating rank.
            pattern: Which ranks send to which; it decides how many bytes cross the uplinks.
            parts: Bytes from each participating rank to each, if the pattern does not determine them.
            ranks: The participating ranks, in the order of their group; None for all.
        """
        group = np.arange(self._world_size) if ranks is None else np.array(ranks)
        if len(group) == 1:
            return begun_ns
        sent = np.array(sent_bytes, dtype=np.int64)
        carried = np.zeros(len(self._rates), dtype=np.int64)
        carried[group] = sent
        takes_part = np.zeros(len(self._rates), dtype=bool)
        takes_part[group] = True
        for uplink, members in enumerate(self._members, start=self._world_size):
            is_behind = np.isin(group, members)
            takes_part[uplink] = is_behind.any() and not is_behind.all()
            crossing = _crossing(sent, is_behind, pattern, parts)
            carried[uplink] = crossing.sum()
            if self._are_direct[uplink - self._world_size]:
                carried[group] -= crossing
                takes_part[group[is_behind]] = is_behind.sum() > 1
        starts = np.maximum(self._free_from, begun_ns)
        stops = starts + carried * self._rates // _PICOSECONDS_PER_NANOSECOND
        self._free_from = np.where(takes_part, stops, self._free_from)
        return int((stops + self._latencies)[takes_part].max())


def _crossing(
    sent: NDArray[np.int64],
    is_behind: NDArray[np.bool_],
    pattern: Pattern,
    parts: Sequence[Sequence[int]] | None,
) -> NDArray[np.int64]:
    """Return how many bytes each rank of a group sends across an uplink to the others."""
    if parts is not None:
        across = np.array(parts, dtype=np.int64)[:, ~is_behind].sum(axis=1)
        return np.where(is_behind, across, 0)
    if pattern == "ring":
        return sent * (is_behind & ~np.roll(is_behind, -1))
    outside = len(sent) - int(is_behind.sum())
    return is_behind * sent * outside // (len(sent) - 1)


def _picoseconds_per_byte(link: Link) -> int:
    return 0 if link.bits_per_second is None else round(8e12 / link.bits_per_second)


NETWORKS: Mapping[str, Network] = MappingProxyType({name: Network(link=link) for name, link in LINKS.items()})
"""By name; other links, such as 100mbit,2ms, are networks too."""


def parse_network(text: str) -> Network:
    """Return the network of that name, or one in which every rank has the link that `text` describes.

    Raises:
        UnknownName: There is no such network or link.
    """
    return Network(link=parse_link(text))
