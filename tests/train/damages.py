"""Random damage to the folder of a run, and what may become of the run that is resumed from it.

From whichever checkpoint a run goes on, it ends with the same bits. So it does not matter how much of a folder is
damaged: the resumed run ends as the undisturbed one did, or is refused in one line.
"""

import io
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stretto import checkpoint
from stretto.errors import StrettoError
from stretto.groups import SoloGroup
from stretto_lab.cli.commands import CONFIGURE
from stretto_lab.cli.options import parse_options
from stretto_lab.cli.run_folder import command_of, run_folder
from stretto_lab.observe import read_json_lines
from stretto_lab.train.rank import RankContext, train_at
from tests.train.runs import evaluations, model_bits, records

RECIPE = f"{Path(__file__).with_name('tiny.py')}:Tiny"
OPTIONS = [
    "--strategy", "acco", "--updates", "6", "--micro-batches", "2", "--workers", "1", "--checkpoint-every", "2",
    "--evaluate-every", "2", "--no-tensorboard",
]  # fmt: skip
Damage = Callable[[random.Random, Path, Path], None]
"""Does something to a file, which is in this folder of a run."""


class Planted:
    """A value whose unpickling makes a folder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("was-run",)


def flip(draw: random.Random, file: Path, run: Path) -> None:
    """Flip one to eight bits."""
    content = bytearray(file.read_bytes())
    for _ in range(draw.randint(1, 8)):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def cut(draw: random.Random, file: Path, run: Path) -> None:
    """Cut the file anywhere, or leave nothing of it."""
    content = file.read_bytes()
    file.write_bytes(content[: draw.choice([0, draw.randrange(len(content))])])


def delete(draw: random.Random, file: Path, run: Path) -> None:
    """Delete the file, or the folder that it is in."""
    if file.parent != run and draw.random() < 0.3:
        shutil.rmtree(file.parent)
    else:
        file.unlink()


def duplicate(draw: random.Random, file: Path, run: Path) -> None:
    """Put it into the place of another, or a whole checkpoint under a newer name."""
    if file.parent != run and draw.random() < 0.5:
        shutil.copytree(file.parent, file.parent.with_name("000009-step-9"), dirs_exist_ok=True)
    else:
        shutil.copy(file, draw.choice([other for other in files(run) if other != file]))


def nest(draw: random.Random, file: Path, run: Path) -> None:
    """Put JSON there that is deep, large, or of another form."""
    large = f"[{'0,' * 10**6}0]"
    file.write_text(draw.choice(["[" * 100_000, '{"step": ' * 100_000, "9" * 5000, large, "{}", "[]\n"]))


def plant(draw: random.Random, file: Path, run: Path) -> None:
    """Put a pickle there that would leave a trace."""
    if draw.random() < 0.5:
        file.write_bytes(pickle.dumps(Planted()))
    else:
        stream = io.BytesIO()
        torch.save(Planted(), stream)
        file.write_bytes(stream.getvalue())


def replace(draw: random.Random, file: Path, run: Path) -> None:
    """Put something there that is no file."""
    target, kind = (
        file.with_name("elsewhere"),
        draw.choice(["folder", "pipe", "nowhere", "itself", "zero", "moved"]),
    )
    shutil.move(file, target)
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to({"nowhere": run / "gone", "itself": file, "zero": "/dev/zero", "moved": target}[kind])
    if kind != "moved":
        target.unlink()


def link(draw: random.Random, file: Path, run: Path) -> None:
    """Put a link into the place of a folder."""
    folder = file.parent if file.parent != run else run / "checkpoints"
    shutil.move(folder, run.with_name(f"{run.name}-moved"))
    folder.symlink_to(run.with_name(f"{run.name}-moved" if draw.random() < 0.5 else "gone"))


def strange(draw: random.Random, file: Path, run: Path) -> None:
    """Put something beside the checkpoints that nobody has saved."""
    name = draw.choice(
        ["000009-step-9", "000005-step-6", ".writing-000009-step-9", ".removing-000001-step-1", "notes"]
    )
    if draw.random() < 0.5:
        (run / "checkpoints" / name).write_bytes(draw.randbytes(99))
    else:
        (run / "checkpoints" / name / "manifest.json").mkdir(parents=True)


DAMAGES: tuple[Damage, ...] = (flip, cut, delete, duplicate, nest, plant, replace, link, strange)
"""Grown, exchanged and stale files are among the damages of checkpoints."""


def files(run: Path) -> list[Path]:
    """Return the files of a run."""
    return sorted(path for path in run.rglob("*") if path.is_file())


class DamagedRuns:
    """A run of which any number of damaged copies can be resumed.

    Args:
        folder: Where it lies, and the copies.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._whole = folder / "whole"
        perform([RECIPE, *OPTIONS, "--run-dir", str(self._whole)])
        self._before = {name: written(self._whole, name) for name in ("records", "evaluations", "model")}

    def outcome(self, seed: int) -> str:
        """Damage a copy, resume it, and return what came of it.

        Raises:
            AssertionError: It ended in another way than it may; the message names the seed.
        """
        draw = random.Random(seed)
        run = self._folder / f"copy-{seed}"
        shutil.copytree(self._whole, run)
        damage = DAMAGES[seed % len(DAMAGES)]
        newest = max(path.name for path in (run / "checkpoints").iterdir())
        whole = [file for file in files(run) if draw.random() < 0.5 or file.parent.name == newest]
        targets = draw.sample([file for file in whole if file.stat().st_size], draw.randint(1, 2))
        for file in targets if damage not in (link, strange) else targets[:1]:
            if file.exists():
                damage(draw, file, run)
        names = [path.relative_to(self._whole) for path in files(self._whole)]
        changed = {name for name in names if digest(run / name) != digest(self._whole / name)}
        # Beside the checkpoints a link is refused, wherever it leads.
        changed |= {name for name in names if len(name.parts) == 1 and (run / name).is_symlink()}
        is_stale = any(
            size(run / name) != size(self._whole / name)  # all else may be in a piece that nobody reads
            for name in changed
            if name.parts[1:2] == (newest,) and (run / "checkpoints" / newest).is_dir()
        )
        outcome, said = self._resume(run)
        assert "\n" not in said, f"seed {seed}: {said}"
        assert not Path("was-run").exists(), f"seed {seed}: a planted pickle was run"
        hit = {name.parts[1] for name in changed if name.parts[0] == "checkpoints"}
        is_sound = len(hit) < len(list((self._whole / "checkpoints").iterdir()))
        if (
            is_sound
            and damage not in (link, strange)
            and all(name.parts[0] == "checkpoints" for name in changed)
        ):
            assert outcome == "ended", f"seed {seed}: {outcome}, although a checkpoint is sound: {said}"
        if outcome == "ended":
            self._check(seed, run, changed, is_stale=is_stale)
        for copy in self._folder.glob(f"copy-{seed}*"):
            copy.unlink() if copy.is_symlink() else shutil.rmtree(copy)
        return f"{damage.__name__}: {outcome}"

    def _resume(self, run: Path) -> tuple[str, str]:
        """Return what came of it, and the message where it was refused."""
        try:
            return self._perform(run), ""
        except StrettoError as error:
            return f"refused: {type(error).__name__}", str(error)

    def _perform(self, run: Path) -> str:
        before = command_of(run)
        words = [before["recipe"], *before["options"], "--run-dir", str(run), "--resume"]
        if words != [RECIPE, *OPTIONS, "--run-dir", str(self._whole), "--run-dir", str(run), "--resume"]:
            return "another command"  # its own text was hit, and what it says can be
        perform(words)
        return "ended"

    def _check(self, seed: int, run: Path, changed: set[Path], *, is_stale: bool) -> None:
        for name, of in (
            ("records", "updates.jsonl"),
            ("evaluations", "evaluations.jsonl"),
            ("model", "model.pt"),
        ):
            if name == "model" or Path(of) not in changed:  # a digit of a record can be hit and nobody knows
                assert written(run, name) == self._before[name], f"seed {seed}: other {name}"
        told = [incident["part"] for incident in read_json_lines(run / "incidents.jsonl")]
        assert not is_stale or told, f"seed {seed}: the newest checkpoint was passed over and nobody was told"
        latest = checkpoint.latest(run / "checkpoints")
        assert latest is not None, f"seed {seed}: no checkpoint is left"


def perform(words: list[str]) -> None:
    """Train on one rank in this process, as `stretto train` would in a process of its own."""
    named, run = parse_options("train", words, CONFIGURE["train"])
    with run_folder(run, named, words[1:], torch.device("cpu")):
        context = RankContext(rank=0, world_size=1, device=torch.device("cpu"), group=SoloGroup())
        train_at(context, run, 0)


def written(run: Path, name: str) -> Any:
    """Return records, evaluations or model of a run."""
    return {"records": records, "evaluations": evaluations, "model": model_bits}[name](str(run))


def digest(path: Path) -> int | None:
    """Return something that changes with the content of a file."""
    return hash(path.read_bytes()) if path.is_file() else None


def size(path: Path) -> int | None:
    """Return the length of a file."""
    return path.stat().st_size if path.is_file() else None
