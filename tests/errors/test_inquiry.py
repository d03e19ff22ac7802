"""Whom a wait names when connections close one after another: who has died, and not who has ended because of it."""

import os
import socket
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from stretto.engine.stall_diagnosis import StallDiagnosis
from stretto.engine.watcher import Watcher
from stretto.errors import PeerFailed
from stretto.groups.connections import Connection

NEVER = 600.0


class Ends:
    """This rank's connections to two others on its machine, and what the three give into their store."""

    def __init__(self) -> None:
        store = dist.PrefixStore("stretto", dist.HashStore())
        self.sockets = [socket.socket() for _ in range(2)]
        connections = [
            Connection(
                one.fileno(), os.fstat(one.fileno()).st_ino, f"to-{rank}", own="127.0.0.1", other="127.0.0.1"
            )
            for rank, one in enumerate(self.sockets)
        ]
        self.watchers = [Watcher(store, range(3), rank, False, "127.0.0.1", NEVER, ()) for rank in range(3)]
        self.stall_diagnosis = StallDiagnosis(
            self.watchers[2],
            connections,
            where=lambda: "rank 2, after step 7",
            what="reduction of bucket 0",
            ranks=range(3),
            timeout_seconds=NEVER,
        )

    def die(self, rank: int) -> None:
        """Have nothing left of a rank."""
        self.sockets[rank].close()
        self.watchers[rank].end(leaves=False)

    def error(self) -> PeerFailed:
        """Look until the wait ends."""
        for _ in range(4):
            try:
                self.stall_diagnosis.look()
            except PeerFailed as error:
                return error
        raise AssertionError("nobody is named")


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    for watcher in ends.watchers:
        watcher.end()


def test_a_connection_that_closes_later_is_not_named(ends: Ends) -> None:
    ends.die(0)
    ends.stall_diagnosis.look()
    ends.die(1)
    error = ends.error()
    assert error.ranks == (0,)
    assert "rank 0 died" in str(error)


def test_where_two_close_at_once_the_word_of_the_one_that_has_ended_is_waited_for(ends: Ends) -> None:
    ends.watchers[1].say("finding", "PeerFailed rank 0 died or closed its connection", NEVER)
    for rank in range(2):
        ends.die(rank)
    text = str(ends.error())
    assert "rank 0 died" in text
    assert "rank 1" not in text


def test_two_that_close_at_once_without_a_word_are_both_named(ends: Ends) -> None:
    for rank in range(2):
        ends.die(rank)
    assert ends.error().ranks == (0, 1)
