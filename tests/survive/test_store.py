"""The host of the store dies or is stopped: work goes on, and a loss after that ends the job in one line."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

import stretto as st
from tests.draws import part
from tests.processes import Command, Outcome, rank_outcomes
from tests.survive.lived import Lived, live

CALM = Lived(strategy=st.ZeRO1(), updates=24)


@contextmanager
def met() -> Iterator[tuple[int, int]]:
    """Host a store as a user does; yield its process and its port."""
    with Command("-m", "stretto", "meet", "--port", "0") as command:
        said = next(line for line in command.stdout if line.startswith("meeting at "))
        yield command.pid, int(said.split()[2].rstrip(",").rpartition(":")[2])


def lives_without_its_store(ends_by: signal.Signals, lived: Lived) -> list[Outcome]:
    """What became of every rank of a job whose store ends after update 6."""
    with met() as (pid, port):
        return rank_outcomes(
            lived.ranks, live, replace(lived, host=(pid, ends_by, 6)), port, None, backend=None
        )


@pytest.mark.parametrize("ends_by", part([signal.SIGKILL, signal.SIGSTOP]))
def test_without_its_store_a_job_does_its_work(ends_by: signal.Signals) -> None:
    outcomes = lives_without_its_store(ends_by, CALM)
    assert [one.error for one in outcomes] == [None] * 3
    assert len({one.value[0] for one in outcomes}) == 1
    assert [len(one.value[1][0].counted) for one in outcomes] == [24] * 3


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(
    ("ends_by", "line"),
    [
        (signal.SIGKILL, "PeerFailed: the store of the members is gone"),
        (signal.SIGSTOP, "PeerSilent: the store of the members has not answered for 9 s"),
    ],
)
def test_without_its_store_a_loss_ends_the_job_in_one_line(ends_by: signal.Signals, line: str) -> None:
    outcomes = lives_without_its_store(ends_by, replace(CALM, killed=((1, 150),)))
    assert "exit code -9" in outcomes[1].error
    for survivor in (outcomes[0], outcomes[2]):
        said = survivor.error.splitlines()[-1]
        assert line in said
        assert "start the job again from its last checkpoint" in said
