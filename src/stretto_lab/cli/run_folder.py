"""The folder of a run: `stretto resume` reads it; a folder that stays empty is removed."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from stretto import checkpoint
from stretto.disk import read_whole, replace_file
from stretto.errors import ConfigError
from stretto.fields import did_you_mean
from stretto_lab.recipes import TaskConfig, absolute, digest, names_own
from stretto_lab.train.configuration import RunConfig
from stretto_lab.train.hold import LOCK, held
from stretto_lab.train.outcome import check_folder, prepare_run_folder
from stretto_lab.train.state import checkpoints_of

CONFIG = "config.json"


@contextmanager
def run_folder(
    run: RunConfig[TaskConfig], recipe: str, words: Sequence[str], device: torch.device
) -> Iterator[None]:
    """Make the folder of a run for the block; it stays unless the run fails before its first update.

    A resume writes the configuration only once it trains: options that do not fit the checkpoint would break every
    later resume.

    Args:
        run: The run; it names its folder.
        recipe: As the user wrote it.
        words: The options as the user wrote them.
        device: Kind of device for the models of this machine's ranks.

    Raises:
        ConfigError: The folder holds a run already, and this run does not resume it; or another run is in it.
        DiskError: It cannot be written.
    """
    folder = Path(str(run.run_dir))
    is_new = not folder.exists()
    command = {
        "recipe": absolute(recipe) if names_own(recipe) else recipe,
        "digest": digest(recipe) if names_own(recipe) else None,
        "options": list(words),
    }
    before = command_of(folder) if run.resume and (folder / CONFIG).exists() else None
    if before is not None and before["digest"] not in (None, command["digest"]):
        print(f"note: {recipe} has changed since this run began", flush=True)
    check_folder(folder, resume=run.resume)  # before anything is written there
    former = None if before is None else read_whole(folder / CONFIG)
    records = _records_in(folder)
    with held(folder):
        prepare_run_folder(run, command, device)
        try:
            yield
        except Exception:
            if is_new and {path.name for path in folder.iterdir()} == {CONFIG, LOCK}:
                for name in (CONFIG, LOCK):
                    (folder / name).unlink()
                folder.rmdir()
                with suppress(OSError):  # other runs are in it
                    Path("runs").rmdir()
            raise
        except (KeyboardInterrupt, SystemExit):
            if checkpoint.latest(checkpoints_of(run)) is not None:
                print(f"to continue: {resume_command(run)}", flush=True)
            elif run.checkpoint_every is not None:
                print(f"no checkpoint yet: there is one every {run.checkpoint_every} updates", flush=True)
            raise
        finally:
            # The records behind the checkpoint are cut off, so without a new one they are the beginning of what was.
            if former is not None and records.startswith(_records_in(folder)):
                replace_file(folder / CONFIG, lambda path: path.write_bytes(former))


def _records_in(folder: Path) -> bytes:
    path = folder / "updates.jsonl"
    return read_whole(path) if path.exists() else b""


def command_of(folder: Path) -> dict[str, Any]:
    """Return the command line of the run in `folder`.

    Raises:
        ConfigError: There is no such run.
    """
    if not (folder / CONFIG).is_file():
        beside = [path.parent.name for path in folder.parent.glob(f"*/{CONFIG}") if path.is_file()]
        raise ConfigError(f"{folder} holds no run to resume{did_you_mean(folder.name, beside)}")
    try:
        found = _checked(json.loads(read_whole(folder / CONFIG))["command"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{folder / CONFIG} does not say which command made the run: repeat it with "
            f"--run-dir {shlex.quote(str(folder))} --resume"
        ) from error
    return found


def check_recipe(folder: Path, command: Mapping[str, Any]) -> None:
    """Refuse to import a user's own recipe if its file has changed since the run began.

    Raises:
        ConfigError: The file has changed, or the folder has no digest of it.
    """
    place, kept = command["recipe"], command["digest"]
    if not names_own(place) or (kept is not None and kept == digest(place)):
        return
    why = "keeps no digest of it" if kept is None else "it has changed since the run began"
    raise ConfigError(
        f"{folder / CONFIG} names the recipe {place}, whose code would run, and {why}: if you trust that "
        f"code, name it: stretto resume {shlex.quote(str(folder))} {shlex.quote(place)}"
    )


def _checked(command: Any) -> dict[str, Any]:
    """Return the content of `config.json` if it is what `run_folder` writes; raise otherwise."""
    texts = [
        command["recipe"],
        *command["options"],
        *([] if command["digest"] is None else [command["digest"]]),
    ]
    if type(command) is not dict or type(command["options"]) is not list or set(map(type, texts)) != {str}:
        raise ValueError("expected a recipe, its digest and options")
    return command


def resume_command(run: RunConfig[TaskConfig], *options: str) -> str:
    """Return the command that continues with a run."""
    return shlex.join(["stretto", "resume", str(run.run_dir), *options])
