"""What a rank learns beside its collectives: of deaths that Gloo tells nobody, of ranks that are late, or have left."""

import ctypes
import logging
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import stretto as st
from stretto.checkpoint import save
from stretto.engine.watcher import last_sign, store_of
from stretto.errors import PeerFailed, PeerSilent, WorkerFailed
from stretto.groups import Link, private_group
from stretto.groups.collectives import Call
from stretto_lab.train.launch import Ranks
from stretto_lab.train.workers import RankInfo, joined_group
from tests.draws import part
from tests.errors.test_failures import SECONDS_TO_NOTICE, default_store
from tests.errors.test_watch import NEVER, detector
from tests.errors.tiny import TinyJob, says
from tests.groups.nccl_like import NcclLikeGroup
from tests.processes import rank_outcomes, run_ranks

LONG = timedelta(seconds=60)


class Forgotten(dist.Work):
    """What has been sent and will never be told to be over, or only after some waits."""

    def __init__(self, waits: float = float("inf")) -> None:
        super().__init__()
        self._left = waits

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Time out as Gloo does."""
        self._left -= 1
        if self._left > 0:
            threading.Event().wait(timeout.total_seconds())
            raise RuntimeError("Operation timed out!")
        return True

    def is_completed(self) -> bool:
        """Only at the end."""
        return self._left <= 0


def forgotten_by_gloo(rank: int) -> str:
    group = private_group()
    failures = detector(group)
    failures.wait(group.barrier(), "barrier")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        failures.wait(Forgotten(), "reduction of bucket 3")
    except PeerFailed as error:
        return str(error)
    return "nothing"


def test_a_death_is_seen_where_gloo_has_forgotten_the_transfer() -> None:
    outcomes = rank_outcomes(3, forgotten_by_gloo)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome.error
        assert "waiting for the reduction of bucket 3: rank 1 died or closed its connection" in outcome.value
        assert outcome.finished - outcomes[1].finished < SECONDS_TO_NOTICE


def others_end_before_rank_0(rank: int) -> bool:
    """Rank 0 waits for so long that it looks several times after the others have closed their connections."""
    group = private_group()
    failures = detector(group, silent_seconds=2.0)
    failures.wait(group.barrier(), "barrier")
    store = default_store()
    if rank:
        failures.end()
        store.set(f"ended/{rank}", str(os.getpid()))
        return True
    store.wait(["ended/1", "ended/2"], LONG)
    pids = [int(store.get(f"ended/{other}")) for other in (1, 2)]
    while any(os.path.exists(f"/proc/{pid}/fd/0") for pid in pids):
        time.sleep(0.01)
    failures.wait(Forgotten(waits=10), "gather of bucket 0")
    failures.end()
    return True


def test_a_rank_that_has_ended_its_job_is_not_taken_for_dead() -> None:
    assert run_ranks(3, others_end_before_rank_0) == [True, True, True]


class Waker(logging.Handler):
    """Lets a stopped process go on as soon as somebody says that it is late."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.said: list[str] = []
        self._pid = pid

    def emit(self, record: logging.LogRecord) -> None:
        """Note it."""
        self.said.append(record.getMessage())
        if "no sign of life" in self.said[-1]:
            os.kill(self._pid, signal.SIGCONT)


def last_rank_is_stopped_for_a_while(rank: int) -> tuple[int, list[str]]:
    store, last = default_store(), rank == 1
    store.set(f"process/{rank}", str(os.getpid()))
    job = TinyJob("zero1", options=st.Options(silent_seconds=12.0))
    waker = Waker(int(store.get("process/1")))
    if not last:
        logging.getLogger("stretto").addHandler(waker)
    job.until_update()
    if last:
        os.kill(os.getpid(), signal.SIGSTOP)
    for _ in range(4):
        job.until_update()
    if last:
        store.wait(["back"], LONG)
    while not last and "is back" not in waker.said[-1]:
        time.sleep(0.01)
    store.set("back", "")
    job.parallel.finish()
    return job.parallel.steps, waker.said


def test_a_process_that_is_stopped_for_a_while_is_told_as_late_and_goes_on() -> None:
    (steps, said), (others, _) = run_ranks(2, last_rank_is_stopped_for_a_while)
    assert steps == others == 5
    late, back = (text for text in said if "rank 1" in text)  # that ranks read the same batches is said too
    assert late.startswith("rank 0: no sign of life from rank 1 for ")
    assert back == "rank 0: rank 1 is back"


def last_rank_keeps_pythons_lock(rank: int) -> int:
    job = TinyJob("zero1", options=st.Options(silent_seconds=2.0))
    job.until_update()
    if rank == 1:
        ctypes.PyDLL(None).usleep(4_000_000)  # twice as long; no thread of Python runs meanwhile
    job.until_update()
    job.parallel.finish()
    return job.parallel.steps


def test_a_rank_in_one_call_that_keeps_pythons_lock_is_waited_for() -> None:
    assert run_ranks(2, last_rank_keeps_pythons_lock) == [2, 2]


LOOKS = 2
"""Of a rank's watcher, after the one that has aborted its group."""


def host_blocked_by_a_device(rank: int, folder: Path | None) -> str:
    """Rank 0 waits for a collective where nothing can look around, as for a kernel on a device."""
    store = default_store()
    store.set(f"process/{rank}", str(os.getpid()))
    options = st.Options(silent_seconds=4.0)
    job = TinyJob("zero1", micro_batches=1, group=NcclLikeGroup(), options=options)
    job.micro_batch()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return "went on"
    group = job.parallel.job.exchange.group
    while not group.is_aborted:
        time.sleep(0.01)
    signs = store_of(group)
    last = int(last_sign(signs, 0)) + LOOKS
    while int(last_sign(signs, 0)) < last:
        time.sleep(0.01)
    try:
        if folder is not None:
            save(job.parallel, folder)
        job.micro_batch()
    except PeerSilent as error:
        return str(error)
    finally:
        os.kill(int(store.get("process/1")), signal.SIGCONT)
    return "nothing"


@pytest.mark.parametrize("saves", part([False, True]))
def test_a_host_that_waits_for_its_device_is_released_where_only_an_abort_ends_a_collective(
    saves: bool, tmp_path: Path
) -> None:
    told, _ = run_ranks(2, host_blocked_by_a_device, tmp_path if saves else None)
    assert (
        "no sign of life for 4 s from ranks [1]; look at what these ranks do, or raise Options(silent_seconds=...)"
        in told
    )


class BlockedAtTheStart(NcclLikeGroup):
    """The last rank stops before its second collective; the other begins its own when its device lets it."""

    def perform(self, call: Call) -> dist.Work:
        """Count; see the class."""
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 2 and self.rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        while self.calls == 2 and self.rank() == 0 and not self.is_aborted:
            time.sleep(0.01)
        return super().perform(call)

    def private(self) -> "BlockedAtTheStart":
        """Return another one."""
        return BlockedAtTheStart()


def blocked_at_the_start(rank: int) -> str:
    store = default_store()
    store.set(f"process/{rank}", str(os.getpid()))
    try:
        TinyJob("zero1", group=BlockedAtTheStart(), options=st.Options(silent_seconds=4.0))
    except PeerSilent as error:
        return str(error)
    finally:
        if rank == 0:
            os.kill(int(store.get("process/1")), signal.SIGCONT)
    return "nothing"


def test_so_is_one_that_makes_a_job() -> None:
    told, _ = run_ranks(2, blocked_at_the_start)
    assert "no sign of life for 4 s from ranks [1]" in told


def killed_beside_a_group_that_hears_nothing(info: RankInfo) -> None:
    with joined_group(info, Link.parse("none"), torch.device("cpu"), NEVER):
        options = st.Options(silent_seconds=NEVER)
        job = TinyJob("zero1", micro_batches=1, group=NcclLikeGroup(), options=options)
        for index in range(10):
            if info.rank == 1 and index == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                job.micro_batch()
            except PeerFailed as error:
                raise ValueError(f"told: {error}") from error  # a consequence would not be shown


def test_the_supervisor_of_local_workers_tells_the_others_of_a_death_at_once() -> None:
    with pytest.raises(WorkerFailed) as caught:
        Ranks.local(2).call(killed_beside_a_group_that_hears_nothing)
    assert says(caught.value, "rank 1 of 2 local workers failed: the process was killed by SIGKILL")
    assert says(
        caught.value,
        "told: rank 0, after step 3, waiting for the ",
        ": rank 1: the process was killed by SIGKILL",
    )
