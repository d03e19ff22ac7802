"""A job that is killed at any write of a save leaves a whole checkpoint, from which the next process resumes."""

import os
import random
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from stretto import ZeRO1, checkpoint
from stretto_lab.testing import differing
from stretto_lab.virtual import VirtualCluster, VirtualGroup
from tests.checkpoint.jobs import UPDATES, Case, Job
from tests.draws import draws, part

RANKS = 2
KILLS = 300
WRITES = {"open", "write", "flush", "fsync", "close", "mkdir", "rename", "unlink", "rmdir", "mmap"}
MOST_WRITES = 90
"""About as many as a save of both ranks has, with the removal of an old checkpoint."""


def job_of(rank: int, group: VirtualGroup, folder: Path) -> Job:
    """Return a job that has resumed from the newest checkpoint, if there is one."""
    job = Job(Case(strategy=ZeRO1()), rank, group)
    if checkpoint.latest(folder) is not None:
        job.load(folder)
    return job


def killed(folder: Path, draw: random.Random) -> bool:
    """Train one update more in a process of its own, and kill it at one of the writes of the save that follows.

    Return whether it was.
    """
    left, in_background = draw.randrange(MOST_WRITES), draw.random() < 0.5

    def count(_: FrameType, event: str, called: Any) -> None:
        nonlocal left
        if event == "c_call" and called.__name__ in WRITES:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def program(rank: int, group: VirtualGroup) -> None:
        job = job_of(rank, group, folder)
        job.train(job.parallel.steps + 1)
        threading.setprofile(count)
        sys.setprofile(count)
        job.save(folder, keep=1, async_save=in_background)
        checkpoint.wait(job.parallel)
        sys.setprofile(None)

    child = os.fork()
    if not child:
        VirtualCluster(RANKS).run(program)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or not status
    return os.WIFSIGNALED(status)


def found_in(path: Path) -> dict[str, Any]:
    """Return all of a checkpoint that any program can read, with its step; every digest is compared."""
    read = checkpoint.read(path)
    return {"step": torch.tensor(read["job"]["step"]), **read["model"], **read["optimizer"]}


def test_whichever_write_of_a_save_is_the_last_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    def undisturbed(rank: int, group: VirtualGroup) -> None:
        job = Job(Case(strategy=ZeRO1()), rank, group)
        for step in range(1, UPDATES + 1):
            job.train(step).save(tmp_path / "whole", keep=UPDATES)

    VirtualCluster(RANKS).run(undisturbed)
    expected = [{}, *map(found_in, reversed(checkpoint.newest_first(tmp_path / "whole")))]
    folder, before, steps, kills = tmp_path / "0", 0, set(), 0
    for seed in part(draws(KILLS)):
        kills += killed(folder, random.Random(seed))
        path = checkpoint.latest(folder)
        step = 0 if path is None else checkpoint.step_of(path)
        assert before <= step <= before + 1, (seed, before, step)
        assert differing({} if path is None else found_in(path), expected[step]) == [], seed
        steps.add(step - before)
        before = step
        if before == UPDATES:
            folder, before = tmp_path / str(seed), 0
    assert steps == {0, 1}
    assert kills > len(part(draws(KILLS))) / 2
