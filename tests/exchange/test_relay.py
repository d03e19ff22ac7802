"""Bytes that ranks hand on arrive whole, whoever gives them to whom, and however many each has."""

import random

import pytest

from stretto.exchange import relay as module
from stretto.exchange.relay import relay
from stretto_lab.virtual import VirtualCluster, VirtualGroup
from tests.draws import seeds

PART_BYTES = 8


@pytest.mark.parametrize("seed", seeds(40))
def test_every_rank_gets_just_what_others_have_given_to_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several may give to one, and some to nobody else's; lengths from nothing to many parts."""
    monkeypatch.setattr(module, "LARGEST_BROADCAST", PART_BYTES)
    rng = random.Random(seed)
    ranks = rng.randint(2, 6)
    contents = [rng.randbytes(rng.choice([0, 1, 7, 8, 9, 100, 1000])) for _ in range(ranks)]
    to = [rng.choice([other for other in range(ranks) if other != rank]) for rank in range(ranks)]

    def program(rank: int, group: VirtualGroup) -> dict[int, bytes]:
        works, arriving = relay(group, contents[rank], [*map(len, contents)], to)
        for work, _ in works:
            work.wait()
        return {source: bytes(found) for source, found in arriving.items()}

    for rank, arrived in enumerate(VirtualCluster(ranks).run(program).values):
        assert arrived == {source: contents[source] for source in range(ranks) if to[source] == rank}
