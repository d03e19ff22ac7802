"""Whoever wants to hear of updates and evaluations."""

from pathlib import Path
from typing import Protocol

from stretto.observe.json_lines import JsonLines, append_json_line
from stretto.records import Update, Verdict


class Observer(Protocol):
    """Hears of a run on one rank; must not touch model, optimizer or random states."""

    def updated(self, update: Update, training_seconds: float) -> None:
        """Take note of a committed update, `training_seconds` of training after the start."""
        ...

    def noticed(self, verdict: Verdict) -> None:
        """Take note of damage that was found outside an update."""
        ...

    def evaluated(self, step: int, heldout_loss: float, training_seconds: float) -> None:
        """Take note of the held-out loss after `step` committed updates."""
        ...

    def close(self) -> None:
        """End; nothing more will come."""
        ...


class Recorder:
    """Writes `updates.jsonl`, one object per update, and `evaluations.jsonl`, one per evaluation.

    What guards have found goes to `verdicts.jsonl` too, and stays there when the run goes back to a checkpoint.

    Args:
        folder: Where both files lie.
        resumed_from: Committed updates of the checkpoint that the run continues from: later records, which the
            run makes again, are dropped. None begins both files.
    """

    def __init__(self, folder: Path, resumed_from: int | None) -> None:
        self._updates = JsonLines(folder / "updates.jsonl", keep_until=resumed_from)
        self._evaluations = JsonLines(folder / "evaluations.jsonl", keep_until=resumed_from)
        self._verdicts = folder / "verdicts.jsonl"

    def updated(self, update: Update, training_seconds: float) -> None:
        """See `Observer.updated`; `training_seconds` stands beside the update's own fields."""
        for verdict in update.verdicts:
            self.noticed(verdict)
        self._updates.write({**update.as_json(), "training_seconds": training_seconds})

    def noticed(self, verdict: Verdict) -> None:
        """See `Observer.noticed`."""
        append_json_line(self._verdicts, verdict.as_json())

    def evaluated(self, step: int, heldout_loss: float, training_seconds: float) -> None:
        """See `Observer.evaluated`."""
        self._evaluations.write(
            {"step": step, "heldout_loss": heldout_loss, "training_seconds": training_seconds}
        )

    def close(self) -> None:
        """Close both files."""
        self._updates.close()
        self._evaluations.close()
