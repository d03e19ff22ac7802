"""The lines that show a run's progress."""

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import NamedTuple, Self

from stretto.records import Incident, Update
from stretto_lab.observe.records import Observer
from stretto_lab.patience import Patience, clock

WINDOW = 20
"""Updates over which loss and rates are averaged: short enough to follow, long enough not to flicker."""
LINE_SECONDS = 5.0
"""Seconds between two plain lines of updates; the first and the last update always get a line."""
STOPPING = "Stretto finishes and saves this update; a second stop ends at once"
"""The text after a stop signal."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The facts about a run that do not change while it trains."""

    updates: int | None
    """Number of updates that end the run; None if they do not end it."""
    seconds: float | None
    """Seconds of training that end the run; None if they do not end it."""
    samples: int | None = None
    """Number of samples that ends the run; None if they do not end it."""
    is_virtual: bool = False
    """Whether the run's seconds are virtual."""
    loss_unit: str = ""
    """Unit of the run's losses, after a space."""
    tokens_per_sample: int | None = None
    """Tokens in a sample of a language model; None for other models."""
    is_passing: bool = False
    """Whether it is one of many runs: its lines are erased, and one appears only after some silence."""


class Progress(Observer):
    """Shows loss, speed, the shares of time spent waiting and using the network, and the remaining time."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._recent: collections.deque[_Moment] = collections.deque(maxlen=WINDOW + 1)
        self._share: Callable[[], float] = float
        self._last_line = -math.inf
        self._shown_step = -1
        self._doing, self._since = "getting ready", time.monotonic()
        self._patience: Patience | None = None
        self._is_stopped: Callable[[], bool] = bool

    @contextmanager
    def watched(self) -> Iterator[Self]:
        """Print a line at least every few seconds during the block."""
        with closing(Patience(self._still)) as self._patience:
            yield self

    def waits(self, what: str) -> None:
        """Note the reason of a wait; it is printed only if the wait is long."""
        self._doing, self._since = what, time.monotonic()

    def follows(self, *, is_stopped: Callable[[], bool], share: Callable[[], float]) -> None:
        """Set the functions that return whether a stop signal has come, and the finished share of the run."""
        self._is_stopped, self._share = is_stopped, share

    def doing(self, what: str) -> None:
        """Print the current step before the first update."""
        self.waits(what)
        if not self._header.is_passing:
            self._print(what)

    def _print(self, line: object) -> None:
        print(line, flush=True)
        if self._patience is not None:
            self._patience.heard()

    def _still(self) -> str:
        """Return the line that ends a silence."""
        if self._is_stopped():
            return f"{STOPPING}: {self._since_text()}"
        if self._recent and self._shown_step != self._recent[-1].update.step:
            self._shown_step = self._recent[-1].update.step
            return self._line()
        if self._recent:
            return f"update {self._step_text()}: {self._since_text()}"
        return f"{self._doing}: {self._since_text()}"

    def _since_text(self) -> str:
        since = clock(time.monotonic() - self._since)
        return f"{since} since then" if self._recent else f"{since} so far"

    def updated(self, update: Update, training_seconds: float) -> None:
        self._recent.append(_Moment(update, training_seconds, self._share()))
        self._since = time.monotonic()
        for incident in update.incidents:
            self.noticed(incident)
        if not self._header.is_passing and time.monotonic() - self._last_line > LINE_SECONDS:
            self._print_line()

    def noticed(self, incident: Incident) -> None:
        if not self._header.is_passing:
            self._print(incident)

    def evaluated(self, step: int, heldout_loss: float, training_seconds: float) -> None:
        self.close()  # the line of its update comes before
        if not self._header.is_passing:
            unit = self._header.loss_unit
            if unit == " nats per token" and heldout_loss < 100:
                unit += f" (perplexity {math.exp(heldout_loss):,.1f})"
            self._print(f"held-out loss {heldout_loss:.4f}{unit} after {step} updates")

    def close(self) -> None:
        """Print the line of the last update, unless the run is one of many."""
        is_shown = not self._recent or self._shown_step == self._recent[-1].update.step
        if not (is_shown or self._header.is_passing):
            self._print_line()

    def _print_line(self) -> None:
        self._last_line = time.monotonic()
        self._shown_step = self._recent[-1].update.step
        self._print(self._line())

    def _line(self) -> str:
        if len(self._recent) < 2:
            return f"update {self._step_text()}  loss {self._recent[-1].update.loss:.4f}"
        averages = _Averages(self._recent)
        parts = [
            f"update {self._step_text()}",
            f"loss {averages.loss:.4f}",
            speed_text(averages.samples_per_second, self._header.tokens_per_sample),
            f"waiting {averages.exposed_share:.0%}",
            f"network {averages.lane_share:.0%}",
            self._left_text(),
        ]
        if averages.is_echoed:
            parts.append(averages.echo_text)
        if averages.waits:
            parts.append(f"waiting for data {averages.wait_share:.0%}")
        return "  ".join(parts)

    def _step_text(self) -> str:
        last = self._recent[-1]
        text = f"{last.update.step}" + ("" if self._header.updates is None else f"/{self._header.updates}")
        return (
            f"{text}, {last.share:.0%} of {self._header.samples:,} samples" if self._header.samples else text
        )

    def _left_text(self) -> str:
        """Return the time until the run ends, in hours, minutes and seconds."""
        last, averages = self._recent[-1], _Averages(self._recent)
        left = []
        if self._header.updates is not None:
            left.append((self._header.updates - last.update.step) * averages.seconds_per_update)
        if self._header.seconds is not None:
            left.append(self._header.seconds - last.seconds)
        if self._header.samples and averages.share_per_second:
            left.append((1 - last.share) / averages.share_per_second)
        if not left:
            return "unknown left"
        shortest = clock(min(left))
        return f"{shortest} of virtual time left" if self._header.is_virtual else f"{shortest} left"


def speed_text(samples_per_second: float, tokens_per_sample: int | None) -> str:
    """Return a speed in tokens for a language model, otherwise in samples."""
    if tokens_per_sample is None:
        return f"{samples_per_second:,.0f} samples/s"
    return f"{samples_per_second * tokens_per_sample:,.0f} tokens/s"


class _Moment(NamedTuple):
    """The state of a run right after an update."""

    update: Update
    seconds: float
    """Seconds of training so far."""
    share: float
    """Finished share of the run's updates or samples; 0 if they do not end the run."""


class _Averages:
    """Averages over the last updates, without the oldest, which only marks the start of the time."""

    def __init__(self, recent: "collections.deque[_Moment]") -> None:
        updates = [moment.update for moment in recent][1:]
        seconds = max(recent[-1].seconds - recent[0].seconds, 1e-9)
        fresh, echoed = sum(update.fresh for update in updates), sum(update.echoed for update in updates)
        # An update may hold no batch in its first use.
        first_losses = [one.first_use_loss for one in updates if math.isfinite(one.first_use_loss)]
        self.loss = sum(update.loss for update in updates) / len(updates)
        self.seconds_per_update = seconds / len(updates)
        self.share_per_second = (recent[-1].share - recent[0].share) / seconds
        self.samples_per_second = sum(update.samples for update in updates) / seconds
        self.exposed_share = sum(update.exposed_seconds for update in updates) / seconds
        self.lane_share = sum(update.lane_seconds for update in updates) / seconds
        self.wait_share = sum(update.wait_seconds for update in updates) / seconds
        self.waits = self.wait_share >= 0.01
        """Whether waiting for data takes a noticeable share of the time."""
        self.is_echoed = echoed > 0
        self.echo_text = f"{fresh / max(1, fresh + echoed):.0%} fresh batches"
        if first_losses:
            self.echo_text += f", loss on them {sum(first_losses) / len(first_losses):.4f}"
