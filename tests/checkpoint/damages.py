"""Random damage to the folder of checkpoints, and what may become of a run that goes on from it."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from stretto import checkpoint
from stretto.errors import TornCheckpoint
from stretto_lab.testing import differing
from tests.checkpoint.jobs import Case, Job

Damage = Callable[[random.Random, list[Path]], None]
SAVED = (1, 2)
"""Updates after which the job is saved."""


def _a_file(draw: random.Random, paths: list[Path]) -> Path:
    return draw.choice(sorted(file for path in paths for file in path.iterdir() if file.is_file()))


def flip(draw: random.Random, paths: list[Path]) -> None:
    """Flip one to eight bits of a file."""
    file = _a_file(draw, paths)
    content = bytearray(file.read_bytes())
    for _ in range(draw.randint(1, 8)):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def truncate(draw: random.Random, paths: list[Path]) -> None:
    """Cut a file anywhere, or write some bytes behind its end."""
    file = _a_file(draw, paths)
    content = file.read_bytes()
    file.write_bytes(content[: draw.randrange(len(content))] if draw.random() < 0.7 else content + b"more")


def delete(draw: random.Random, paths: list[Path]) -> None:
    """Delete a file."""
    _a_file(draw, paths).unlink()


def swap(draw: random.Random, paths: list[Path]) -> None:
    """Exchange two files of one checkpoint."""
    one, other = draw.sample(sorted(draw.choice(paths).iterdir()), 2)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def stale(draw: random.Random, paths: list[Path]) -> None:
    """Put a file of the older checkpoint into the newer one."""
    name = draw.choice(sorted(file.name for file in paths[0].iterdir()))
    shutil.copy(paths[-1] / name, paths[0] / name)


def foreign(draw: random.Random, paths: list[Path]) -> None:
    """Put something that nobody has saved beside the checkpoints, or in the place of a file."""
    content = draw.randbytes(draw.randrange(200))
    if draw.random() < 0.5:
        _a_file(draw, paths).write_bytes(content)
        return
    name = draw.choice([".writing-000009-step-9", ".removing-000001-step-1", "000009-step-9", "notes.txt"])
    beside = paths[0].parent / name
    if draw.random() < 0.5:
        beside.mkdir()
        (beside / "manifest.json").write_bytes(content)
    else:
        beside.write_bytes(content)


DAMAGES: tuple[Damage, ...] = (flip, truncate, delete, swap, stale, foreign)


class Damaged:
    """Two checkpoints of one job, of which any number of damaged copies can be made.

    Args:
        folder: Where the whole ones lie, and the copies.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        job = Job(Case())
        self._expected = {}
        for step in SAVED:
            job.train(step)
            job.save(folder / "whole")
            self._expected[step] = Job(Case())
        for step, loaded in self._expected.items():
            path = next(p for p in checkpoint.newest_first(folder / "whole") if p.name.endswith(f"-{step}"))
            loaded.load(path)
        self._job = Job(Case())

    def outcome(self, seed: int) -> str:
        """Damage a copy, go on from the newest sound checkpoint, save again, and return what came of it.

        Raises:
            AssertionError: A checkpoint was loaded wrongly, refused with more than a line, or saving failed.
        """
        draw = random.Random(seed)
        copy = self._folder / f"copy-{seed}"
        shutil.copytree(self._folder / "whole", copy)
        damage = DAMAGES[seed % len(DAMAGES)]
        damage(draw, checkpoint.newest_first(copy))
        said = []
        for path in checkpoint.newest_first(copy):
            before = self._job.holds()
            try:
                step = self._job.load(path).step
            except TornCheckpoint as error:
                said.append(str(error))
                assert "\n" not in said[-1], f"seed {seed}: {said[-1]}"
                assert differing(before, self._job.holds()) == [], (
                    f"seed {seed}: a refused checkpoint left traces"
                )
                continue
            assert path.name.endswith(f"step-{step}"), f"seed {seed}: {path.name} was loaded as step {step}"
            assert differing(self._expected[step].holds(), self._job.holds()) == [], (
                f"seed {seed}: loaded wrongly"
            )
            break
        else:
            step = 0
        new = self._job.save(copy)
        assert checkpoint.latest(copy) == new, (
            f"seed {seed}: the checkpoint that was saved last is not the latest"
        )
        shutil.rmtree(copy)
        return f"{damage.__name__}: {'nothing sound' if not step else f'{len(said)} refused'}"
