"""What the network's model says: latency, bandwidth, contention, uplinks, outages."""

import pytest
import torch

from stretto.errors import ConfigError, UnknownName
from stretto.groups import Link
from stretto.groups.collectives import method_of
from stretto_lab.virtual import NETWORKS, Network, Uplink, VirtualCluster, VirtualGroup, parse_network
from stretto_lab.virtual.network import Wires

NS_PER_BYTE = 8
LATENCY_NS = 1_000
GIGABIT = Link(bits_per_second=1e9, latency_seconds=LATENCY_NS / 1e9)
SLOW = Link(bits_per_second=1e8, latency_seconds=LATENCY_NS / 1e9)


def over_ns(network: Network, *transmissions: tuple[int, list[int]]) -> list[int]:
    """When each of several collectives is over, given when it begins and what the ranks send."""
    wires = Wires(network, len(transmissions[0][1]))
    return [wires.carry(begun, sent, "direct") for begun, sent in transmissions]


OVER: list[tuple[Network, list[tuple[int, list[int]]], list[int]]] = [
    # Bytes take their time and arrive a latency later.
    (Network(link=GIGABIT), [(500, [100, 100])], [500 + 800 + LATENCY_NS]),
    (Network(), [(500, [10**9, 10**9])], [500]),
    # Collectives share a link one after the other, and latency does not occupy it.
    (
        Network(link=GIGABIT),
        [(0, [100, 100]), (0, [50, 50]), (10_000, [1, 1])],
        [800 + LATENCY_NS, 1_200 + LATENCY_NS, 10_008 + LATENCY_NS],
    ),
    # Everyone waits for the slowest link on which something is sent.
    (Network(link=GIGABIT, links={1: SLOW}), [(0, [100, 100, 100])], [100 * 80 + LATENCY_NS]),
    (Network(link=GIGABIT, links={1: SLOW}), [(0, [100, 0, 100])], [800 + LATENCY_NS]),
]


def test_a_collective_is_over_when_the_last_byte_has_arrived() -> None:
    for network, transmissions, over in OVER:
        assert over_ns(network, *transmissions) == over


def test_an_uplink_carries_what_leaves_those_who_share_it() -> None:
    network = Network(link=GIGABIT, uplinks=(Uplink(ranks=(0, 1), link=GIGABIT),))
    # Every rank sends a third of its bytes to each other rank: two thirds of both ranks' bytes leave.
    assert over_ns(network, (0, [300] * 4)) == [2 * 200 * NS_PER_BYTE + LATENCY_NS]
    # Along a ring only the second of the two sends to somebody outside.
    assert Wires(network, 4).carry(0, [300] * 4, "ring") == 300 * NS_PER_BYTE + LATENCY_NS


def test_what_crosses_a_direct_uplink_does_not_pass_the_links_of_its_ranks() -> None:
    slow = Link(bits_per_second=1e8, latency_seconds=5 * LATENCY_NS / 1e9)
    nodes = tuple(Uplink(ranks=(2 * node, 2 * node + 1), link=GIGABIT, direct=True) for node in range(2))
    network = Network(link=slow, uplinks=nodes)
    # A third of every rank's bytes stays, on its own link, and two thirds of both ranks' bytes leave.
    assert over_ns(network, (0, [300] * 4)) == [100 * 80 + 5 * LATENCY_NS]
    # Two ranks of different nodes use no link of their own, and find only their nodes' links busy.
    wires = Wires(network, 4)
    assert wires.carry(0, [300] * 4, "direct") == 100 * 80 + 5 * LATENCY_NS
    assert wires.carry(0, [300] * 2, "ring", ranks=(0, 2)) == 700 * NS_PER_BYTE + LATENCY_NS
    # Along a ring the first of a node sends all that it has inside, and the second one outside.
    assert Wires(network, 4).carry(0, [300] * 4, "ring") == 300 * 80 + 5 * LATENCY_NS
    parts = [[0, 10, 500, 0], [10, 0, 0, 0], [0, 0, 0, 10], [0, 0, 10, 0]]
    assert Wires(network, 4).carry(0, [510, 10, 10, 10], "direct", parts) == 10 * 80 + 5 * LATENCY_NS


def test_a_part_of_the_ranks_uses_its_own_links_only() -> None:
    """Not an uplink behind which all of them are, busy as it may be; of others, what crosses between its ranks."""
    network = Network(link=GIGABIT, uplinks=(Uplink(ranks=(0, 1), link=SLOW),))
    wires = Wires(network, 4)
    assert wires.carry(0, [300] * 4, "ring") == 300 * 80 + LATENCY_NS
    for ranks in ((0, 1), (2, 3)):
        assert wires.carry(5_000, [100] * 2, "direct", ranks=ranks) == 5_800 + LATENCY_NS
    # All that rank 1 sends to ranks 2 and 3 leaves, and in a ring only that of the last one behind the uplink.
    fresh = [Wires(network, 4) for _ in range(3)]
    assert fresh[0].carry(0, [50, 300, 50], "direct", ranks=(2, 1, 3)) == 300 * 80 + LATENCY_NS
    assert fresh[1].carry(0, [50, 60, 40], "ring", ranks=(2, 1, 0)) == 40 * 80 + LATENCY_NS
    parts = [[0, 7, 0], [100, 0, 500], [0, 9, 0]]
    assert fresh[2].carry(0, [7, 600, 9], "direct", parts, ranks=(2, 1, 3)) == 600 * 80 + LATENCY_NS
    assert fresh[2].carry(0, [1, 1], "direct", ranks=(2, 3)) == (9 + 1) * NS_PER_BYTE + LATENCY_NS


def test_one_rank_sends_nothing_to_itself() -> None:
    assert Wires(Network(link=GIGABIT), 4).carry(9, [100], "direct", ranks=(2,)) == 9


def test_two_groups_of_the_same_ranks_share_their_links() -> None:
    def program(rank: int, group: VirtualGroup) -> int:
        works = [
            method_of(one, "all_gather_single")(
                torch.empty(200, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
            )
            for one in (group.private(), group.private())
        ]
        for work in works:
            work.wait()
        return group.now_ns

    values = VirtualCluster(2, network=Network(link=GIGABIT)).run(program).values
    assert values == (2 * 100 * NS_PER_BYTE + LATENCY_NS,) * 2


def test_networks_have_names_or_are_links() -> None:
    assert parse_network("office") == NETWORKS["office"]
    assert parse_network("100mbit,2ms") == Network(link=Link.parse("100mbit,2ms"))
    with pytest.raises(UnknownName, match="there are free, datacenter"):
        parse_network("carrier pigeon")


def test_impossible_networks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"names ranks \[7\]; the cluster has ranks 0 to 1"):
        VirtualCluster(2, network=Network(links={7: GIGABIT}))
