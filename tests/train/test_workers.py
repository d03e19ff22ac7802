"""Local workers: results in order, whoever fails is named, nobody stays behind."""

import os
import signal
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from stretto.errors import CommunicationError, ConfigError, WorkerFailed
from stretto.groups import Link, deaths
from stretto_lab.train.launch import Ranks
from stretto_lab.train.workers import RankInfo, host_store, joined_group, run_workers, store_of
from tests.processes import Command
from tests.train.test_processes import tell_and_wait


def infos(count: int, port: int = 0) -> list[RankInfo]:
    return [
        RankInfo(
            rank=rank, world_size=count, local_rank=rank, local_world_size=count, host="127.0.0.1", port=port
        )
        for rank in range(count)
    ]


def square(info: RankInfo, offset: int) -> int:
    return info.rank**2 + offset


def fail_on_rank_1(info: RankInfo, how: str) -> None:
    """Let rank 1 fail, and rank 0 notice it as a neighbour would, or not at all."""
    if info.rank == 0:
        if how == "unnoticed":
            threading.Event().wait()
        raise CommunicationError("rank 0 heard of it")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "gone":
        os._exit(3)
    if how == "refused":
        raise ConfigError("rank 1 found a bad setting")
    raise ZeroDivisionError("rank 1 divided")


def test_results_come_in_the_order_of_ranks() -> None:
    assert run_workers(square, infos(3), 10) == [10, 11, 14]


@pytest.mark.parametrize(
    ("how", "cause", "traced"),
    [
        ("killed", "the process was killed by SIGKILL", False),
        ("gone", "exit code 3 and without a result", False),
        ("refused", "ConfigError: rank 1 found a bad setting", False),
        ("raised", "ZeroDivisionError: rank 1 divided", True),
    ],
)
def test_the_rank_that_failed_is_named_in_a_line_and_not_those_who_heard_of_it(
    how: str, cause: str, traced: bool
) -> None:
    """What no error of the library tells has its traceback too."""
    with pytest.raises(WorkerFailed) as caught:
        run_workers(fail_on_rank_1, infos(2), how)
    message = str(caught.value)
    assert message.startswith("rank 1 of 2 local workers failed: ")
    assert cause in message
    assert "rank 0" not in message
    assert ("fail_on_rank_1" in message) == (len(message.splitlines()) > 1) == traced


def test_the_others_have_been_told_of_a_dead_rank_when_the_launcher_goes_on() -> None:
    """Its store may end with it: who still asks that store prints stacks of C++."""
    store = host_store("127.0.0.1", 0)
    before = set(threading.enumerate())
    with pytest.raises(WorkerFailed):
        run_workers(fail_on_rank_1, infos(2, store.port), "killed")
    assert set(threading.enumerate()) <= before
    assert deaths(store_of(infos(2, store.port)[0], timedelta(seconds=60))) == {
        1: "the process was killed by SIGKILL"
    }


def test_a_rank_of_a_launcher_is_counted_among_all_ranks() -> None:
    with pytest.raises(WorkerFailed, match=r"^rank 1 of 3 failed: ConfigError: rank 1 found"):
        run_workers(fail_on_rank_1, infos(3)[1:2], "refused")


def test_a_rank_that_notices_nothing_is_ended_after_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto_lab.train.workers.GRACE_SECONDS", 0.1)
    with pytest.raises(WorkerFailed, match="rank 1 of 2"):
        run_workers(fail_on_rank_1, infos(2), "unnoticed")


def listens_at(info: RankInfo) -> list[str]:
    """Return the addresses at which this rank listens, as /proc writes them, while it is joined with the others."""
    with joined_group(info, Link.parse("none"), torch.device("cpu"), 60.0):
        links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
        fields = [line.split() for table in tables for line in table]
        found = [f[1].partition(":")[0] for f in fields if f[3] == "0A" and f"socket:[{f[9]}]" in links]
        dist.barrier()
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="sockets are looked up in /proc")
def test_local_ranks_and_their_store_listen_at_the_loopback_address_alone() -> None:
    ranks = Ranks.local(2)
    store = ranks._store.port
    with pytest.raises(ConnectionRefusedError):  # which a store that listens at all addresses would accept
        socket.create_connection(("127.0.0.2", store), timeout=5)
    socket.create_connection(("127.0.0.1", store), timeout=5).close()
    for addresses in ranks.call(listens_at):
        assert addresses
        assert set(addresses) == {"0100007F"}


def launch_two() -> None:
    run_workers(tell_and_wait, infos(2), 1)


def test_no_worker_outlives_its_launcher() -> None:
    with Command(function=launch_two) as launcher:
        started = {launcher.stdout.readline(), launcher.stdout.readline()}
        launcher.kill()
        # The workers write to the same pipe, so it ends when the last of them has.
        rest, _ = launcher.communicate()
    assert (started, rest) == ({"1 runs\n"}, "")


def test_a_slow_link_on_a_device_is_refused_before_anybody_is_joined() -> None:
    info = RankInfo(rank=0, world_size=2, local_rank=0, local_world_size=2, host="nowhere", port=1)
    with (
        pytest.raises(ConfigError, match=r"--link slows Gloo, but this job is on cuda:0, over NCCL"),
        joined_group(info, Link.parse("100mbit"), torch.device("cuda", 0), 60.0),
    ):
        pass
