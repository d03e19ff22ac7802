"""One run of a record: a `stretto simulate` command with a seed, and what is kept of it."""

import dataclasses
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stretto.errors import CorruptionError, NonFinite
from stretto_lab.observe import read_json_lines
from stretto_lab.train.outcome import Outcome
from stretto_lab.train.simulation import SimulateConfig, simulate

Line = dict[str, Any]
"""What is kept of a run: a line of runs.jsonl."""
Configure = Callable[[Sequence[str]], SimulateConfig[Any]]
"""Reads the words of a `stretto simulate` command."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """What decides a run; the fields by which its line is found."""

    words: str
    """What follows `stretto simulate`, but for the seed."""
    seed: int

    @property
    def command(self) -> str:
        """What to type to see it run."""
        return f"stretto simulate {self.words} --seed {self.seed}"


def perform(simulation: SimulateConfig[Any]) -> Line:
    """Make a run, and return what is kept of it; a run that diverged is kept too.

    Numbers are means over ranks, whose replicas may differ; bytes, waits and fresh batches are those of rank 0.
    """
    started = time.process_time()
    folder = Path(tempfile.mkdtemp(prefix="stretto-reproduce-"))
    error = None
    outcomes: Sequence[Outcome] = ()
    try:
        outcomes = simulate(dataclasses.replace(simulation, run_dir=str(folder / "run"))).values
    except (NonFinite, CorruptionError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        updates = read_json_lines(folder / "run" / "updates.jsonl")
        evaluations = read_json_lines(folder / "run" / "evaluations.jsonl")
        shutil.rmtree(folder, ignore_errors=True)
    kept = _of_ranks(outcomes) if outcomes else {}
    return {
        "error": error,
        **kept,
        "curve": _curve(updates, evaluations),
        "averages": sum(update["gap"] == 0 for update in updates),
        "intervals": sorted({update["interval"] for update in updates if update["interval"]}),
        "divergences": [update["divergence"] for update in updates if update["divergence"] is not None],
        "micro_batches": updates[-1]["micro_batches"] if updates else [],
        "cpu_seconds": round(time.process_time() - started, 2),
    }


def _of_ranks(outcomes: Sequence[Outcome]) -> Line:
    first = outcomes[0]
    accuracies = [outcome.accuracy for outcome in outcomes if outcome.accuracy is not None]
    loss = statistics.fmean(outcome.heldout_loss for outcome in outcomes)
    return {
        "accuracy": statistics.fmean(accuracies) if accuracies else None,
        "heldout_loss": loss if math.isfinite(loss) else None,
        "updates": first.updates,
        "samples": first.samples,
        "training_seconds": first.training_seconds,
        "samples_per_second": first.samples_per_second,
        "exposed_seconds": first.exposed_seconds,
        "sent_bytes": first.sent_bytes,
        "fresh_batches": first.fresh_batches,
    }


def _curve(updates: Sequence[Line], evaluations: Sequence[Line]) -> list[Line]:
    """Return the evaluations of rank 0, each with the fresh batches, samples and bytes before it."""
    fresh = samples = sent = 0
    points, left = [], list(evaluations)
    for update in [{"step": 0, "fresh": 0, "samples": 0, "sent_bytes": 0}, *updates]:
        fresh, samples = fresh + update["fresh"], samples + update["samples"]
        sent += update["sent_bytes"]
        while left and left[0]["step"] == update["step"]:
            point = left.pop(0)
            counts = {"fresh": fresh, "samples": samples, "sent_bytes": sent}
            points.append(
                {**counts, **{key: point[key] for key in ("step", "training_seconds", "heldout_loss")}}
            )
    return points
