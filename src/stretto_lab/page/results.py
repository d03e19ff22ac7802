"""The folder of a comparison: its arms."""

from pathlib import Path
from typing import Any

import numpy as np

from stretto_lab.page.contents import (
    Contents,
    Run,
    Table,
    describe_machine,
    describe_task,
    formatted,
    read_evaluations,
)
from stretto_lab.page.records import items, mapping, number, read_json
from stretto_lab.page.times import of_totals


def read_comparison(path: Path, name: str) -> Contents:
    """Return the arms of a comparison; what is missing is named among the gaps."""
    gaps: list[str] = []
    content = read_json(path / "compare.json", gaps)
    arms = [mapping(one) for one in items(content.get("runs"))]
    repeats = len({str(one.get("repeat")) for one in arms})
    runs = [_arm(one, name if repeats < 2 else f"{name}, seed {one.get('seed')}") for one in arms]
    environment, comparison = mapping(content.get("environment")), mapping(content.get("comparison"))
    facts = {
        "model and data": describe_task(comparison.get("task")),
        "arms": ", ".join(map(str, items(comparison.get("strategies")))) or "unknown",
        "ranks": str(environment.get("workers", "unknown")),
        "link": str(environment.get("link", "unknown")),
        **({"noise on purpose": describe_task(comparison["noise"])} if comparison.get("noise") else {}),
        **describe_machine(environment),
    }
    if not runs:
        gaps.append("no run of the comparison is recorded")
    headings = (
        "arm",
        "seed",
        "updates",
        "s",
        "samples per s",
        "held-out loss",
        "s to target",
        "MB sent",
        "peak MB",
    )
    fields = (
        "updates",
        "seconds",
        "samples_per_second",
        "heldout_loss",
        "seconds_to_loss",
        "sent_bytes",
        "peak_bytes",
    )
    texts = ("{:,.0f}", "{:,.2f}", "{:,.0f}", "{:.4f}", "{:.1f}", "{:,.2f}", "{:,.0f}")
    rows = []
    for one in arms:
        values = [number(one.get(field)) * (1e-6 if field.endswith("bytes") else 1) for field in fields]
        cells = [formatted(value, text) for text, value in zip(texts, values, strict=True)]
        rows.append([str(one.get("strategy")), str(one.get("seed")), *cells])
    table = Table(title="Arms", headings=headings, rows=rows)
    return Contents(path=path, name=name, facts=facts, runs=runs, tables=[table], gaps=gaps)


def _arm(record: dict[str, Any], folder: str) -> Run:
    """Return one run of a comparison; samples and bytes are spread evenly over its updates."""
    strategy, updates = str(record.get("strategy")), number(record.get("updates"))
    evaluations = read_evaluations(map(mapping, items(record.get("evaluations"))))
    steps = evaluations[:, 0]
    axes = {
        "updates": steps,
        "samples": steps * number(record.get("samples")) / (updates or np.nan),
        "loads": steps * number(record.get("fresh_samples")) / (updates or np.nan),
        "seconds": evaluations[:, 2],
        "bytes": steps * number(record.get("sent_bytes")) / (updates or np.nan),
    }
    return Run(
        name=f"{strategy} ({folder})",
        columns={},
        axes={},
        evaluations=evaluations[:, :2],
        evaluation_axes=axes,
        events=(),
        time=of_totals({name: number(value) for name, value in record.items()}),
    )
