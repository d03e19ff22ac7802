"""The folder of a run: config.json, updates.jsonl, evaluations.jsonl, tensorboard/, checkpoints/, model.pt."""

import dataclasses
import json
import time
from pathlib import Path

from stretto.errors import ConfigError
from stretto.train.configuration import RunConfig, TaskT
from stretto.train.environment import describe_environment


def new_run_folder(recipe: str) -> str:
    """Return the name of a folder for a run that begins now."""
    return str(Path("runs", f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"))


def prepare_run_folder(run: RunConfig[TaskT]) -> None:
    """Make the run's folder and write its configuration; one process calls this before the ranks begin.

    Raises:
        ConfigError: The folder holds a run already, and this one does not continue it.
    """
    if run.run_dir is None:
        return
    folder = Path(run.run_dir)
    if (folder / "updates.jsonl").exists() and not run.resume:
        raise ConfigError(
            f"{folder} holds a run already: continue it with --resume, or name another --run-dir"
        )
    folder.mkdir(parents=True, exist_ok=True)
    described = {**dataclasses.asdict(run), "environment": describe_environment()}
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
