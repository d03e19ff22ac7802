"""Nothing that files or other ranks bring is run: a pickle that would leave a trace is planted at every door."""

import collections
import io
import json
import os
import pickle
import random
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import xxhash
from torch.distributed.checkpoint.planner import SavePlan

from stretto import checkpoint
from stretto.checkpoint.manifest import FILE, METADATA, Manifest
from stretto.checkpoint.pieces import SavePlanner
from stretto.checkpoint.ranks import Ranks
from stretto.errors import CheckpointError, UnsafeValue, UsageError
from stretto.guards.replay import KeptRound
from stretto.guards.sent_round import from_bytes, to_bytes
from stretto.packed import pack, unpack
from stretto_lab.testing import differing
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


def signed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest, and put the digests right as somebody would who wants to be believed."""
    content = json.loads((path / FILE).read_text())
    del content["digest"]
    change(content)
    content["digest"] = xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
    (path / FILE).write_text(json.dumps(content))


def planted_in(path: Path, name: str, planted: bytes) -> None:
    """Put `planted` in the place of an entry, in a file of its own, with all digests right."""
    (path / "__0_9.distcp").write_bytes(planted)

    def change(content: dict[str, Any]) -> None:
        content["files"]["__0_9.distcp"] = len(planted)
        for piece in content["stored"]:
            if piece[0] == name:
                piece[3:] = ["__0_9.distcp", 0, len(planted), xxhash.xxh3_128_hexdigest(planted)]

    signed(path, change)


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


@pytest.mark.parametrize(
    "name", ["model.mix", "optimizer.state.mix.exp_avg", "job.step", "extra", "rank.0", "loader.0"]
)
@pytest.mark.parametrize("write", [pickle.dumps, saved, lambda value: saved(saved(value))])
def test_a_pickle_in_the_place_of_an_entry_is_not_run(
    name: str, write: Callable[[object], bytes], path: Path, trace: Path
) -> None:
    planted_in(path, name, write(Planted(trace)))
    refused(path)
    assert not trace.exists()


def test_the_metadata_that_pytorch_pickles_is_never_opened(path: Path, trace: Path) -> None:
    planted = pickle.dumps(Planted(trace))
    (path / METADATA).write_bytes(planted)
    refused(path, METADATA)

    def change(content: dict[str, Any]) -> None:
        content["files"][METADATA] = len(planted)
        content["metadata_digest"] = xxhash.xxh3_128_hexdigest(planted)

    signed(path, change)
    assert Job(Case()).load(path).step == SAVED_AT
    assert not trace.exists()


def test_a_pickle_in_the_place_of_the_manifest_is_not_run(path: Path, trace: Path) -> None:
    (path / FILE).write_bytes(pickle.dumps(Planted(trace)))
    refused(path, FILE)
    assert not trace.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["stored"][0].__setitem__(3, "../../../etc/passwd"),
        lambda content: content["stored"][0].__setitem__(5, 1 << 62),
        lambda content: content["stored"][0].__setitem__(4, -1),
        lambda content: content["files"].update({"../elsewhere": 1}),
        lambda content: content.update(world_size="many"),
        lambda content: content.update(world_size=True),
        lambda content: content.update(step=-1),
        lambda content: content["entries"].update({"model.mix": [[3], "Tensor"]}),
        lambda content: content.update(stored=[[]]),
        lambda content: content.pop("entries"),
    ],
)
def test_a_manifest_that_lies_is_damaged(change: Callable[[dict[str, Any]], None], path: Path) -> None:
    signed(path, change)
    refused(path, FILE, "damaged")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": ' * 100_000, "1" * 5000, "null", "", "\0"])
def test_a_manifest_that_cannot_be_read_is_damaged(text: str, path: Path) -> None:
    (path / FILE).write_text(text)
    refused(path, FILE, "damaged")


@pytest.mark.parametrize("name", [FILE, METADATA, "__0_0.distcp"])
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


def test_the_number_of_ranks_that_a_manifest_claims_costs_nothing(path: Path) -> None:
    signed(path, lambda content: content.update(world_size=2 * 10**7))
    # Every loop over the ranks would be a list of that length.
    before = Manifest.read(path)
    assert before.world_size == 2 * 10**7
    restored = Job(Case()).load(path)
    assert len(restored.loader_states) == 1
    assert "saved by 20000000 ranks" in restored.notes[0]


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


@pytest.mark.parametrize("compress", [zlib.compress, bytes])
def test_a_pickle_among_the_records_of_other_ranks_is_not_run(
    compress: Callable[[bytes], bytes], trace: Path
) -> None:
    own = zlib.compress(json.dumps([None, "here"]).encode())
    ranks = Ranks(Hearing([own, compress(pickle.dumps(Planted(trace)))]))
    with pytest.raises(CheckpointError, match="what rank 1 says about a checkpoint cannot be read"):
        ranks.gather("planning a checkpoint", lambda: "here")
    assert not trace.exists()


def test_an_error_that_another_rank_names_can_only_be_one_of_a_checkpoint() -> None:
    own = zlib.compress(json.dumps([None, None]).encode())
    theirs = zlib.compress(json.dumps([["Sequence", "told \x1b[2J"], None]).encode())
    with pytest.raises(CheckpointError) as caught:
        Ranks(Hearing([own, theirs])).gather("planning a checkpoint", lambda: None)
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


class Pair(NamedTuple):
    """Two values."""

    one: Any
    two: Any


class Armed(Pair):
    """A named tuple that does something when it is made."""

    def __new__(cls, *values: Any) -> "Armed":
        raise AssertionError("made by calling the class")


def test_named_tuples_of_the_program_come_back_and_no_other_class_is_looked_up() -> None:
    value = {"batches": [Pair(torch.ones(2), Pair(1, "a"))], "armed": tuple.__new__(Armed, (1, 2))}
    back = unpack(pack(value, "value"), "value")
    assert type(back["batches"][0]) is Pair
    assert back["batches"][0].two == Pair(1, "a")
    assert type(back["armed"]) is Armed
    for module, name in (("os", "mkdir"), ("builtins", "list"), ("antigravity", "x"), (__name__, "Path")):
        planted = io.BytesIO()
        torch.save({"stretto: named tuple": [module, name], "values": ["x"]}, planted)
        with pytest.raises(UnsafeValue, match="value is refused"):
            unpack(planted.getvalue(), "value")
    assert "antigravity" not in sys.modules


def test_what_programs_usually_keep_comes_back() -> None:
    value = {
        "numbers": (1, 2.5, None, True, 10**30),
        "text": "a\x1bb",
        "bytes": b"\0\xff",
        "containers": [{1, 2}, collections.OrderedDict(a=1), collections.Counter("aab")],
        "tensors": {"x": torch.arange(3).bfloat16(), "dtype": torch.float16, "size": torch.Size([2])},
        "arrays": [np.arange(3, dtype=np.int16), np.float32(2), np.array(["ab"]), np.array([True])],
        "random": (np.random.get_state(), random.getstate()),
    }
    assert repr(unpack(pack(value, "it"), "it")) == repr(value)


def test_an_integer_that_could_not_be_read_again_is_refused_when_it_is_packed() -> None:
    assert unpack(pack(2**2000, "it"), "it") == 2**2000
    with pytest.raises(UnsafeValue, match="it is refused"):
        pack(2**2100, "it")


@pytest.mark.parametrize("in_background", [False, True])
def test_a_value_that_changes_on_its_way_to_the_file_is_found(
    in_background: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    job = Job(Case()).train(SAVED_AT)
    write = torch.save

    def damaged(value: Any, stream: Any, *more: Any, **options: Any) -> None:
        if isinstance(value, torch.Tensor) and value.shape == (3, 11, 5):
            value = value.clone()
            value[1, 3, 3] = 7e7
        write(value, stream, *more, **options)

    monkeypatch.setattr(torch, "save", damaged)
    with pytest.raises(CheckpointError, match=r"\.mix.* changed on its way from the job to"):
        save_whole(job, tmp_path, in_background)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    job.save(tmp_path)


def test_a_value_that_changes_as_it_is_copied_is_found(tmp_path: Path, monkeypatch: Any) -> None:
    copy = SavePlanner.copy

    def damaged(planner: SavePlanner, share: SavePlan) -> None:
        copy(planner, share)
        next(iter(planner._copies.values())).view(-1)[0] += 1

    monkeypatch.setattr(SavePlanner, "copy", damaged)
    with pytest.raises(CheckpointError, match=" changed on its way from the job to"):
        save_whole(Job(Case()).train(SAVED_AT), tmp_path, in_background=True)


def save_whole(job: Job, folder: Path, in_background: bool) -> None:
    job.save(folder, async_save=in_background)
    checkpoint.wait(job.parallel)
