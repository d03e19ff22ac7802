"""Curves in TensorBoard."""

import math
from pathlib import Path

from stretto.errors import MissingExtra
from stretto.records import Update
from stretto_lab.observe.records import Observer


class TensorBoard(Observer):
    """Writes one curve per number of an update, over committed updates.

    Args:
        folder: Where the event files lie.
        resumed_from: Committed updates of the checkpoint that the run continues from: TensorBoard hides what
            was recorded later. None for a new run.

    Raises:
        MissingExtra: `tensorboard` is not installed.
    """

    def __init__(self, folder: Path, resumed_from: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra("tensorboard", "cli", "writing TensorBoard events") from error
        purge_step = None if resumed_from is None else resumed_from + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def updated(self, update: Update, training_seconds: float) -> None:
        curves = {
            "train/loss": update.loss,
            "train/gradient_norm": update.gradient_norm,
            "speed/samples_per_second": update.samples / update.seconds,
            "speed/exposed_share": update.exposed_seconds / update.seconds,
            "speed/lane_share": update.lane_seconds / update.seconds,
            "speed/sent_bytes": update.sent_bytes,
            "data/wait_share": update.wait_seconds / update.seconds,
        }
        if math.isfinite(update.learning_rates[0]):
            curves["train/learning_rate"] = update.learning_rates[0]
        if update.fresh + update.echoed:
            curves["data/fresh_share"] = update.fresh / (update.fresh + update.echoed)
        if math.isfinite(update.first_use_loss):
            curves["train/first_use_loss"] = update.first_use_loss
        for name, found in (
            ("noise", update.noise),
            ("divergence", update.divergence),
            ("interval", update.interval),
        ):
            if found is not None:
                curves[f"averages/{name}"] = found
        for name, value in curves.items():
            self._writer.add_scalar(name, value, update.step)

    def evaluated(self, step: int, heldout_loss: float, training_seconds: float) -> None:
        self._writer.add_scalar("heldout/loss", heldout_loss, step)
        self._writer.add_scalar("heldout/training_seconds", training_seconds, step)

    def close(self) -> None:
        self._writer.close()
