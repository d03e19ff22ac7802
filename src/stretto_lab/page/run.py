"""The folder of a run of `train` or `simulate`, as far as it can be read."""

from pathlib import Path
from typing import Any

import numpy as np

from stretto_lab.page.contents import (
    Column,
    Contents,
    Event,
    Run,
    describe_machine,
    describe_task,
    formatted,
    read_evaluations,
    unit_of,
)
from stretto_lab.page.records import items, mapping, number, read_json, read_records
from stretto_lab.page.times import UpdateTime, of_updates

_NUMBERS = (
    "step", "samples", "fresh_samples", "loss", "training_seconds", "exposed_seconds", "lane_seconds", "wait_seconds",
    "sent_bytes", "skipped_rounds",
)  # fmt: skip


def read_run(path: Path, name: str) -> Contents:
    """Return the run in a folder; what is missing is named among the gaps."""
    gaps: list[str] = []
    config = read_json(path / "config.json", gaps)
    records = list(read_records(path, "updates.jsonl", gaps, expected=True))
    columns = {field: np.array([number(one.get(field)) for one in records]) for field in _NUMBERS}
    strategy = str(config.get("strategy", "unknown strategy"))
    axes = {
        "updates": columns["step"],
        "samples": np.nancumsum(columns["samples"]),
        "loads": np.cumsum(columns["fresh_samples"]),
        "seconds": columns["training_seconds"],
        "bytes": np.nancumsum(columns["sent_bytes"]),
    }
    evaluations = read_evaluations(read_records(path, "evaluations.jsonl", gaps, expected=True))
    places = {key: _at_steps(evaluations[:, 0], axes["updates"], axis) for key, axis in axes.items()}
    run = Run(
        name=name,
        columns=columns,
        axes=axes,
        evaluations=evaluations[:, :2],
        evaluation_axes={**places, "updates": evaluations[:, 0], "seconds": evaluations[:, 2]},
        events=_events(path, columns, gaps),
        time=of_updates(columns),
    )
    if not records:
        gaps.append("no update is recorded")
    peaks = [
        number(one.get("peak_bytes")) for one in read_records(path, "memory.jsonl", gaps, expected=False)
    ]
    memory = {"memory of rank 0": f"{peaks[-1] / 1e6:,.0f} MB at most"} if peaks else {}
    facts = {
        **_verdict(run.time),
        **_about(config, strategy, path),
        **_outcome(run, unit_of(config)),
        **memory,
    }
    return Contents(path=path, name=name, facts=facts, runs=[run], gaps=gaps)


def _at_steps(steps: Column, known: Column, axis: Column) -> Column:
    """Return the place on an axis of each step; 0 before the first update."""
    if not len(known):
        return np.full(len(steps), np.nan)
    index = np.searchsorted(known, steps, side="right") - 1
    return np.where(index < 0, 0.0, axis[np.maximum(index, 0)])


def _events(path: Path, columns: dict[str, Column], gaps: list[str]) -> list[Event]:
    events = [
        Event(step=number(one.get("step")), kind="fault", text=_strike(one))
        for file in sorted(path.glob("strikes/rank-*.jsonl"))
        for one in read_records(path, str(file.relative_to(path)), gaps, expected=False)
    ]
    events += [
        Event(step=number(one.get("step")), kind="incident", text=_incident(one))
        for one in read_records(path, "incidents.jsonl", gaps, expected=False)
    ]
    for one in read_records(path, "quarantine.jsonl", gaps, expected=False):
        steps = [number(mapping(found).get("step")) for found in items(one.get("incidents"))]
        goes_on = one.get("goes_on_with")
        then = "the run ended" if goes_on is None else f"went on with {goes_on} ranks"
        left_out = ", ".join(map(str, items(one.get("left_out")))) or "nobody"
        text = f"{one.get('cause')}; left out: {left_out}; from {one.get('checkpoint')}: {then}"
        events.append(Event(step=max(steps, default=np.nan), kind="restart", text=text))
    for step, count in zip(columns["step"], columns["skipped_rounds"], strict=True):
        if count > 0:
            events.append(
                Event(step=step, kind="skipped", text=f"{count:.0f} rounds were not finite, and left out")
            )
    return sorted(events, key=lambda event: np.nan_to_num(event.step))


def _strike(record: dict[str, Any]) -> str:
    strikes, elements = number(record.get("strikes")), number(record.get("elements"))
    again = f" {strikes:.0f} times" if strikes > 1 else ""
    return (
        f"{record.get('site')} of rank {record.get('rank')} damaged on purpose{again}: {record.get('pattern')}, "
        f"{formatted(elements, '{:,.0f}')} {'value' if elements == 1 else 'values'}"
    )


def _incident(record: dict[str, Any]) -> str:
    ranks = ", ".join(map(str, items(record.get("ranks"))))
    whom = f"rank {ranks}" if ranks else "nobody can be named"
    link = items(record.get("link"))
    way = f", on the way from rank {link[0]} to rank {link[1]}" if len(link) == 2 else ""
    found = f"{record.get('site')} damaged ({record.get('part')}; {whom}{way})"
    return f"{found}, found by {record.get('guard')}: {record.get('action')}"


_LIMITS = 0.2
"""Share of an update from which waiting is what limits a run."""


def _verdict(time: UpdateTime | None) -> dict[str, str]:
    """Return what limited a run, and what to do about it; nothing where its times are not known."""
    if time is None or not np.isfinite(time.exposed) or not time.seconds > 0:
        return {}
    link, data = time.exposed / time.seconds, time.data / time.seconds
    if max(link, data) < _LIMITS:
        return {"what limited it": f"computing: {1 - link - data:.0%} of an update; there is little to hide"}
    if link >= data:
        return {
            "what limited it": f"the link, or a slower rank: {link:.0%} of an update waited for other ranks. stretto "
            "plan says which strategy and wire would wait less"
        }
    return {
        "what limited it": f"the data: {data:.0%} of an update waited for them. stretto diagnose says what would help"
    }


def _about(config: dict[str, Any], strategy: str, path: Path) -> dict[str, str]:
    """Return what a configuration says about a run, by label."""
    command, machine = mapping(config.get("command")), mapping(config.get("environment"))
    recipe = command.get("recipe", "unknown")
    words = ["stretto train", str(recipe), *map(str, items(command.get("options")))]
    is_virtual = (path / "trace.jsonl").exists()
    faults = [
        f"{one.get('site')} on rank {one.get('rank')}" for one in map(mapping, items(config.get("faults")))
    ]
    slow = [f"rank {rank} by {factor}" for rank, factor in mapping(config.get("slow")).items()]
    return {
        **({"command": " ".join(words)} if command else {}),
        "model and data": describe_task(config.get("task")),
        "strategy": str(config.get("resolved_strategy", strategy)),
        **({"parameters": f"{number(config['parameters']):,.0f}"} if "parameters" in config else {}),
        "wire": str(config.get("wire", "unknown")),
        "ranks": f"{config.get('workers', 'unknown')}{', virtual: all times are virtual' if is_virtual else ''}",
        **({} if is_virtual or _is_off(config, "link") else {"link": str(config["link"])}),
        "micro-batches": _per_update(config),
        **({} if _is_off(config, "echo") else {"echo": str(config["echo"])}),
        **({"guards": ", ".join(map(str, items(config["guards"])))} if items(config.get("guards")) else {}),
        **({"slow on purpose": ", ".join(slow)} if slow else {}),
        **({"damage on purpose": "; ".join(faults)} if faults else {}),
        **({"noise on purpose": describe_task(config["noise"])} if config.get("noise") else {}),
        "seed": str(config.get("seed", "unknown")),
        **describe_machine(machine),
    }


def _is_off(config: dict[str, Any], name: str) -> bool:
    return bool(config.get(name, "none") == "none")


def _per_update(config: dict[str, Any]) -> str:
    clock = mapping(config.get("clock"))
    if clock:
        return f"{clock.get('minimum')} to {clock.get('maximum')} per rank and round, by the clock"
    return f"{config.get('micro_batches', 'unknown')} per rank and update"


def _outcome(run: Run, unit: str) -> dict[str, str]:
    steps, losses = run.columns["step"], run.evaluations[:, 1]
    facts = {"updates": f"{len(steps):,}"}
    if len(steps):
        seconds, samples, sent = (run.axes[name][-1] for name in ("seconds", "samples", "bytes"))
        facts["training"] = (
            f"{formatted(seconds, '{:,.1f}')} s, {samples:,.0f} samples, {sent / 1e6:,.1f} MB sent by rank 0"
        )
    if len(losses):
        named = {"before": losses[0], "last": losses[-1], "least": np.nanmin([*losses, np.inf])}
        facts["held-out loss"] = ", ".join(
            f"{formatted(loss, '{:.4f}')} {name}" for name, loss in named.items()
        )
        facts["held-out loss"] += f"; {unit}" if unit else ""
    return facts
