"""The totals over ranks are what must cross the network whatever the algorithm's details."""

import pytest

from stretto.groups import collectives as traffic


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("root", [0, 1])
def test_a_broadcast_sends_one_copy_to_every_other_rank(world_size: int, root: int) -> None:
    sent = [traffic.broadcast(100, rank, root % world_size, world_size) for rank in range(world_size)]
    assert sum(sent) == 100 * (world_size - 1)


def test_a_tree_root_sends_once_per_round() -> None:
    assert [traffic.broadcast(1, rank, 0, 8) for rank in range(8)] == [3, 2, 1, 1, 0, 0, 0, 0]
    assert [traffic.broadcast(1, rank, 2, 4) for rank in range(4)] == [0, 0, 2, 1]


def test_a_scatter_sends_what_a_gather_collects() -> None:
    collected = sum(traffic.gather(10, rank, root=1) for rank in range(4))
    assert collected == sum(traffic.scatter(10, rank, root=1, world_size=4) for rank in range(4)) == 30


def test_a_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    assert traffic.all_reduce(1200, 4) == 1800
    assert traffic.all_gather(300, 4) == 900
    assert sum(traffic.reduce(1200, rank, 0, 4) for rank in range(4)) == 4 * 900 + 3 * 300


def test_nothing_is_sent_to_oneself() -> None:
    assert traffic.all_to_all([5, 7, 11], rank=1) == 16
    assert traffic.all_reduce(1200, 1) == traffic.all_gather(1200, 1) == traffic.reduce(1200, 0, 0, 1) == 0
