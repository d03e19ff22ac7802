"""Numbers of runs, as the tables of the papers have them."""

import math

from stretto_lab.reproduce.record import Measure
from stretto_lab.reproduce.trial import Line


def _accuracy(line: Line) -> float | None:
    """Return the share that is right, in percent; a run that diverged guesses nothing right."""
    if line["error"]:
        return 0.0
    return None if line["accuracy"] is None else 100 * float(line["accuracy"])


def _loss(line: Line) -> float | None:
    return line.get("heldout_loss")


def _seconds_per_update(line: Line) -> float | None:
    return None if line["error"] else 1000 * line["training_seconds"] / line["updates"]


def _rate(line: Line) -> float | None:
    return line.get("samples_per_second")


def _share_waited(line: Line) -> float | None:
    return None if line["error"] else 100 * line["exposed_seconds"] / line["training_seconds"]


def _sent(line: Line) -> float | None:
    return None if line["error"] else line["sent_bytes"] / 1e6


def _averages(line: Line) -> float | None:
    return None if line["error"] else float(line["averages"])


ACCURACY = Measure(unit="%", of=_accuracy)
LOSS = Measure(unit="nats", of=_loss, digits=3)
MILLISECONDS = Measure(unit="ms an update", of=_seconds_per_update, digits=2)
RATE = Measure(unit="samples a second", of=_rate, digits=0)
WAITED = Measure(unit="% of the time waited", of=_share_waited)
SENT = Measure(unit="MB sent", of=_sent, digits=2)
AVERAGES = Measure(unit="averages", of=_averages, digits=0)


def loads_to(target: float) -> Measure:
    """Return the fresh batches of a rank until the held-out loss falls to `target`, between evaluations on a line."""
    return Measure(unit=f"loads to a loss of {target:g}", of=lambda line: _crossing(line, target, "fresh"))


def loss_at(key: str, amount: float) -> Measure:
    """Return the held-out loss when a run has used `amount`, a number of its curve, between evaluations on a line."""
    return Measure(
        unit=f"nats after {amount:g} {_WORDS[key]}", of=lambda line: _value_at(line, key, amount), digits=3
    )


_WORDS = {"step": "updates", "fresh": "loads", "samples": "samples"}


def seconds_to(target: float) -> Measure:
    """Return the time in which the held-out loss falls to `target`."""
    return Measure(
        unit=f"s to a loss of {target:g}",
        of=lambda line: _crossing(line, target, "training_seconds"),
        digits=2,
    )


def _crossing(line: Line, target: float, axis: str) -> float | None:
    """Return where on an axis the line between two evaluations crosses a loss; None where it never does."""
    before = None
    for point in line["curve"]:
        loss = point["heldout_loss"]
        if loss is None or not math.isfinite(loss):
            before = None
            continue
        if loss <= target:
            if before is None:
                return float(point[axis])
            share = (before["heldout_loss"] - target) / (before["heldout_loss"] - loss)
            return float(before[axis] + share * (point[axis] - before[axis]))
        before = point
    return None


def _value_at(line: Line, axis: str, amount: float) -> float | None:
    """Return the loss where a run has come so far on an axis; None where it never has."""
    before = None
    for point in line["curve"]:
        if point["heldout_loss"] is None:
            return None
        if point[axis] >= amount:
            if before is None or point[axis] == amount:
                return float(point["heldout_loss"])
            share = (amount - before[axis]) / (point[axis] - before[axis])
            return float(before["heldout_loss"] + share * (point["heldout_loss"] - before["heldout_loss"]))
        before = point
    return None
