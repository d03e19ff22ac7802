"""The curves of a run for the page: no more points than a screen can show, whatever the length of the run."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto_lab.page.contents import Column, Run
from stretto_lab.page.times import UpdateTime

POINTS = 1000
"""Of a curve: more than a chart has pixels, so that nothing is lost on the screen."""


def plain(values: Column | Sequence[float]) -> list[float | int | None]:
    """Return numbers as JSON has them: whole ones without a fraction, and None for those that are missing."""
    return [None if not np.isfinite(one) else int(one) if one == int(one) else float(one) for one in values]


def curves(run: Run) -> dict[str, Any]:
    """Return everything that is drawn of a run, by chart."""
    evaluated = _extremes(run.evaluations[:, 1])
    drawn: dict[str, Any] = {
        "name": run.name,
        "heldout": {**_axes(run.evaluation_axes, evaluated), "y": plain(run.evaluations[evaluated, 1])},
        "time": None,
    }
    if run.time is not None:
        names = ("compute", "exposed", "data", "undivided")
        drawn["time"] = dict(zip(names, plain([1000 * one for one in _time(run.time)]), strict=True))
    if run.columns and len(run.columns["step"]):
        kept = _extremes(run.columns["loss"])
        drawn["loss"] = {**_axes(run.axes, kept), "y": plain(run.columns["loss"][kept])}
        drawn["events"] = _events(run)
    return drawn


def _time(time: UpdateTime) -> tuple[float, ...]:
    """Return the parts of an average update, and what cannot be divided; NaN for what is not."""
    undivided = np.nan if np.isfinite(time.compute) else time.seconds - time.data
    return time.compute, time.exposed, time.data, undivided


def _axes(axes: dict[str, Column], kept: Any) -> dict[str, list[Any]]:
    return {name: plain(axis[kept]) for name, axis in axes.items()}


def _extremes(values: Column) -> NDArray[np.intp]:
    """Return the places of the least and the greatest value of each of `POINTS / 2` parts, in order."""
    if len(values) <= POINTS:
        return np.arange(len(values))
    places = []
    for part in np.array_split(np.arange(len(values)), POINTS // 2):
        known = part[np.isfinite(values[part])]
        if len(known):
            places += sorted({known[values[known].argmin()], known[values[known].argmax()]})
    return np.array(places, dtype=int)


def _events(run: Run) -> dict[str, Any]:
    """Return where the run's events lie; at the loss of their update, the nearest one that has any."""
    steps, losses = run.columns["step"], run.columns["loss"]
    shown = [event for event in run.events if np.isfinite(event.step)][:POINTS]
    known = np.flatnonzero(np.isfinite(losses))
    places = np.searchsorted(steps, [event.step for event in shown]).clip(0, len(steps) - 1)
    nearest = known[np.searchsorted(known, places).clip(0, len(known) - 1)] if len(known) else places
    texts = [f"update {event.step:.0f}: {event.kind}: {event.text}"[:300] for event in shown]
    kinds = [event.kind for event in shown]
    return {**_axes(run.axes, places), "y": plain(losses[nearest]), "text": texts, "kind": kinds}
