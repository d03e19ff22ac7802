"""The live display of a run: a panel on a terminal, plain lines elsewhere."""

import collections
import dataclasses
import math
import sys
import time
from typing import TYPE_CHECKING, Any

from stretto.errors import MissingExtra
from stretto.records import Incident, Update

if TYPE_CHECKING:
    from rich.console import RenderableType

WINDOW = 20
"""Updates over which loss and rates are averaged: short enough to follow, long enough not to flicker."""
LINE_SECONDS = 5.0
"""At most one plain line in this time, beside the first and the last."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What does not change during a run."""

    title: str
    """Recipe, strategy, workers, link."""
    updates: int | None
    """Committed updates until the end; None where they do not end the run."""
    seconds: float | None
    """Training seconds until the end; None where they do not end the run."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Averages:
    """Of the last updates."""

    loss: float
    samples_per_second: float
    exposed_share: float
    lane_share: float
    bytes_per_second: float
    seconds_per_update: float
    first_use_loss: float
    """nan without an echo."""
    fresh_share: float
    """1 without an echo."""
    wait_share: float

    @property
    def shows_data(self) -> bool:
        """Whether the data deserve a place: batches are echoed, or waited for noticeably."""
        return self.fresh_share < 1 or self.wait_share >= 0.01


class Progress:
    """Shows loss, samples per second, exposed communication, what the lane does, and the time left."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._recent: collections.deque[tuple[Update, float]] = collections.deque(maxlen=WINDOW + 1)
        self._heldout = "not yet evaluated"
        self._live = _start_live(self) if sys.stdout.isatty() else None
        self._last_line = float("-inf")
        self._shown_step = -1
        if self._live is None:
            print(header.title, flush=True)

    def updated(self, update: Update, training_seconds: float) -> None:
        """See `Observer.updated`."""
        self._recent.append((update, training_seconds))
        for incident in update.incidents:
            self.noticed(incident)
        if self._live is None and time.monotonic() - self._last_line > LINE_SECONDS:
            self._print_line()

    def noticed(self, incident: Incident) -> None:
        """See `Observer.noticed`."""
        self._say(str(incident))

    def evaluated(self, step: int, heldout_loss: float, training_seconds: float) -> None:
        """See `Observer.evaluated`."""
        self._heldout = f"{heldout_loss:.4f} after {step}"
        if self._live is None:
            self._print_last_line()
            print(f"held-out loss {heldout_loss:.4f} after {step} updates", flush=True)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._live is not None:
            self._live.stop()
        else:
            self._print_last_line()

    def __rich__(self) -> "RenderableType":
        """Draw the panel; called by rich several times a second."""
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        rows = Table.grid(padding=(0, 2))
        for name, value in self._rows():
            rows.add_row(f"[dim]{name}[/]", value)
        whole = Table.grid(expand=True)
        whole.add_row(ProgressBar(total=1.0, completed=self._share_done()))
        whole.add_row(rows)
        return Panel(whole, title=self._header.title, title_align="left")

    def _rows(self) -> list[tuple[str, str]]:
        if len(self._recent) < 2:
            return [("update", "waiting for the first ones"), ("held-out", self._heldout)]
        averages = self._averages()
        rows = [
            ("update", f"{self._step_text()}, {self._left_text(averages)} left"),
            ("loss", f"{averages.loss:.4f}"),
            ("held-out", self._heldout),
            ("speed", f"{averages.samples_per_second:,.0f} samples/s"),
            ("exposed", f"{averages.exposed_share:.1%} of the time waits for communication"),
            ("lane", f"{averages.lane_share:.0%} busy, {averages.bytes_per_second / 1e6:,.1f} MB/s sent"),
        ]
        if averages.shows_data:
            rows.append(("data", f"{_fresh(averages)}; {averages.wait_share:.1%} of the time waits for them"))
        return rows

    def _print_last_line(self) -> None:
        if self._recent and self._shown_step != self._recent[-1][0].step:
            self._print_line()

    def _say(self, line: str) -> None:
        """Leave a line on the screen, above the panel where there is one."""
        if self._live is None:
            print(line, flush=True)
        else:
            self._live.console.print(line)

    def _print_line(self) -> None:
        self._last_line = time.monotonic()
        update, _ = self._recent[-1]
        self._shown_step = update.step
        text = f"update {self._step_text()}  loss {update.loss:.4f}"
        if len(self._recent) > 1:
            averages = self._averages()
            text = (
                f"update {self._step_text()}  loss {averages.loss:.4f}  "
                f"{averages.samples_per_second:,.0f} samples/s  exposed {averages.exposed_share:.1%}  "
                f"lane {averages.lane_share:.0%}  {averages.bytes_per_second / 1e6:,.1f} MB/s  "
                f"{self._left_text(averages)} left"
            )
            if averages.shows_data:
                text += f"  {_fresh(averages)}  wait {averages.wait_share:.1%}"
        print(text, flush=True)

    def _averages(self) -> _Averages:
        """Average over the updates after the oldest one kept, which marks the beginning of their time."""
        updates = [update for update, _ in self._recent][1:]
        seconds = max(self._recent[-1][1] - self._recent[0][1], 1e-9)
        return _Averages(
            loss=sum(update.loss for update in updates) / len(updates),
            samples_per_second=sum(update.samples for update in updates) / seconds,
            exposed_share=sum(update.exposed_seconds for update in updates) / seconds,
            lane_share=sum(update.lane_seconds for update in updates) / seconds,
            bytes_per_second=sum(update.sent_bytes for update in updates) / seconds,
            seconds_per_update=seconds / len(updates),
            first_use_loss=_mean([update.first_use_loss for update in updates]),
            fresh_share=sum(update.fresh for update in updates)
            / max(1, sum(update.fresh + update.echoed for update in updates))
            if any(update.echoed for update in updates)
            else 1.0,
            wait_share=sum(update.wait_seconds for update in updates) / seconds,
        )

    def _step_text(self) -> str:
        step = self._recent[-1][0].step
        return str(step) if self._header.updates is None else f"{step}/{self._header.updates}"

    def _left_text(self, averages: _Averages) -> str:
        seconds = _time_left(self._header, *self._recent[-1], averages.seconds_per_update)
        if seconds is None:
            return "unknown"
        minutes, rest = divmod(round(max(0.0, seconds)), 60)
        return f"{minutes}:{rest:02d}"

    def _share_done(self) -> float:
        if not self._recent:
            return 0.0
        update, training_seconds = self._recent[-1]
        shares = [
            done / planned
            for done, planned in (
                (update.step, self._header.updates),
                (training_seconds, self._header.seconds),
            )
            if planned
        ]
        return min(1.0, max(shares, default=0.0))


def _fresh(averages: _Averages) -> str:
    return f"{averages.fresh_share:.0%} fresh batches, loss on them {averages.first_use_loss:.4f}"


def _mean(losses: list[float]) -> float:
    """Return the mean of the losses that are known; an update may hold no first use."""
    known = [loss for loss in losses if math.isfinite(loss)]
    return sum(known) / len(known) if known else math.nan


def _time_left(
    header: Header, update: Update, training_seconds: float, seconds_per_update: float
) -> float | None:
    """Return seconds until the first of the two ends, or None where there is neither."""
    left = []
    if header.updates is not None:
        left.append((header.updates - update.step) * seconds_per_update)
    if header.seconds is not None:
        left.append(header.seconds - training_seconds)
    return min(left, default=None)


def _start_live(progress: Progress) -> Any:
    try:
        from rich.live import Live
    except ImportError as error:
        raise MissingExtra("rich", "cli", "the live display") from error
    live = Live(get_renderable=progress.__rich__, refresh_per_second=4)
    live.start()
    return live
