"""Nothing that files or other ranks bring is run: a pickle that would leave a trace is planted at every door."""

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto import checkpoint
from stretto.checkpoint.manifest import FILE
from stretto.checkpoint.ranks import Ranks
from stretto.errors import CheckpointError, UnsafeValue, UsageError
from stretto.guards.replay import KeptRound
from stretto.guards.sent_round import from_bytes, to_bytes
from stretto.share import Written
from stretto_lab.testing import differing
from tests.checkpoint.forged import SHARE, forged, planted, signed
from tests.checkpoint.jobs import SAVED_AT, Case, Job


class Planted:
    """A value whose unpickling makes a folder."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "was-run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Job(Case()).train(SAVED_AT).save(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "checkpoints" / whole.name))


def refused(path: Path, *words: str) -> None:
    """Check that a checkpoint is refused in one line, and that nothing in the job has changed."""
    job = Job(Case())
    before = job.holds()
    with pytest.raises(CheckpointError) as caught:
        job.load(path)
    assert [word for word in words if word not in str(caught.value)] == []
    assert len(str(caught.value).splitlines()) == 1
    assert differing(before, job.holds()) == []


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.mark.parametrize("name", ["", "extra", "rank.0", "loader.0", "job.round_report"])
@pytest.mark.parametrize("write", [pickle.dumps, saved, lambda value: saved(saved(value))])
def test_a_pickle_in_the_place_of_an_entry_is_not_run(
    name: str, write: Callable[[object], bytes], path: Path, trace: Path
) -> None:
    planted(path, name, write(Planted(trace)))
    refused(path)
    assert not trace.exists()


def test_a_pickle_in_the_place_of_a_file_is_not_run(path: Path, trace: Path) -> None:
    for name in (SHARE, FILE):
        (path / name).write_bytes(pickle.dumps(Planted(trace)))
        refused(path, name)
    assert not trace.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["shares"].__setitem__(0, [-1, "0"]),
        lambda content: content["shares"].__setitem__(0, []),
        lambda content: content["shares"].append([1, "0"]),
        lambda content: content.update(shares=1),
        lambda content: content.update(world_size="many"),
        lambda content: content.update(world_size=True),
        lambda content: content.update(world_size=2 * 10**7),
        lambda content: content.update(step=-1),
        lambda content: content.pop("shares"),
    ],
)
def test_a_manifest_that_lies_is_damaged(change: Callable[[dict[str, Any]], object], path: Path) -> None:
    signed(path, change)
    refused(path, FILE, "damaged")


LIES: list[Callable[[Any, Any, Any], object]] = [
    lambda header, index, _: header.__setitem__(0, -1),
    lambda header, index, _: header.__setitem__(1, 7),
    lambda header, index, _: header.__setitem__(3, 2 * 10**7),
    lambda header, index, _: header.pop(),
    lambda header, index, _: index["model.mix"].__setitem__(0, None),
    lambda header, index, _: index["model.mix"].__setitem__(1, [[-1], "float32"]),
    lambda header, index, _: index["model.mix"].__setitem__(1, [[3, 11, 5], "Tensor"]),
    lambda header, index, _: index["model.mix"].__setitem__(1, [[2**50], "float32"]),
    lambda header, index, _: index["model.mix"].__setitem__(1, [[2**62, 2**62], "float32"]),
    lambda header, index, _: index["model.mix"].__setitem__(2, [[0, 2**62]]),
    lambda header, index, _: index["model.mix"].__setitem__(2, [[2**62, 1]]),
    lambda header, index, _: index["model.mix"].__setitem__(2, 5),
    lambda header, index, _: index["model.mix"].append(5),
    lambda header, index, _: index["extra"].__setitem__(2, [[0, 2**40]]),
    lambda header, index, _: index["extra"].__setitem__(3, 5),
    lambda header, index, contents: contents.__setitem__("extra", b""),
]


@pytest.mark.parametrize("lie", LIES)
def test_a_share_that_lies_is_refused(lie: Callable[[Any, Any, Any], object], path: Path) -> None:
    forged(path, lie)
    refused(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": ' * 100_000, "1" * 5000, "null", "", "\0"])
def test_a_manifest_that_cannot_be_read_is_damaged(text: str, path: Path) -> None:
    (path / FILE).write_text(text)
    refused(path, FILE, "damaged")


@pytest.mark.parametrize("name", [FILE, SHARE])
@pytest.mark.parametrize(
    "put",
    [os.mkfifo, Path.mkdir, lambda file: file.symlink_to("/dev/zero"), lambda file: file.symlink_to(file)],
)
def test_what_is_no_file_is_refused_and_not_waited_for(
    name: str, put: Callable[[Path], object], path: Path
) -> None:
    (path / name).unlink()
    put(path / name)
    refused(path, str(path / name))


class Hearing:
    """A job whose exchange returns records that others have made up."""

    def __init__(self, records: list[bytes]) -> None:
        self.rank, self.world_size = 0, len(records)
        self.job = self.compute = self.exchange = self.everyone = self.replica = self
        self.where = "rank 0, after step 0"
        self._records = records

    def wait_for_transfers(self) -> None:
        """Nothing is under way."""

    def gather_records(self, own: bytes) -> list[bytes]:
        return self._records


def test_a_pickle_among_the_records_of_other_ranks_is_not_run(trace: Path) -> None:
    ranks = Ranks(Hearing([b'"here"', pickle.dumps(Planted(trace))]))
    for tell in (ranks.gather, ranks.collect):
        with pytest.raises(CheckpointError, match="what rank 1 says about a checkpoint cannot be read"):
            tell("planning a checkpoint", lambda: "here")
    assert not trace.exists()


def test_an_error_that_another_rank_names_can_only_be_one_of_a_checkpoint() -> None:
    theirs = b"!" + json.dumps(["Sequence", "told \x1b[2J"]).encode()
    with pytest.raises(CheckpointError) as caught:
        Ranks(Hearing([b"", theirs])).gather("planning a checkpoint", lambda: None)
    assert str(caught.value) == "told \\x1b[2J"


@pytest.mark.parametrize("write", [pickle.dumps, saved])
def test_a_pickle_in_the_place_of_an_audited_batch_is_not_run(
    write: Callable[[object], bytes], trace: Path
) -> None:
    kept = KeptRound(torch.nn.Linear(2, 2), torch.device("cpu"))
    with pytest.raises(UnsafeValue, match="another rank's micro-batches is refused"):
        from_bytes(write(Planted(trace)), kept)
    assert not trace.exists()


def test_what_only_pickle_could_read_again_is_refused_when_it_is_saved(tmp_path: Path, trace: Path) -> None:
    job = Job(Case()).train(SAVED_AT)
    for what in ("loader", "extra"):
        job.batches.state_dict = lambda what=what: Planted(trace) if what == "loader" else 1
        with pytest.raises(
            CheckpointError, match=rf"{what}.* is refused \(.*mkdir\): expected numbers, text"
        ):
            checkpoint.save(job.parallel, tmp_path, loader=job.batches, extra=Planted(trace))
    kept = KeptRound(torch.nn.Linear(2, 2), torch.device("cpu"))
    kept.begin(lambda batch: torch.zeros(()), Planted(trace))
    kept.end(1.0, 1, 1)
    with pytest.raises(UsageError, match="cannot be sent there: the batch is refused"):
        to_bytes(kept)
    assert not trace.exists()


@pytest.mark.parametrize("in_background", [False, True])
def test_a_value_that_changes_on_its_way_to_the_file_is_found(
    in_background: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    chunks = Written.chunks

    def damaged(written: Written) -> Iterator[bytes]:
        for chunk in chunks(written):
            yield bytes(chunk) if len(chunk) != 4 * 3 * 11 * 5 else bytes([chunk[0] ^ 1, *chunk[1:]])

    job = Job(Case(optimizer="adamw")).train(SAVED_AT)
    monkeypatch.setattr(Written, "chunks", damaged)
    with pytest.raises(
        CheckpointError, match=r"changed on its way from the job to the file: '.*mix' is damaged"
    ):
        save_whole(job, tmp_path, in_background)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    job.save(tmp_path)


def save_whole(job: Job, folder: Path, in_background: bool) -> None:
    job.save(folder, async_save=in_background)
    checkpoint.wait(job.parallel)
