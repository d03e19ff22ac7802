"""What a watch makes of one collective, where real ranks would need luck to show it."""

import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from stretto.engine.failures import FailureDetector
from stretto.engine.round import Progress
from stretto.errors import NonFinite, ParametersTouched, PeerFailed, RanksDisagree, UnusedParameters
from tests.errors.tiny import says

NEVER = 600.0


class OnlyAStore(dist.ProcessGroup):
    """A rank of a group whose ranks share nothing but a store."""

    may_wait_again = True

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self._shared = store

    def get_group_store(self) -> dist.Store:
        """The store."""
        return self._shared


class LastMoment(dist.Work):
    """Complete right after the first wait has given up."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Time out once."""
        self.num_waits += 1
        if self.num_waits == 1:
            raise RuntimeError("Operation timed out!")
        return True

    def is_completed(self) -> bool:
        """Always, once asked."""
        return True


class Over(dist.Work):
    """Complete from the start."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return."""
        return True


class Broken(dist.Work):
    """A collective whose connection has closed."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Raise as Gloo does."""
        raise RuntimeError(
            "[/somewhere/pair.cc:553] Connection closed by peer [10.0.0.2]:1234. This is typical"
        )

    def is_completed(self) -> bool:
        """With an error."""
        return True


def detector(group: dist.ProcessGroup, silent_seconds: float = NEVER) -> FailureDetector:
    """The failure detector of one rank."""
    return FailureDetector(
        group,
        torch.device("cpu"),
        timeout_seconds=NEVER,
        silent_seconds=silent_seconds,
        progress=Progress(),
    )


def beside(rank: int, world_size: int, store: dist.Store | None = None) -> FailureDetector:
    """That of a rank that can only reach a store."""
    return detector(OnlyAStore(store or dist.HashStore(), rank, world_size))


def test_work_that_completes_when_the_wait_gives_up_is_no_failure() -> None:
    work = LastMoment()
    beside(0, 2).wait(work, "round report")
    assert work.num_waits == 2


def test_only_what_others_cannot_know_is_told() -> None:
    store = dist.HashStore()
    watches = [beside(rank, 2, store) for rank in range(2)]
    for kind in (NonFinite, RanksDisagree, UnusedParameters, PeerFailed):
        assert not beside(1, 2).tell(kind("known to all"))
        assert beside(1, 2).tell(kind("of the user's own code"), is_users=True)
    watches[0].wait(LastMoment(), "round report")
    assert watches[1].tell(ParametersTouched("'weight' was written"))
    with pytest.raises(PeerFailed) as caught:
        watches[0].wait(Broken(), "round report")
    assert says(
        caught.value, "rank 0, after step 0, waiting for the round report: rank 1, ", "'weight' was written"
    )


def test_all_who_do_not_answer_are_suspects() -> None:
    with pytest.raises(PeerFailed) as caught:
        beside(1, 3).wait(Broken(), "round report")
    assert says(
        caught.value, "rank 1, ", "one of ranks [0, 2], which do not answer", "(Connection closed by peer"
    )


def test_a_collective_that_has_completed_is_kept_until_several_more_have() -> None:
    # Otherwise a thread of Gloo can be the last to let go, and a program that ends right then aborts.
    watch = beside(0, 2)
    works = [Over() for _ in range(20)]
    kept = [weakref.ref(work) for work in works]
    for _ in kept:
        watch.wait(works.pop(0), "reduction of bucket 0")

    assert [work() is not None for work in kept] == [False] * 12 + [True] * 8
