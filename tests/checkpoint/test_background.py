"""A checkpoint written beside training is that of the moment at which it was asked for, or is told to have failed."""

import resource
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from stretto import ACCO, DDP, Options, WeightPrediction, checkpoint
from stretto.checkpoint.background import BackgroundSave, Step
from stretto.checkpoint.ranks import Ranks
from stretto.errors import CheckpointError, StrettoError
from stretto_lab.testing import differing
from stretto_lab.virtual import VirtualCluster, VirtualGroup
from tests.checkpoint.jobs import SAVED_AT, UPDATES, Case, Job
from tests.processes import run_ranks

STRATEGIES = {
    "ddp": Case(strategy=DDP()),
    "wp": Case(strategy=WeightPrediction()),
    "acco, int8 wire": Case(
        strategy=ACCO(), options=Options(bucket_bytes=4096, wire="int8", allow_unused=True)
    ),
}


def content(path: Path) -> dict[str, bytes]:
    """Every file of a checkpoint."""
    return {file.name: file.read_bytes() for file in path.iterdir()}


def saved_both_ways(job: Job, folder: Path) -> dict[str, Any]:
    """Save in both ways at one update, train on, and return what became of it."""
    job.train(SAVED_AT)
    whole = job.save(folder / "whole")
    beside = job.save(folder / "beside", async_save=True)
    was_there = beside.exists()
    job.train()
    appeared, is_saving = beside.exists(), checkpoint.check(job.parallel)
    checkpoint.wait(job.parallel)
    return {
        "holds": job.holds(),
        "paths": (whole, beside),
        "was_there": was_there,
        # It can be there while it is still being saved: ranks learn of the last step at their next update.
        "is_there_once_saved": appeared or is_saving,
        "appeared": appeared,
    }


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_files_are_those_of_a_synchronous_save_and_the_job_is_what_it_would_have_been(
    name: str, tmp_path: Path
) -> None:
    def program(rank: int, group: VirtualGroup) -> list[Any]:
        straight = Job(STRATEGIES[name], rank, group).train()
        return [straight.holds(), saved_both_ways(Job(STRATEGIES[name], rank, group), tmp_path)]

    for straight, found in VirtualCluster(2).run(program).values:
        assert differing(straight, found["holds"]) == []
        assert (found["was_there"], found["appeared"]) == (False, True)  # in virtual time writing takes none
        whole, beside = found["paths"]
        assert content(whole) == content(beside)


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_update_beside_which_files_are_written_sends_what_any_other_does(name: str) -> None:
    """Here writing takes ten micro-batches. Two gathers are all that a save brings: what came of it, on each step."""

    def program(rank: int, group: VirtualGroup, *, saves: bool) -> list[int]:
        job = Job(STRATEGIES[name], rank, group).train(SAVED_AT)
        if saves:
            nanoseconds = 10 * VirtualCluster(2).compute.micro_batch_ns
            step: Step = ("writing", lambda _: group.charge_ns(nanoseconds))
            job.parallel.job.model.listeners.append(
                BackgroundSave(job.parallel, Ranks(job.parallel), [step, step], lambda: None)
            )
        sent = [job.parallel.sent_bytes]
        for update in range(SAVED_AT + 1, SAVED_AT + 24):
            job.train(update)
            sent.append(job.parallel.sent_bytes)
        assert not (saves and checkpoint.check(job.parallel))
        return [after - before for before, after in pairwise(sent)]

    (without, _), (saved, _) = (
        VirtualCluster(2).run(partial(program, saves=saves)).values for saves in (False, True)
    )
    more = [one - other for one, other in zip(saved, without, strict=True)]
    assert len([bytes_more for bytes_more in more if bytes_more]) == 2, more
    assert not any(more[:2]), more


def test_what_training_has_changed_since_is_not_in_the_files(tmp_path: Path) -> None:
    job = Job(Case()).train(SAVED_AT)
    job.save(tmp_path, async_save=True)
    job.train()
    checkpoint.wait(job.parallel)
    continued = Job(Case())
    assert continued.load(tmp_path).step == SAVED_AT
    straight = job.holds()
    assert differing({**continued.train().holds(), "losses": straight["losses"]}, straight) == []


def on_a_rank(rank: int, directory: str) -> dict[str, Any]:
    """Save in both ways, where rank 1 may not write and where all may; return what was told, and when."""
    folder = Path(directory)
    found = saved_both_ways(Job(Case(), rank), folder)
    job = Job(Case(), rank).train(SAVED_AT)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    told = []
    for in_background in (False, True):
        try:
            job.save(folder / "full", async_save=in_background)
            checkpoint.wait(job.parallel)
        except StrettoError as error:
            told.append(f"{type(error).__name__}: {error}")
    job.save(folder / "full", async_save=True)
    try:
        while checkpoint.check(job.parallel) and job.parallel.steps < 1000:
            job.train(job.parallel.steps + 1)
    except CheckpointError:
        told.append(str(job.parallel.steps))
    left = sorted(path.name for path in (folder / "full").iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    job.save(folder / "room", async_save=True)
    job.save(folder / "room", async_save=True)  # waits for the first
    job.parallel.finish()  # waits for the second
    last = job.save(folder / "room", async_save=True)  # there is nothing to write beside
    return {
        **found,
        "told": told,
        "left": left,
        "kept": [path.name[:6] for path in checkpoint.complete(folder / "room")],
        "last": last.exists(),
    }


@cache
def on_two_ranks() -> list[dict[str, Any]]:
    with TemporaryDirectory() as directory:
        found = run_ranks(2, on_a_rank, directory)
        for one in found:
            one["content"] = [content(path) for path in one["paths"]]
        return found


def test_real_ranks_write_the_same_files_beside_training() -> None:
    for found in on_two_ranks():
        assert found["content"][0] == found["content"][1]
        assert found["is_there_once_saved"]


def test_a_full_disk_is_told_on_all_ranks_at_one_update_in_the_words_of_a_synchronous_save() -> None:
    first, second = on_two_ranks()
    assert first["told"] == second["told"]
    synchronous, in_background, _ = first["told"]
    assert synchronous == in_background
    assert f"CheckpointError: rank 1, after step {SAVED_AT}, writing a checkpoint: " in synchronous
    assert "File too large" in synchronous
    assert first["left"] == []


def test_a_second_save_and_the_end_of_the_job_wait_for_the_one_before() -> None:
    for found in on_two_ranks():
        assert found["kept"] == ["000003", "000002", "000001"]
        assert found["last"]


def test_the_job_goes_on_after_a_failure_is_told_at_its_end_or_before(tmp_path: Path) -> None:
    straight = Job(Case()).train().holds()
    job = Job(Case()).train(SAVED_AT)
    path = job.save(tmp_path, async_save=True)
    (tmp_path / path.name).write_text("in the way")
    with pytest.raises(CheckpointError, match="committing a checkpoint"):
        job.save(tmp_path)
    assert not checkpoint.check(job.parallel)  # it is told once
    assert differing(straight, job.train().holds()) == []
    (tmp_path / path.name).unlink()
    name = job.save(tmp_path, async_save=True).name
    (tmp_path / name).write_text("in the way")
    with pytest.raises(CheckpointError, match=f"after step {UPDATES}, committing a checkpoint"):
        job.parallel.finish()
