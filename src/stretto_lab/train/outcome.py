"""The outcome of a run on one rank, a description of its machine, and the run's folder.

The folder contains config.json, updates.jsonl, evaluations.jsonl, memory.jsonl, tensorboard/, checkpoints/ and
model.pt; with injected faults also strikes/; for a model that other libraries can read also model/, and a tokenizer/ if
one was made.
"""

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stretto.disk import UNFINISHED, read_whole
from stretto.errors import ConfigError
from stretto.machine import describe_environment
from stretto_lab.observe import replace_json
from stretto_lab.recipes.task import loss_unit, tokens_per_sample
from stretto_lab.train.arms import parse_arm
from stretto_lab.train.configuration import RunConfig, TaskT
from stretto_lab.train.hold import LOCK

_CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The held-out loss after some update."""

    step: int
    """Number of committed updates before it."""
    training_seconds: float
    """Training time before it."""
    heldout_loss: float
    """Mean loss over the held-out samples, at the committed parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a run on one rank; times and bytes are that rank's own."""

    updates: int
    """Number of committed updates, including those before the checkpoint from which the run resumed."""
    samples: int
    """Samples of all ranks in this process's updates."""
    fresh_samples: int
    """Samples used for the first time."""
    training_seconds: float
    """Training time, without evaluations and checkpoints."""
    cpu_seconds: float
    """Processor time of all threads of the process, during the training time of its updates."""
    samples_per_second: float | None
    """Samples of all ranks per second, from the end of the warm-up to the last update that the loop received; None if
    there are fewer than two updates."""
    exposed_seconds: float | None
    """Time for which the compute lane waited for communication, in this process's updates; None if the method does not
    report it."""
    lane_seconds: float | None
    """Time for which the communication lane was busy, in this process's updates; None if not reported."""
    sent_bytes: int
    """Bytes passed to collectives for other ranks, in this process's updates."""
    fresh_batches: int
    """Micro-batches that this rank took from its loader, for this process's updates."""
    echoed_batches: int
    """Micro-batches that this rank used again."""
    wait_seconds: float
    """Time for which this rank waited for the loader."""
    baseline_bytes: int
    """Peak resident memory of the process when the task was built, before it was wrapped."""
    peak_bytes: int
    """Peak resident memory of the process."""
    heldout_before: float
    """Held-out loss before the first update."""
    heldout_loss: float
    """Held-out loss at the end."""
    seconds_to_loss: float | None
    """Training time when `to_loss` was reached; None if it was not reached or not requested."""
    evaluations: tuple[Evaluation, ...]
    """All evaluations, in order."""
    accuracy: float | None
    """Share of held-out samples that are classified correctly at the end; classifiers only."""
    sample: str | None
    """Text that the model generated at the end; language models only."""
    resumed_from: int = 0
    """Number of committed updates in the checkpoint from which the run resumed; 0 for a new run."""
    seconds_before: float = 0.0
    """The part of `training_seconds` before that checkpoint."""
    faults_struck: int = 0
    """Number of times that injected faults changed values of this rank."""


def seconds_to_loss(evaluations: Sequence[Evaluation], target: float) -> float | None:
    """Return the training time at which `target` was reached, or None.

    A single evaluation at or below the target may be luck, so the next one has to confirm it. The time is interpolated
    linearly between the last evaluation above the target, if its loss is finite, and the first of the two below:

        t = t0 + (t1 - t0) (l0 - target) / (l0 - l1),      l0 > target >= l1

    Args:
        evaluations: Evaluations in the order of time.
        target: The held-out loss to reach.
    """
    for index in range(len(evaluations) - 1):
        first, confirming = evaluations[index], evaluations[index + 1]
        if first.heldout_loss <= target and confirming.heldout_loss <= target:
            return _crossing(evaluations[index - 1], first, target) if index else first.training_seconds
    return None


def _crossing(above: Evaluation, below: Evaluation, target: float) -> float:
    if not math.isfinite(above.heldout_loss):
        return below.training_seconds  # no line leads there
    # The evaluation before a confirmed pair is above the target, or it would have been the pair's first.
    share = (above.heldout_loss - target) / (above.heldout_loss - below.heldout_loss)
    return above.training_seconds + share * (below.training_seconds - above.training_seconds)


def new_run_folder(recipe: str) -> str:
    """Return a name for the folder of a new run."""
    return str(Path("runs", f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"))


def prepare_run_folder(
    run: RunConfig[TaskT], command: Mapping[str, Any] | None = None, device: torch.device = _CPU
) -> None:
    """Make the run's folder and write its configuration; one process calls this before the ranks start.

    Args:
        run: The run; one without a folder leaves no files.
        command: The command line, to keep with the configuration.
        device: Kind of device for the models of this machine's ranks.

    Raises:
        ConfigError: The folder contains a run that this run does not resume, or files that no run has written. Nothing
            was written.
        DiskError: It cannot be written.
    """
    if run.run_dir is None:
        return
    folder = Path(run.run_dir)
    check_folder(folder, resume=run.resume)
    described = {
        **dataclasses.asdict(run),
        "resolved_strategy": parse_arm(run.strategy).resolved,
        "loss_unit": loss_unit(run.task).strip(),
        "tokens_per_sample": tokens_per_sample(run.task),
        "environment": describe_environment(device),
    }
    if command is not None:
        described["command"] = command
    replace_json(folder / _CONFIG, described)


def note_parameters(folder: Path, count: int) -> None:
    """Add the model's number of parameters to a run's configuration, once a rank has built the model."""
    path = folder / _CONFIG
    if path.is_file():
        replace_json(path, {**json.loads(read_whole(path)), "parameters": count})


_CONFIG = "config.json"
"""The first file of a run: a folder with other files and without this one is not a run's folder."""
_OURS = (
    _CONFIG,
    "updates.jsonl",
    "evaluations.jsonl",
    "memory.jsonl",
    "incidents.jsonl",
    "quarantine.jsonl",
    "model.pt",
)
_OUR_FOLDERS = ("checkpoints", "model", "strikes", "tensorboard", "tokenizer", "traces")


def check_folder(folder: Path, *, resume: bool) -> None:
    """Raise unless the folder is new, empty, or a run's folder that is to be resumed.

    Raises:
        ConfigError: It is none of these.
    """
    try:
        # A run that was killed while it wrote its first file has left that one.
        names = (entry.name for entry in folder.iterdir())
        found = sorted(name for name in names if name != LOCK and not name.endswith(UNFINISHED))
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{folder} cannot be the folder of a run: {error.strerror}") from error
    if not found:
        return
    # A configuration that is gone can be written anew, among nothing but what runs write.
    is_lost = _CONFIG not in found and set(found) <= {*_OURS, *_OUR_FOLDERS}
    if not is_lost and not _is_configuration(folder / _CONFIG):
        raise ConfigError(
            f"{folder} holds {', '.join(found[:3])}{' and more' if len(found) > 3 else ''}, and not the {_CONFIG} of "
            "a run: expected a folder that is new or empty; name another --run-dir"
        )
    if not resume:
        raise ConfigError(
            f"{folder} holds a run already: continue it with --resume, or name another --run-dir"
        )
    odd = [name for name in (*_OURS, *_OUR_FOLDERS) if not _has_kind(folder / name, name in _OUR_FOLDERS)]
    if odd:
        raise ConfigError(
            f"{folder / odd[0]} is not from a run: expected a "
            f"{'folder' if odd[0] in _OUR_FOLDERS else 'file'}, and no link; move it away"
        )


def _has_kind(path: Path, is_folder: bool) -> bool:
    """Return whether a path does not exist, or is the kind of file that a run writes there."""
    if path.is_symlink() or not path.exists():
        return not path.is_symlink()
    return path.is_dir() if is_folder else path.is_file()


def _is_configuration(path: Path) -> bool:
    try:
        content = json.loads(read_whole(path))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and {"task", "strategy", "environment"} <= content.keys()
