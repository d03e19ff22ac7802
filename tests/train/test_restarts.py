"""After damage that ends a run, it goes on from its last checkpoint without those the damage is attributed to."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import CorruptionError, Quarantined, StateCorrupt, TransferCorrupt, WorkerFailed
from stretto.guards.left_out import to_leave_out
from stretto_lab.faults import Fault
from stretto_lab.observe import read_json_lines
from stretto_lab.train.configuration import RunConfig
from stretto_lab.train.launch import Ranks
from stretto_lab.train.outcome import prepare_run_folder
from stretto_lab.train.restarts import ranks_per_node, train_on
from stretto_lab.train.workers import RankInfo
from tests.processes import launched
from tests.train.runs import evaluations, model_bits, records, tiny_run, train
from tests.train.tiny import Tiny

TINY = f"{Path(__file__).parent / 'tiny.py'}:Tiny"
STICKY = Fault(site="masters", rank=1, instant=3, lasts="sticky")
LARGE = Fault(site="masters", rank=1, instant=7, extent="chunk", chunk_bytes=2**16, pattern="zero")
"""More than the checksums can mend, on a model wide enough."""


def struck(folder: str, workers: int = 3, **settings: Any) -> RunConfig[Tiny]:
    chosen = {
        "strategy": "zero1",
        "guards": ("rest",),
        "checkpoint_every": 2,
        **settings,
    }
    return tiny_run(folder, workers=workers, **chosen)


def persist(run: RunConfig[Tiny]) -> list[str]:
    """Train as `stretto train` does, and return what it tells its user beside the progress."""
    lines: list[str] = []
    prepare_run_folder(run)
    train_on(Ranks.local(run.workers), run, lines.append)
    return "\n".join(lines).splitlines()


def quarantine(folder: str) -> list[dict[str, Any]]:
    return read_json_lines(Path(folder, "quarantine.jsonl"))


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(
    ("strategy", "fault", "error"),
    [("acco", STICKY, Quarantined), ("zero1", LARGE, StateCorrupt)],
)
def test_a_run_without_the_bad_rank_is_the_one_continued_by_hand(
    strategy: str, fault: Fault, error: type[CorruptionError]
) -> None:
    task = Tiny(width=6000 if fault is LARGE else 16)
    # Of ten updates the last three checkpoints stay: the one to go on from is among them.
    run = dataclasses.replace(
        struck("run", strategy=strategy, faults=(fault,), checkpoint_every=4), task=task
    )
    told = persist(run)
    (record,) = quarantine("run")
    assert (record["error"], record["named"], record["left_out"]) == (error.__name__, [1], [1])
    assert (record["world_size"], record["goes_on_with"]) == (3, 2)
    assert f"resuming from {record['checkpoint']} without rank 1: 2 of 3 workers, 2 more restarts" in told

    # By hand: a run that nobody damages, and two ranks that go on from its checkpoint of that update.
    train(dataclasses.replace(run, run_dir="whole", faults=()), world_size=3)
    for file in ("checkpoints", "updates.jsonl", "evaluations.jsonl"):
        source = Path("whole", file) if file != "checkpoints" else Path("whole", file, record["checkpoint"])
        target = Path("hand", file) if file != "checkpoints" else Path("hand", file, record["checkpoint"])
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    train(dataclasses.replace(run, run_dir="hand", faults=(), resume=True, workers=2), world_size=2)
    assert model_bits("run") == model_bits("hand")
    assert evaluations("run") == evaluations("hand")
    found = [{**one, "incidents": []} for one in records("run")]
    assert found == records("hand")
    assert sum(ranks for _, ranks in found[-1]["micro_batches"]) == 2
    assert found[-1]["step"] == 10


@pytest.mark.long
def test_every_incident_stays_in_the_folder_also_of_updates_that_are_made_again() -> None:
    persist(struck("run", faults=(STICKY,), checkpoint_every=5))
    incidents = read_json_lines(Path("run", "incidents.jsonl"))
    assert [(one["step"], one["guard"], one["ranks"]) for one in incidents] == [
        (4, "rest", [1]), (5, "rest", [1]), (6, "rest", [1])
    ]  # fmt: skip
    (record,) = quarantine("run")
    assert record["checkpoint"] == "000001-step-5"
    assert record["incidents"] == incidents
    # The sixth update was made again, without the rank.
    assert [one["incidents"] for one in records("run")][5:] == [[]] * 5


@pytest.mark.long
def test_what_is_found_behind_the_last_update_is_in_the_folder_too() -> None:
    """Weight prediction gathers beside the next round; the last of it is installed in the drain."""
    last = Fault(site="gathered values", rank=1, instant=27)
    persist(struck("run", 2, strategy="wp", guards=("rest",), verified=True, faults=(last,)))
    (incident,) = read_json_lines(Path("run", "incidents.jsonl"))
    assert (incident["step"], incident["site"], incident["action"]) == (11, "gathered values", "sent again")
    assert [one["incidents"] for one in records("run")] == [[]] * 10


@pytest.mark.long
def test_where_nobody_can_be_named_the_same_ranks_go_on() -> None:
    once = Fault(site="step", rank=1, instant=6, extent="all")
    run = struck("run", 2, strategy="ddp", guards=("replica",), faults=(once,))
    told = persist(run)
    assert "resuming from 000003-step-6, with the same ranks: 2 of 2 workers, 2 more restarts" in told
    assert [one["error"] for one in quarantine("run")] == ["ReplicasDiverged"]
    train(dataclasses.replace(run, run_dir="clean", faults=()))
    assert model_bits("run") == model_bits("clean")


def test_a_run_is_not_restarted_for_ever() -> None:
    run = struck("run", 2, strategy="ddp", guards=("replica",), restarts=1)
    always = Fault(site="step", rank=1, lasts="sticky", extent="all")
    with pytest.raises(WorkerFailed, match="ReplicasDiverged"):
        persist(dataclasses.replace(run, faults=(always,)))
    assert [one["goes_on_with"] for one in quarantine("run")] == [2, None]


def test_what_is_no_damage_ends_the_run_at_once() -> None:
    with pytest.raises(WorkerFailed, match="acco needs at least 2"):
        persist(struck("run", strategy="acco", micro_batches=1))
    assert quarantine("run") == []


def place(info: RankInfo) -> tuple[int, int, int, int]:
    return info.rank, info.world_size, info.local_rank, info.local_world_size


def test_those_that_stay_keep_their_devices() -> None:
    assert Ranks.local(3).without([1]).call(place) == [(0, 2, 0, 3), (1, 2, 2, 3)]


@pytest.mark.parametrize(
    ("damages", "world_size", "left_out"),
    [
        ([StateCorrupt("", ranks=[2])], 4, (2,)),
        ([StateCorrupt("", ranks=[2]), StateCorrupt("", ranks=[0])], 4, (0, 2)),
        ([TransferCorrupt("", links=[(3, 0)])], 4, (3,)),
        ([TransferCorrupt("", links=[(3, 0)]), TransferCorrupt("", links=[(1, 0)])], 4, (0,)),
        ([CorruptionError("")], 4, ()),
        ([StateCorrupt("", ranks=[0])], 1, ()),
        ([Quarantined("", ranks=[0])], 1, None),
    ],
)
def test_those_the_damage_is_laid_to_are_left_out_where_others_remain(
    damages: Sequence[CorruptionError], world_size: int, left_out: tuple[int, ...] | None
) -> None:
    assert to_leave_out(damages, world_size) == left_out


@pytest.mark.parametrize(
    ("before", "left_out", "after"),
    [
        (2, (3,), None),
        (2, (0, 3), None),
        (2, (2, 3), 2),
        (2, (), 2),
        (4, (0, 1, 2), None),
        (None, (3,), None),
    ],
)
def test_sums_are_made_inside_nodes_while_all_of_them_are_whole(
    before: int | None, left_out: tuple[int, ...], after: int | None
) -> None:
    assert ranks_per_node(before, 4, left_out) == after


@pytest.mark.long
def test_a_run_on_nodes_goes_on_without_a_rank_of_one() -> None:
    run = struck("run", workers=4, ranks_per_node=2, faults=(STICKY,), updates=8)
    told = persist(run)
    assert any("3 of 4 workers, no longer summed in nodes of 2" in line for line in told)
    assert quarantine("run")[0]["goes_on_with"] == 3


def test_a_run_whose_workers_are_nodes_ends_with_the_damage() -> None:
    strategy = "diloco:interval=2:worker=node"
    run = struck("run", workers=4, ranks_per_node=2, faults=(STICKY,), strategy=strategy, updates=8)
    with pytest.raises(WorkerFailed, match="rank 1"):
        persist(run)
    assert quarantine("run")[0]["goes_on_with"] is None


def test_under_another_launcher_every_rank_ends_with_the_code_for_damage() -> None:
    words = ["train", TINY, "--updates", "8", "--guards", "rest", "--strategy", "zero1", "--run-dir", "run"]
    words += ["--no-tensorboard", "--faults", "masters:rank=1:instant=3:lasts=sticky"]
    with launched(2, "-m", "stretto", *words) as ranks:
        complaints = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [3, 3]
    for complaint in complaints:
        assert "rank 1 (host" in complaint
        assert "reached 3 strikes" in complaint
    (record,) = quarantine("run")
    assert (record["named"], record["goes_on_with"]) == ([1], None)
