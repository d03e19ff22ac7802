"""The folder of a machine's states beside files of others: a job touches what it has written, and nothing else."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import stretto as st
from stretto.errors import CheckpointError
from stretto.share import Written
from stretto.survive.folder import Folder
from stretto.survive.shares import Generation, Share
from tests.draws import seeds

NAMES = (
    "film.mkv.part", ".part", "part", "was-whole", "notes.txt", "tmpab12cd.part", "1-2-ab.0-of-2.part", "model.pt",
    "1-2-ab.0-of-2.0123456789abcdef.x.part", "manifest.json", "\u00e9t\u00e9.part", " .part", "a b.part", "core.1",
)  # fmt: skip


def share_of(rng: random.Random) -> Share:
    written = Written([0, "ddp", "SGD", 2, ""], [("extra", None, [(0, rng.randbytes(16))])])
    return Share(2, written.digest, written.joined())


def entry(folder: Path, rng: random.Random, outside: Path) -> None:
    """Put something of somebody else's there: a file, a folder, a link, a pipe."""
    share = share_of(rng).name(Generation(rng.randrange(3), rng.randrange(9), "ab"), 1)
    kind = rng.choice(["file", "folder", "link", "dangling", "pipe"])
    name = rng.choice(NAMES)
    if kind != "file":  # no file of ours is any of these, whatever its name
        name = rng.choice([name, share, f"{share}.x1y2.part"])
    path = folder / name
    if os.path.lexists(path):
        return
    if kind == "file":
        path.write_bytes(rng.randbytes(8))
    elif kind == "folder":
        path.mkdir()
        (path / "inside.part").write_text("x")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(outside if kind == "link" else outside.with_name("nowhere"))


def seen(folder: Path) -> dict[str, object]:
    """Return everything below a folder: what it is, when it was changed, and its bytes."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        at = path.lstat()
        is_file = path.is_file() and not path.is_symlink()
        found[str(path.relative_to(folder))] = (
            at.st_mode,
            at.st_mtime_ns * path.is_file(),
            path.read_bytes() if is_file else None,
        )
    return found


@pytest.mark.long(keep=2)
@pytest.mark.parametrize("seed", seeds(40))
def test_nothing_foreign_is_touched(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    for case in range(250):
        place = tmp_path / str(case)
        place.mkdir(mode=0o700)
        outside = place / "outside.part"
        outside.write_text("of somebody else")
        path = place / "states"
        path.mkdir(mode=0o700)
        for _ in range(rng.randrange(6)):
            entry(path, rng, outside)
        before = seen(place)
        folder = Folder(path)
        assert list(folder.shares()) == [], (seed, case)
        share, generation = share_of(rng), Generation(1, rng.randrange(9), "cd")
        folder.write(generation, 0, share)
        (path / f"{share.name(generation, 1)}.x1y2z3a4.part").write_text("half of one")
        folder.note_whole()
        again = Folder(path)
        assert [bytes(found.content) for _, _, found in again.shares()] == [share.content], (seed, case)
        again.drop(generation, 0, share)
        again.forget()
        again.remove()
        after = seen(place) | ({} if path.exists() else {"states": before["states"]})
        assert path.exists() == any(name.startswith("states/") for name in before), (seed, case)
        assert after == before, (seed, case)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda path: path.symlink_to(path.parent), "a link"),
        (lambda path: (path.mkdir(), path.chmod(0o777)), r"a folder that others can write \(mode 777\)"),
        (lambda path: (path.mkdir(), path.chmod(0o770)), r"a folder that others can write \(mode 770\)"),
        (lambda path: path.write_text(""), "no folder"),
    ],
)
def test_a_folder_that_is_not_this_users_alone_is_refused(
    make: Callable[[Path], object], found: str, tmp_path: Path
) -> None:
    path = tmp_path / "states"
    make(path)
    with pytest.raises(CheckpointError, match=f"found {found}"):
        st.LocalCheckpoints(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "states"
    path.mkdir()
    os.chown(path, 65534, 65534)
    with pytest.raises(CheckpointError, match="found the folder of user 65534"):
        st.LocalCheckpoints(path)
