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
        names = ("compute", "exposed", "data", "undivided", "model")
        drawn["time"] = dict(zip(names, plain([1000 * one for one in _time(run.time)]), strict=True))
    if run.columns and len(run.columns["step"]):
        kept = _extremes(run.columns["loss"])
        drawn["loss"] = {**_axes(run.axes, kept), "y": plain(run.columns["loss"][kept])}
        drawn["events"] = _events(run)
        drawn["parts"] = _parts(run)
        drawn["course"] = _course(run)
        drawn["input"] = _input(run)
        drawn["averages"] = _averages(run)
    return drawn


def _time(time: UpdateTime) -> tuple[float, ...]:
    """Return the parts of an average update, what cannot be divided, and what the model says; NaN for what is not."""
    undivided = np.nan if np.isfinite(time.compute) else time.seconds - time.data
    return time.compute, time.exposed, time.data, undivided, np.nan if time.model is None else time.model


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


def _parts(run: Run) -> dict[str, Any]:
    """Return the milliseconds of an update along the run, by part."""
    columns = run.columns
    seconds = np.diff(columns["training_seconds"], prepend=0.0)
    exposed, data = (np.nan_to_num(columns[name]) for name in ("exposed_seconds", "wait_seconds"))
    values = {"compute": np.maximum(seconds - exposed - data, 0.0), "exposed": exposed, "data": data}
    parts = np.array_split(np.arange(len(seconds)), min(len(seconds), POINTS // 2))
    ends = np.array([part[-1] for part in parts])
    means = {
        name: plain([1000 * float(np.nan_to_num(value[part]).mean()) for part in parts])
        for name, value in values.items()
    }
    return {**_axes(run.axes, ends), **means}


def _course(run: Run) -> dict[str, Any]:
    """Return learning rate, gradient norm and samples per second along the run."""
    columns = run.columns
    seconds = np.diff(columns["training_seconds"], prepend=0.0)
    speed = columns["samples"] / np.where(seconds > 0, seconds, np.nan)
    kept = np.unique(np.linspace(0, len(seconds) - 1, POINTS // 2).astype(int))
    values = {"rate": columns["learning_rate"], "norm": columns["gradient_norm"], "speed": speed}
    return {**_axes(run.axes, kept), **{name: plain(value[kept]) for name, value in values.items()}}


def _input(run: Run) -> dict[str, Any] | None:
    """Return fresh and echoed batches of rank 0, added up; None where nothing was used again."""
    fresh, echoed = (np.nancumsum(run.columns[name]) for name in ("fresh", "echoed"))
    if not echoed[-1] > 0:
        return None
    kept = np.unique(np.linspace(0, len(fresh) - 1, POINTS // 2).astype(int))
    return {**_axes(run.axes, kept), "fresh": plain(fresh[kept]), "echoed": plain(echoed[kept])}


def _averages(run: Run) -> dict[str, Any] | None:
    """Return what averages found of noise, and the intervals chosen there; None where none looked for it."""
    found = np.flatnonzero(np.isfinite(run.columns["noise"]))
    if not len(found):
        return None
    kept = found[np.unique(np.linspace(0, len(found) - 1, POINTS // 2).astype(int))]
    chosen = {name: plain(run.columns[name][kept]) for name in ("interval", "noise", "divergence")}
    return {**_axes(run.axes, kept), **chosen}


def memory(run: Run) -> dict[str, Any]:
    """Return the most memory of rank 0 along a run, in megabytes."""
    known = (
        [*run.memory, *((step, run.memory[-1][1]) for step in run.columns["step"][-1:])] if run.memory else []
    )
    points = known[:: max(1, len(known) // 200)]
    steps, peaks = [float(step) for step, _ in points], [peak / 1e6 for _, peak in points]
    return {"updates": plain(steps), "y": plain(peaks)}
