"""What is torn, damaged, foreign or missing is refused with its name, on all ranks, and nothing has changed."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from stretto import ACCO, DataParallel, ZeRO1, checkpoint
from stretto.errors import CheckpointError, ForeignCheckpoint, OutOfTurn, StrettoError, TornCheckpoint
from stretto_lab.testing import differing
from tests.checkpoint.damages import DAMAGES, Damaged
from tests.checkpoint.forged import extents, signed
from tests.checkpoint.jobs import SAVED_AT, Case, Job
from tests.draws import draws
from tests.processes import run_ranks


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Job(Case()).train(SAVED_AT).save(tmp_path)


def refused(path: Path, kind: type[CheckpointError], *words: str) -> None:
    """Check that loading raises and names `words`, and that the job is what it was and can go on."""
    job = Job(Case())
    before = job.holds()
    with pytest.raises(kind) as caught:
        job.load(path)
    assert type(caught.value) is kind
    assert [word for word in words if word not in str(caught.value)] == []
    assert differing(before, job.holds()) == []
    job.train(1)


@pytest.mark.parametrize("name", ["model.mix", "optimizer.state.mix.exp_avg", "carry.mix", "rank.0", "extra"])
def test_a_flipped_bit_names_the_entry(name: str, path: Path) -> None:
    _, index, places = extents((path / "0.share").read_bytes())
    begin, end = places[[entry[0] for entry in index].index(name)]
    flip(path / "0.share", (begin + end) // 2)
    refused(path, TornCheckpoint, repr(name), "0.share")


@pytest.mark.parametrize(
    ("name", "place"), [("manifest.json", 40), *(("0.share", place) for place in (0, 10, 20, 40, 500))]
)
def test_a_flipped_bit_in_a_description_names_the_file(name: str, place: int, path: Path) -> None:
    flip(path / name, place)
    refused(path, TornCheckpoint, str(path / name))


@pytest.mark.parametrize("name", ["manifest.json", "0.share"])
@pytest.mark.parametrize("tear", [Path.unlink, lambda file: file.write_bytes(file.read_bytes()[:-1])])
def test_a_file_that_is_missing_or_short_is_named(
    name: str, tear: Callable[[Path], object], path: Path
) -> None:
    tear(path / name)
    refused(path, TornCheckpoint, str(path / name))
    assert checkpoint.latest(path.parent) is None


def test_the_latest_checkpoint_is_the_latest_complete_one(tmp_path: Path) -> None:
    job = Job(Case()).train(1)
    good = job.save(tmp_path)
    job.train(2)
    torn = job.save(tmp_path)
    (torn / "manifest.json").unlink()
    assert checkpoint.latest(tmp_path) == good
    fresh = Job(Case())
    assert fresh.load(tmp_path).step == 1


def test_a_crash_before_the_rename_leaves_the_former_checkpoint_and_is_cleared_away(tmp_path: Path) -> None:
    job = Job(Case()).train(1)
    good = job.save(tmp_path)
    job.train(2)
    # All files written, the rename still to come; and one from a crash in the middle of the writing.
    shutil.copytree(good, tmp_path / ".writing-000002-step-2")
    (tmp_path / ".writing-000003-step-2").mkdir()
    (tmp_path / ".writing-000003-step-2" / "0.share").write_bytes(b"half")
    shutil.copytree(good, tmp_path / ".removing-000000-step-0")
    (tmp_path / ".writing-000004-step-3").write_bytes(b"a stray file")
    assert checkpoint.latest(tmp_path) == good
    assert Job(Case()).load(tmp_path).step == 1
    new = job.save(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([good, new])
    assert checkpoint.latest(tmp_path) == new


def test_the_last_ones_are_kept_in_the_order_of_writing(tmp_path: Path) -> None:
    job = Job(Case()).train(2)
    first = job.save(tmp_path, keep=2)
    later = job.train(3).save(tmp_path, keep=2)
    job.load(first)
    again = job.save(tmp_path, keep=2)  # of an earlier step than `later`, and written after it
    assert sorted(tmp_path.iterdir()) == [later, again]
    assert checkpoint.latest(tmp_path) == again
    with pytest.raises(ValueError, match="keep=0"):
        job.save(tmp_path, keep=0)


@pytest.mark.parametrize("put", [Path.touch, lambda path: path.symlink_to("nowhere"), Path.mkdir])
def test_whatever_has_the_name_of_the_next_checkpoint_does_not_stop_a_save(
    put: Callable[[Path], object], tmp_path: Path
) -> None:
    job = Job(Case()).train(1)
    put(tmp_path / "000001-step-1")
    assert job.save(tmp_path).name == "000002-step-1"


def test_a_checkpoint_that_was_moved_behind_a_link_is_read_and_pruned_as_a_link(tmp_path: Path) -> None:
    job = Job(Case()).train(1)
    moved = job.save(tmp_path / "here").rename(tmp_path / "moved")
    (tmp_path / "here" / "000001-step-1").symlink_to(moved)
    assert job.load(tmp_path / "here").step == 1
    newer = job.save(tmp_path / "here", keep=1)
    assert sorted((tmp_path / "here").iterdir()) == [newer]
    assert job.load(moved).step == 1


def test_a_folder_without_checkpoints_is_no_checkpoint(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", CheckpointError, "nowhere does not exist")
    refused(tmp_path, CheckpointError, "holds no checkpoint")
    assert checkpoint.latest(tmp_path / "nowhere") is None


def test_another_format_version_is_foreign(path: Path) -> None:
    signed(path, lambda content: content.update(format=99))
    refused(path, ForeignCheckpoint, "version 99, expected 3")
    refused(path.parent, ForeignCheckpoint, "version 99, expected 3")
    signed(path, lambda content: content.update(format=2))
    refused(path, ForeignCheckpoint, "version 2, expected 3: stretto 0.2 reads it")


def with_other_names(model: nn.Module) -> nn.Module:
    model.extra = nn.Linear(2, 3)
    del model.mix
    model.register_parameter("blend", nn.Parameter(torch.zeros(3, 11, 5)))
    return model


def with_other_shapes(model: nn.Module) -> nn.Module:
    model.branch = nn.Linear(33, 34)
    return model


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            with_other_names,
            ["'mix' is not in the model", "'blend' is missing in the checkpoint", "'extra.bias'"],
        ),
        (
            with_other_shapes,
            ["'branch.weight'", "shape (5, 33) in the checkpoint", "shape (34, 33) in the model"],
        ),
        (
            nn.Module.double,
            ["'again.weight' is torch.float32", "torch.float64 of shape (7, 33) in the model", "more"],
        ),
    ],
)
def test_another_model_is_foreign(
    change: Callable[[nn.Module], nn.Module], words: list[str], path: Path
) -> None:
    job = Job(Case())
    job.parallel.finish()
    model = change(job.model)
    parallel = DataParallel(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ForeignCheckpoint) as caught:
        checkpoint.load(parallel, path)
    assert [word for word in words if word not in str(caught.value)] == []


def test_another_optimizer_is_foreign(path: Path) -> None:
    job = Job(Case(optimizer="sgd"))
    with pytest.raises(ForeignCheckpoint, match="state of AdamW, expected SGD"):
        job.load(path)


def test_the_middle_of_an_update_is_no_time_for_a_checkpoint(tmp_path: Path) -> None:
    for strategy, micro_batches in [(ZeRO1(), 1), (ACCO(), 1), (ACCO(), 3), (ACCO(), 4)]:
        job = Job(Case(strategy=strategy, micro_batches=4))
        for _, (inputs, targets, used) in zip(range(micro_batches), job.batches, strict=False):
            job.parallel.backward((job.model(inputs, used) - targets).square().mean())
        with pytest.raises(OutOfTurn, match="after step 0: a checkpoint"):
            job.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def raises_on_one_rank(rank: int, directory: str, name: str) -> list[str]:
    """Meet every kind of trouble on rank 1 alone; return what each was told, and go on."""
    import resource

    job = Job(Case(), rank).train(SAVED_AT)
    told = [told_of(lambda: job.save(Path(directory, "good")))]
    broken = Broken() if rank == 1 else job.batches
    told.append(told_of(lambda: checkpoint.save(job.parallel, directory, loader=broken)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    told.append(told_of(lambda: job.save(Path(directory))))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    told.append(told_of(lambda: checkpoint.load(job.parallel, Path(directory, "good"), loader=broken)))
    job.train()
    return told


class Broken:
    """A loader that cannot say where it is."""

    def state_dict(self) -> dict[str, int]:
        raise LookupError("lost")

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise LookupError("lost for good")


def told_of(work: Callable[[], object]) -> str:
    try:
        work()
    except StrettoError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_trouble_on_one_rank_is_told_on_all_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    first, second = run_ranks(2, raises_on_one_rank, str(tmp_path), "good")
    assert first == second
    where = f"CheckpointError: rank 1, after step {SAVED_AT}, "
    assert first[0] == "nothing"
    assert first[1] == where + "beginning a checkpoint: LookupError: lost"
    assert first[2].startswith(where + "writing a checkpoint: ")
    assert "File too large" in first[2]
    assert first[3] == where + "restoring the loader: LookupError: lost for good"
    assert [entry.name for entry in tmp_path.iterdir()] == ["good"]


def flip(file: Path, index: int) -> None:
    content = bytearray(file.read_bytes())
    content[index] ^= 1
    file.write_bytes(content)


def test_random_damage_is_refused_in_a_line_or_survived(tmp_path: Path) -> None:
    damaged = Damaged(tmp_path)
    outcomes = [damaged.outcome(seed) for seed in draws(48)]
    assert {outcome.partition(":")[0] for outcome in outcomes} == {damage.__name__ for damage in DAMAGES}
    assert any(outcome.endswith("1 refused") for outcome in outcomes)
