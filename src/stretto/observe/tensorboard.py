"""TensorBoard events, with the optional package of that name."""

import math
from pathlib import Path

from stretto.errors import MissingExtra
from stretto.records import Incident, Update


class TensorBoard:
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
        """See `Observer.updated`."""
        self._add("train/loss", update.loss, update.step)
        self._add("train/gradient_norm", update.gradient_norm, update.step)
        self._add("train/learning_rate", update.learning_rates[0], update.step)
        self._add("speed/samples_per_second", update.samples / update.seconds, update.step)
        self._add("speed/exposed_share", update.exposed_seconds / update.seconds, update.step)
        self._add("speed/lane_share", update.lane_seconds / update.seconds, update.step)
        self._add("speed/sent_bytes", update.sent_bytes, update.step)
        self._add("data/wait_share", update.wait_seconds / update.seconds, update.step)
        if update.echoed or update.fresh:
            self._add("data/fresh_share", update.fresh / (update.fresh + update.echoed), update.step)
        if math.isfinite(update.first_use_loss):
            self._add("train/first_use_loss", update.first_use_loss, update.step)

    def noticed(self, incident: Incident) -> None:
        """See `Observer.noticed`: damage is no curve."""

    def evaluated(self, step: int, heldout_loss: float, training_seconds: float) -> None:
        """See `Observer.evaluated`."""
        self._add("heldout/loss", heldout_loss, step)
        self._add("heldout/training_seconds", training_seconds, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()

    def _add(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)
