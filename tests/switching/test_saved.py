"""A job whose strategies take turns is saved and continued in any phase, at any world size."""

import dataclasses
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

import stretto as st
from stretto import checkpoint
from stretto.checkpoint.manifest import Manifest
from stretto_lab.virtual import VirtualCluster
from tests.switching.jobs import Case, Job, differing, loss_of

PLAN = st.Switching(
    {
        0: st.LocalSGD(0.4),
        3: st.Phase(st.ACCO(), wire="int8"),
        5: st.WeightPrediction(),
        7: st.Phase(st.DiLoCo(interval=4, fragments=2, delay=1), wire="bf16"),
        9: st.DDP(),
    }
)
CASE = Case(strategy=PLAN)
Found = list[tuple[dict[str, torch.Tensor], list[dict[str, Any]]]]


def goes_on(case: Case, saved: Path) -> tuple[Found, tuple[str, ...]]:
    """Load on all ranks and train to the end; return what ranks hold and told, and the notes."""

    def program(rank: int, group: Any) -> tuple[Any, tuple[str, ...]]:
        job = Job(case, rank, group)
        torch.manual_seed(7)
        restored = checkpoint.load(job.parallel, saved, loader=job.batches)
        due = max(start for start in PLAN.phases if start <= restored.step)
        assert job.parallel.strategy == PLAN.phases[due].strategy
        job.train()
        return (job.holds(), job.told()), restored.notes

    values = VirtualCluster(case.ranks).run(program).values
    return [found for found, _ in values], values[0][1]


@cache
def straight() -> tuple[Found, TemporaryDirectory[str]]:
    """Train without a stop, and save after every update."""
    folder = TemporaryDirectory()

    def program(rank: int, group: Any) -> Any:
        job = Job(CASE, rank, group)
        job.folder = Path(folder.name)
        job.train()
        return job.holds(), job.told()

    return list(VirtualCluster(CASE.ranks).run(program).values), folder


def saved_behind(step: int) -> Path:
    return next(path for path in Path(straight()[1].name).iterdir() if Manifest.read(path).step == step)


def test_saving_in_every_phase_changes_nothing() -> None:
    def program(rank: int, group: Any) -> Any:
        job = Job(CASE, rank, group).train()
        return job.holds(), job.told()

    for (held, told), (other, others) in zip(
        straight()[0], VirtualCluster(CASE.ranks).run(program).values, strict=True
    ):
        assert differing(held, other) == []
        assert told == others


@pytest.mark.parametrize("step", range(1, 10))
def test_a_job_that_is_stopped_behind_any_update_goes_on_to_the_bit(step: int) -> None:
    found, notes = goes_on(CASE, saved_behind(step))
    assert notes == ()
    for (held, told), (other, others) in zip(straight()[0], found, strict=True):
        assert differing(held, other) == []
        assert told[step:] == others


@pytest.mark.parametrize("call", ["backward", "micro_batch"])
def test_a_loop_without_feed_is_continued_right_before_a_phase_ends(call: str, tmp_path: Path) -> None:
    """The checkpoint holds the round of update 3, the last one of its phase; `finish` tells of it."""
    case = Case(strategy=st.Switching({0: st.WeightPrediction(), 3: st.DDP()}), ranks=1, lengths=(12,))

    def loop(job: Job) -> None:
        for batch in job.batches:
            if call == "backward":
                update = job.parallel.backward(loss_of(job.model, batch), samples=len(batch))
            else:
                update = job.parallel.micro_batch(lambda one: loss_of(job.model, one), batch)
            if update is not None:
                job.heard(update)
        job.updates += job.parallel.finish()

    straight = Job(case)
    loop(straight)
    saving = Job(case)
    saving.folder = tmp_path
    saving.train()
    (behind_two,) = (path for path in tmp_path.iterdir() if Manifest.read(path).step == 2)
    found = Job(case)
    checkpoint.load(found.parallel, behind_two, loader=found.batches)
    loop(found)
    assert differing(straight.holds(), found.holds()) == []
    assert by_step(straight)[2:] == by_step(found)


def by_step(job: Job) -> list[dict[str, Any]]:
    return sorted(job.told(), key=lambda told: told["step"])


def test_a_checkpoint_says_under_which_strategy_it_was_saved() -> None:
    names = [Manifest.read(saved_behind(step)).strategy for step in range(1, 11)]
    assert names == ["local"] * 2 + ["acco"] * 2 + ["wp"] * 2 + ["diloco"] * 2 + ["ddp"] * 2


def test_more_ranks_go_on_in_the_phase_that_is_due() -> None:
    case = dataclasses.replace(CASE, ranks=3, updates=10)
    for step in (4, 6, 8):
        found, (note, *_) = goes_on(case, saved_behind(step))
        assert note.startswith("saved by 2 ranks, continued by 3")
        assert [told[-1]["step"] for _, told in found] == [10] * 3


def test_an_older_checkpoint_leads_back_into_an_earlier_phase() -> None:
    (held, _), *_ = straight()[0]

    def program(rank: int, group: Any) -> dict[str, torch.Tensor]:
        job = Job(CASE, rank, group)
        for batch in job.parallel.feed(job.batches, 9):
            job.parallel.backward((job.model(batch) ** 2).mean())  # of another loss: none of it must stay
        checkpoint.load(job.parallel, saved_behind(4), loader=job.batches)
        assert job.parallel.strategy.name == "acco"
        return job.train().holds()

    found = VirtualCluster(2).run(program).values[0]
    assert differing(found, held) == []


def test_what_cannot_be_read_leaves_the_job_in_its_phase(tmp_path: Path) -> None:
    def program(rank: int, group: Any) -> str:
        job = Job(dataclasses.replace(CASE, ranks=2), rank, group)
        job.parallel.optimizer.__class__ = torch.optim.Adam
        with pytest.raises(st.errors.ForeignCheckpoint):
            checkpoint.load(job.parallel, saved_behind(6))
        return job.parallel.strategy.name

    assert VirtualCluster(2).run(program).values == ("local", "local")


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled, )?unavailable:UserWarning")
def test_a_plain_state_dict_goes_on_in_the_phase_that_is_due(tmp_path: Path) -> None:
    case = Case(strategy=st.Switching({0: st.ZeRO1(), 3: st.DDP()}), updates=4)
    job = Job(case)
    for batch in job.parallel.feed(job.batches, 4):
        job.parallel.backward(job.model(batch).square().mean())
    dcp.save(job.parallel.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    fresh = Job(case)
    state = fresh.parallel.state_dict()
    job.parallel.finish()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    fresh.parallel.load_state_dict(state)
    assert fresh.parallel.strategy == st.DDP()
    assert differing(fresh.model.state_dict(), job.model.state_dict()) == []
