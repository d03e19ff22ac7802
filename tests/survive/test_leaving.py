"""Leaving a group: nobody outside changes a byte of it any more, and nothing of it stays in the process."""

import ctypes
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import stretto as st
from stretto.errors import CommunicationError, PeerFailed
from stretto.groups import MEET_SECONDS, LeavableGroup, announce_death, deaths, leavable
from stretto.groups.collectives import method_of
from stretto.groups.meeting import Meeting
from stretto.survive import Term, survives
from stretto_lab.train.workers import host_store
from tests.draws import part
from tests.errors.test_failures import default_store
from tests.processes import run_ranks
from tests.survive.lived import network

LONG = timedelta(seconds=60)
SOON = timedelta(seconds=0.5)
COLLECTIVES = ("all_gather_single", "all_to_all_single", "allreduce")
TERMS = 100
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
MOST_BYTES = 5 << 20
"""More after a hundred terms than after the first."""


def begun(group: LeavableGroup, name: str, whole: Tensor, own: Tensor) -> dist.Work:
    """Begin a collective that brings what ranks hold in `own` into `whole`, twice as long."""
    method = method_of(group, name)
    if name == "allreduce":
        return method([whole.copy_(own.repeat(2))])
    return method(whole, own.repeat(2), [], []) if name == "all_to_all_single" else method(whole, own)


def wakes(rank: int, seed: int) -> set[float]:
    """Rank 1 is stopped, left, and wakes with other values; return what rank 0's memory holds then."""
    store = default_store()
    store.set(f"process/{rank}", str(os.getpid()))
    store.wait([f"process/{1 - rank}"], LONG)
    group = LeavableGroup(dist.PrefixStore("first", store), [0, 1], rank)
    rng = random.Random(seed)
    numel, name = rng.choice([1, 1000, 100_000, 3_000_000]), COLLECTIVES[seed % len(COLLECTIVES)]
    own, whole = torch.full((numel,), float(rank)), torch.zeros(2 * numel)
    begun(group, name, whole, own).wait(LONG)
    if rank == 1:
        store.set("stops", "")
        os.kill(os.getpid(), signal.SIGSTOP)
        own.fill_(666.0)
        begun(group, name, whole, own)
        while group.is_whole:  # the collective itself may never end: see Note [Closed without an error]
            time.sleep(0.01)
        group.leave()
        store.set("woken", "")
        return set()
    store.wait(["stops"], LONG)
    other = int(store.get("process/1"))
    while Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    with pytest.raises(RuntimeError):
        begun(group, name, whole, own).wait(SOON)
    group.leave()
    whole.fill_(5.0)
    os.kill(other, signal.SIGCONT)
    store.wait(["woken"], LONG)
    with pytest.raises(CommunicationError, match="this process has left the group"):
        begun(group, name, torch.zeros(2 * numel), own)
    return set(whole.tolist())


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("seed", range(6))
def test_a_process_that_was_left_and_wakes_changes_nothing_and_hears_of_it(seed: int) -> None:
    assert run_ranks(2, wakes, seed)[0] == {5.0}


class Struck(Meeting):
    """A rank whose process ends when all have come, before it connects."""

    def connect(self, make: Callable[[], Any]) -> Any:
        raise SystemExit


def ends_amid(rank: int, comes: bool) -> tuple[str, float, float]:
    """Rank 1 ends while a group is made, and somebody says so; return what others hear, and after what seconds."""
    store = default_store()
    seats = [4, 7, 9]
    if rank == 1:
        if comes:
            leavable.Meeting = Struck
            with suppress(SystemExit):
                LeavableGroup(dist.PrefixStore("ends", store), seats, rank)
        announce_death(store, seats[rank], "exit code -9")
        store.wait(["heard"], LONG)
        return "", 0.0, 0.0
    began, answered = time.monotonic(), 0.0
    with pytest.raises(PeerFailed) as caught:
        LeavableGroup(dist.PrefixStore("ends", store.clone()), seats, rank)
    heard = time.monotonic()
    deaths(store)
    answered = time.monotonic() - heard
    if store.add("have heard", 1) == 2:
        store.set("heard", "")
    return str(caught.value), heard - began, answered


def test_who_leaves_a_group_has_left_all_that_were_made_of_it() -> None:
    store = host_store("127.0.0.1", 0)
    first = LeavableGroup(dist.PrefixStore("first", store), [0], 0)
    of_torch = first.of_torch(dist.PrefixStore("torch", store), 0, 1, LONG)
    others = [first, of_torch, first.private(), first.private().part([0])]
    first.leave()
    for group in others:
        with pytest.raises(CommunicationError, match="this process has left the group"):
            begun(group, "all_gather_single", torch.zeros(1), torch.ones(1))


@pytest.mark.parametrize("comes", part([False, True]))
def test_a_member_that_ends_while_a_group_is_made_is_not_waited_for_once_somebody_says_so(
    comes: bool,
) -> None:
    first, _, last = run_ranks(3, ends_amid, comes)
    for said, seconds, answered in (first, last):
        assert "rank 1 died (exit code -9)" in said
        assert seconds < MEET_SECONDS / 2
        assert answered < MEET_SECONDS / 5  # nobody holds the connection by which members agree


class Quick(threading.Thread):
    """A thread that has come far before whoever starts it goes on."""

    def start(self) -> None:
        super().start()
        time.sleep(0.2)


def who_drops(rank: int) -> list[str]:
    """Return which thread drops the last reference to a group, whose destructor waits for what is under way."""
    group = LeavableGroup(dist.PrefixStore("dropped", default_store()), [0, 1], rank)
    names: list[str] = []
    weakref.finalize(group.inner, lambda: names.append(threading.current_thread().name))
    threading.Thread = Quick
    group.leave()
    return names


def test_who_leaves_a_group_waits_for_nothing_that_is_under_way() -> None:
    assert run_ranks(2, who_drops) == [["stretto-leave"]] * 2


def held() -> tuple[int, int, int]:
    """Descriptors and threads of this process, and bytes of its memory without what its heaps have free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
    return files, threads, pages * os.sysconf("SC_PAGESIZE")


def many_terms(rank: int) -> list[tuple[int, int, int]]:
    """In every term but the last, rank 0 cuts the job's connections."""
    # As MALLOC_MMAP_THRESHOLD_ and MALLOC_ARENA_MAX do. glibc raises the threshold with what is freed, and keeps ever
    # larger blocks in its heap; and it gives threads heaps of their own, each with holes of its own: 5 MB in 60 terms.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 << 10)
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    found: list[tuple[int, int, int]] = []

    def train(term: Term) -> None:
        model = network()
        parallel = st.DataParallel(
            model, torch.optim.SGD(model.parameters(), lr=0.01), st.ACCO(), micro_batches=2, group=term.group
        )
        term.go_on(parallel)
        until = parallel.steps + 2
        for _ in range(1000):
            if parallel.backward(model(torch.ones(4, 5)).square().mean()):
                term.keep(parallel)
                if parallel.steps == until:
                    break
        found.append(held())
        if term.number < TERMS:
            if rank == 0:
                term.group.of_jobs[0].abort()
            for _ in range(100):
                parallel.backward(model(torch.ones(4, 5)).square().mean())
        parallel.finish()

    survives(train, store=default_store(), rank=rank, ranks=2, every=1)
    return found


@pytest.mark.long
def test_a_hundred_terms_in_one_process_leave_neither_threads_nor_descriptors_nor_memory() -> None:
    for found in run_ranks(2, many_terms):
        assert len(found) == TERMS + 1
        files, threads, _ = (max(one[i] for one in found[1:6]) for i in range(3))
        assert found[-1][0] <= files, found
        assert found[-1][1] <= threads, found
        assert found[-1][2] <= found[1][2] + MOST_BYTES, found


@pytest.mark.long
def test_processes_that_have_done_their_work_end_well() -> None:
    """Python would abort one that ends while the last group is being dropped."""
    store = host_store("127.0.0.1", 0)
    script = [
        "examples/cluster/survive.py",
        "--store",
        f"127.0.0.1:{store.port}",
        "--updates",
        "20",
        "--every",
        "5",
    ]
    ranks = [
        subprocess.Popen(
            [sys.executable, *script],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "3"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    errors = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], errors
