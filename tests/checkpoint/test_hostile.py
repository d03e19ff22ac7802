"""Nothing that files or other ranks bring is run: a pickle that would leave a trace is planted at every door."""

import io
import json
import math
import os
import pickle
import random
import resource
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
from stretto.packed import unpack
from stretto.share import Written
from stretto_lab.testing import differing
from tests.checkpoint.forged import SHARE, forged, planted, signed
from tests.checkpoint.jobs import SAVED_AT, Case, Job
from tests.draws import draws


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


def test_a_share_that_lies_is_refused(whole: Path, tmp_path: Path) -> None:
    for number, lie in enumerate(LIES):
        path = Path(shutil.copytree(whole, tmp_path / str(number) / whole.name))
        forged(path, lie)
        refused(path)


HOSTILE = (
    -1, 0, 1, 7, 2**20, 2**31, 2**40, 2**53, 2**62, 2**63, 2**70, 1e300, math.nan, True, None, "", "\0", "float64",
    "Tensor", "model.mix", "../../0.share", "x" * 1000, [], {}, [0, 2**62], [[2**40, 2**22]], [[0, 1]] * 1000,
)  # fmt: skip


def lied(draw: random.Random, found: Any) -> None:
    """Put something hostile into the place of something in a description, or beside it, or take it away."""
    while True:
        keys = list(found) if isinstance(found, dict) else range(len(found))
        key = draw.choice(keys) if keys else None
        if key is None or not isinstance(found[key], list | dict) or draw.random() < 0.2:
            break
        found = found[key]
    how = draw.random()
    if key is not None and how < 0.8:
        found[key] = draw.choice(HOSTILE)
    elif key is not None and how < 0.9:
        del found[key]
    else:
        found.update(more=draw.choice(HOSTILE)) if isinstance(found, dict) else found.append(
            draw.choice(HOSTILE)
        )


def a_lie(draw: random.Random, header: list[Any], index: dict[str, list[Any]], _: object) -> None:
    lied(draw, header if draw.random() < 0.2 else list(index.values()))


def outcome(work: Callable[[], object], kind: type[Exception]) -> str:
    """Return the message of an error of this kind; empty without one."""
    try:
        work()
    except kind as error:
        return str(error)
    return ""


@contextmanager
def little_memory() -> Iterator[None]:
    """For the block, this process gets little more memory than it has."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def test_whatever_lengths_names_and_sizes_are_named_a_load_ends_in_a_line_and_takes_no_memory(
    whole: Path, tmp_path: Path
) -> None:
    job = Job(Case())
    job.load(whole)
    before, said = job.holds(), 0
    for seed in draws(400):
        draw = random.Random(seed)
        path = Path(shutil.copytree(whole, tmp_path / str(seed) / whole.name))
        if seed % 4:
            forged(path, partial(a_lie, draw))
        else:
            signed(path, partial(lied, draw))
        with little_memory():
            found = outcome(lambda: job.load(path), kind=CheckpointError)  # noqa: B023  # called at once
        assert len(found.splitlines()) <= 1, (seed, found)
        said += bool(found)
        assert differing(before, job.holds()) == [], seed
        shutil.rmtree(path)
    assert said > len(draws(400)) / 2


def test_packed_bytes_that_would_take_more_memory_than_they_have_are_refused() -> None:
    content = zipfile.ZipFile(io.BytesIO(saved(torch.zeros(8))))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as bomb:
        for name in content.namelist():
            bomb.writestr(name, bytes(2**20) if name.endswith("data/0") else content.read(name))
    with pytest.raises(UnsafeValue, match="more memory than it has bytes"):
        unpack(stream.getvalue(), "a value")


def test_what_holds_a_state_is_made_for_its_user_alone(tmp_path: Path) -> None:
    path = Job(Case()).train(SAVED_AT).save(tmp_path / "checkpoints")
    found = {one.name: one.stat().st_mode & 0o777 for one in (path.parent, path, *path.iterdir())}
    assert found == {"checkpoints": 0o700, path.name: 0o700, FILE: 0o600, SHARE: 0o600}


def test_a_folder_that_others_can_write_and_one_behind_a_link_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder := tmp_path / "checkpoints").mkdir()
    folder.chmod(0o777)
    job = Job(Case()).train(1)
    job.save(folder)
    (link := tmp_path / "link").symlink_to(job.save(folder))
    job.load(link)
    said = [record.getMessage().partition(": expected")[0] for record in caplog.records]
    assert said == [
        f"{folder} is a folder that others can write (mode 777)",
        f"{link} is a link",
    ]


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
        with pytest.raises(CheckpointError, match="the report of rank 1 about a checkpoint cannot be read"):
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
    with pytest.raises(UsageError, match="cannot be sent: the batch is refused"):
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
    with pytest.raises(CheckpointError, match=r"changed between the job and the file: '.*mix' is damaged"):
        save_whole(job, tmp_path, in_background)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    job.save(tmp_path)


def save_whole(job: Job, folder: Path, in_background: bool) -> None:
    job.save(folder, async_save=in_background)
    checkpoint.wait(job.parallel)
