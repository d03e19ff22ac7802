"""The content of a folder of a run or comparison, as far as it can be read."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from stretto.errors import ConfigError
from stretto_lab.page.records import items, mapping, number, read_json, read_records

Column = NDArray[np.float64]

UNKNOWN = "-"
"""Replaces a missing number."""
STEADY_AFTER = 3
"""Number of first updates that an average skips if there are later ones: memory is new and overlap only begins."""
_LIMITS = 0.2
"""Share of an update above which waiting counts as the run's limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateTime:
    """Seconds of an average update on rank 0; mostly NaN for a stock method, which does not report these parts."""

    seconds: float
    exposed: float
    """Seconds of waiting for other ranks."""
    data: float
    """Seconds of waiting for the loader."""
    lane: float
    """Seconds for which the communication lane was busy; these overlap the computing if the strategy overlaps."""
    updates: int
    """Number of updates in the average."""

    @property
    def compute(self) -> float:
        """Seconds without the waiting."""
        return float(np.maximum(0.0, self.seconds - self.exposed - self.data))

    @classmethod
    def of_updates(cls, columns: Mapping[str, Column]) -> Self | None:
        """Return the average of a run, without evaluations and checkpoints; None if it has fewer than two updates."""
        ends = columns["training_seconds"]
        first = STEADY_AFTER if len(ends) > STEADY_AFTER + 1 else 1
        if len(ends) < first + 1:
            return None
        exposed, data, lane = (
            float(np.nan_to_num(columns[name][first:]).mean())
            for name in ("exposed_seconds", "wait_seconds", "lane_seconds")
        )
        count = len(ends) - first
        seconds = float(ends[-1] - ends[first - 1]) / count
        return cls(seconds, exposed, data, lane, count) if np.isfinite(seconds) else None

    @classmethod
    def of_totals(cls, record: Mapping[str, Any]) -> Self | None:
        """Return the average of an arm of a comparison, including its first updates; None if it is not known."""
        names = ("updates", "seconds", "exposed_seconds", "wait_seconds", "lane_seconds")
        updates, seconds, exposed, data, lane = (number(record.get(name)) for name in names)
        if not (updates > 0 and seconds > 0):
            return None
        data = float(np.nan_to_num(data))
        return cls(seconds / updates, exposed / updates, data / updates, lane / updates, int(updates))


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One run, or one arm of a comparison."""

    name: str
    evaluations: Column
    """A row for every evaluation: updates before it, training seconds, held-out loss."""
    time: UpdateTime | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """The content of a folder."""

    name: str
    facts: dict[str, str]
    """Facts about the run, in the order of the page."""
    runs: Sequence[Run]
    events: Sequence[Sequence[str]] = ()
    """Damage, repairs and restarts: update, kind and text."""
    gaps: list[str]
    """The parts that could not be read."""


def read_folder(path: Path, name: str) -> Contents:
    """Return the content of a folder, under a name that the caller gives.

    Raises:
        ConfigError: It is neither the folder of a run nor of a comparison.
    """
    if (path / "compare.json").is_file() and not (path / "config.json").is_file():
        return _read_comparison(path, name)
    if (path / "config.json").is_file() or (path / "updates.jsonl").is_file():
        return _read_run(path, name)
    raise ConfigError(
        f"{path}: expected the folder of a run or a comparison, found "
        f"{'no config.json, compare.json' if path.is_dir() else 'no folder'}"
    )


def _read_run(path: Path, name: str) -> Contents:
    gaps: list[str] = []
    config = read_json(path / "config.json", gaps)
    records = list(read_records(path, "updates.jsonl", gaps, expected=True))
    if not records:
        gaps.append("no update is recorded")
    names = ["step", "training_seconds", "samples", "sent_bytes", "skipped_rounds"]
    names += ["exposed_seconds", "wait_seconds", "lane_seconds"]
    columns = {one: np.array([number(record.get(one)) for record in records]) for one in names}
    run = Run(
        name,
        _evaluations(read_records(path, "evaluations.jsonl", gaps, expected=True)),
        UpdateTime.of_updates(columns),
    )
    memory = [
        number(one.get("peak_bytes")) for one in read_records(path, "memory.jsonl", gaps, expected=False)
    ]
    facts = {
        **_verdict(run.time),
        **_about(config, path),
        **_outcome(run, columns, config),
        **({"memory of rank 0": f"{memory[-1] / 1e6:,.0f} MB at most"} if memory else {}),
    }
    return Contents(name=name, facts=facts, runs=[run], events=_events(path, columns, gaps), gaps=gaps)


def _read_comparison(path: Path, name: str) -> Contents:
    gaps: list[str] = []
    content = read_json(path / "compare.json", gaps)
    arms = [mapping(one) for one in items(content.get("runs"))]
    if not arms:
        gaps.append("no run of the comparison is recorded")
    is_repeated = len({str(one.get("repeat")) for one in arms}) > 1
    environment, comparison = mapping(content.get("environment")), mapping(content.get("comparison"))
    facts = {
        "model and data": _settings(comparison.get("task")),
        "arms": ", ".join(map(str, items(comparison.get("strategies")))) or "unknown",
        "ranks": str(environment.get("workers", "unknown")),
        "link": str(environment.get("link", "unknown")),
        **_machine(environment),
    }
    runs = [
        Run(
            f"{one.get('strategy')} ({name}" + (f", seed {one.get('seed')})" if is_repeated else ")"),
            _evaluations(map(mapping, items(one.get("evaluations")))),
            UpdateTime.of_totals(one),
        )
        for one in arms
    ]
    return Contents(name=name, facts=facts, runs=runs, gaps=gaps)


def formatted(value: float, pattern: str) -> str:
    """Return a number in a format of `str.format`, or the sign for a missing number."""
    return pattern.format(value) if np.isfinite(value) else UNKNOWN


def _evaluations(records: Iterable[Mapping[str, Any]]) -> Column:
    names = ("step", "training_seconds", "heldout_loss")
    rows = [[number(one.get(name)) for name in names] for one in records]
    return np.array(rows, dtype=float).reshape(-1, 3)


def _verdict(time: UpdateTime | None) -> dict[str, str]:
    """Return the limit of a run and the advice; nothing if its times are not known."""
    if time is None or not np.isfinite(time.exposed) or not time.seconds > 0:
        return {}
    link, data = time.exposed / time.seconds, time.data / time.seconds
    if max(link, data) < _LIMITS:
        found = f"computing: {1 - link - data:.0%} of an update; there is little to hide"
    elif link >= data:
        found = (
            f"the link, or a slower rank: {link:.0%} of an update waited for other ranks. stretto plan says which "
            "strategy and wire would wait less"
        )
    else:
        found = f"the data: {data:.0%} of an update waited for them. stretto diagnose names a remedy"
    return {"what limited it": found}


def _about(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return what a configuration says about a run; its command has all other options."""
    command = mapping(config.get("command"))
    words = ["stretto train", str(command.get("recipe")), *map(str, items(command.get("options")))]
    is_virtual = (path / "trace.jsonl").exists()
    count = number(config.get("parameters"))
    facts = {
        "command": " ".join(words) if command else "",
        "model and data": _settings(config.get("task")),
        "strategy": str(config.get("resolved_strategy", config.get("strategy", "unknown strategy"))),
        "parameters": f"{count:,.0f}" if np.isfinite(count) else "",
        "wire": str(config.get("wire", "unknown")),
        "ranks": f"{config.get('workers', 'unknown')}{', virtual: all times are virtual' if is_virtual else ''}",
        "link": "" if is_virtual else str(config.get("link", "none")),
        **_machine(mapping(config.get("environment"))),
    }
    return {name: text for name, text in facts.items() if text not in ("", "none")}


def _machine(found: Mapping[str, Any]) -> dict[str, str]:
    """Return processor and versions, as `describe_environment` records them."""
    if not found:
        return {}
    processor = f"{found.get('processor')}, {found.get('cores')} cores"
    device = f"{found['cuda']}; {processor}" if found.get("cuda") else processor
    commit = f", commit {found['commit']}" if found.get("commit") else ""
    return {
        "machine": f"{device}; {found.get('system')}",
        "versions": f"PyTorch {found.get('torch')}, Python {found.get('python')}{commit}",
    }


def _settings(record: object) -> str:
    """Return settings in one line, without unset ones and without nested records."""
    settings = [
        f"{name} {value}"
        for name, value in mapping(record).items()
        if value is not None
        and not any(isinstance(one, dict) for one in (value if isinstance(value, list) else [value]))
    ]
    return ", ".join(settings) or "unknown"


def _outcome(run: Run, columns: Mapping[str, Column], config: Mapping[str, Any]) -> dict[str, str]:
    count = len(columns["step"])
    facts = {"updates": f"{count:,}"}
    if count:
        seconds, samples = columns["training_seconds"][-1], np.nansum(columns["samples"])
        facts["training"] = (
            f"{formatted(seconds, '{:,.1f}')} s, {samples:,.0f} samples, "
            f"{np.nansum(columns['sent_bytes']) / 1e6:,.1f} MB sent by rank 0"
        )
        time = run.time
        if time is not None and time.seconds > 0:
            rate = np.nansum(columns["samples"][-time.updates :]) / (time.updates * time.seconds)
            tokens = rate * number(config.get("tokens_per_sample"))
            facts["speed"] = f"{rate:,.3g} samples per second"
            facts["speed"] += f", {tokens:,.0f} tokens per second" if np.isfinite(tokens) else ""
    losses = run.evaluations[:, 2]
    if len(losses):
        named = {"before": losses[0], "last": losses[-1], "least": np.nanmin([*losses, np.inf])}
        texts = [f"{formatted(loss, '{:.4f}')} {name}" for name, loss in named.items()]
        unit = str(config.get("loss_unit") or "")
        facts["held-out loss"] = ", ".join(texts) + (f"; {unit}" if unit else "")
    return facts


def _events(path: Path, columns: Mapping[str, Column], gaps: list[str]) -> list[list[str]]:
    """Return the repairs, incidents and skipped rounds of a run, in the order of its updates."""
    found: list[tuple[float, str, str]] = []
    for file in sorted(path.glob("strikes/rank-*.jsonl")):
        for one in read_records(path, str(file.relative_to(path)), gaps, expected=False):
            strikes, elements = number(one.get("strikes")), number(one.get("elements"))
            again = f" {strikes:.0f} times" if strikes > 1 else ""
            text = (
                f"{one.get('site')} of rank {one.get('rank')} damaged on purpose{again}: {one.get('pattern')}, "
                f"{formatted(elements, '{:,.0f}')} {'value' if elements == 1 else 'values'}"
            )
            found.append((number(one.get("step")), "fault", text))
    for one in read_records(path, "incidents.jsonl", gaps, expected=False):
        ranks, link = ", ".join(map(str, items(one.get("ranks")))), items(one.get("link"))
        whom = f"rank {ranks}" if ranks else "no rank can be named"
        way = f", on the way from rank {link[0]} to rank {link[1]}" if len(link) == 2 else ""
        text = f"{one.get('site')} damaged ({one.get('part')}; {whom}{way}), found by {one.get('guard')}: "
        found.append((number(one.get("step")), "incident", text + str(one.get("action"))))
    for one in read_records(path, "quarantine.jsonl", gaps, expected=False):
        steps = [number(mapping(incident).get("step")) for incident in items(one.get("incidents"))]
        goes_on = one.get("goes_on_with")
        then = "the run ended" if goes_on is None else f"continued with {goes_on} ranks"
        left_out = ", ".join(map(str, items(one.get("left_out")))) or "nobody"
        text = f"{one.get('cause')}; without: {left_out}; from {one.get('checkpoint')}: {then}"
        found.append((max(steps, default=np.nan), "restart", text))
    for step, count in zip(columns["step"], columns["skipped_rounds"], strict=True):
        if count > 0:
            found.append((step, "skipped", f"{count:.0f} rounds were not finite, and skipped"))
    found.sort(key=lambda event: np.nan_to_num(event[0]))
    return [[formatted(step, "{:,.0f}"), kind, text] for step, kind, text in found]
