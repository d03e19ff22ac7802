"""Reports of rounds in which ranks step alone, and of all rounds since the last average."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from stretto.engine.accumulation import Totals
from stretto.engine.report import RankReport, RoundReport, Vote, record_dtype
from stretto.exchange.transfer import filled

_COUNTS = ("weight", "samples", "fresh_samples", "micro_batches")
_LOSSES = ("loss_sum", "loss_weight")


def empty_report(num_slots: int, changed: bytes, step: int) -> RankReport:
    """Return a report without contributions."""
    return RankReport(
        totals=Totals(),
        vote=Vote.GO_ON,
        settings=0,
        used=bytes(num_slots),
        changed=changed,
        step=step,
    )


def completed(report: RankReport) -> RankReport:
    """Return a rank's report with its measurements, for which the host waits once."""
    content = filled(*report.pack())
    record = np.frombuffer(content, record_dtype(len(report.used), len(report.changed)))[0]
    return dataclasses.replace(
        report,
        totals=dataclasses.replace(report.totals, loss_sum=float(record["loss_sum"])),
        gradient_is_finite=bool(record["gradient_is_finite"]),
        norm_squared=float(record["norm_squared"]),
        changed=record["changed"].tobytes(),
        buffers_are_finite=bool(record["buffers_are_finite"]),
        measured=None,
    )


def alone(own: RankReport, rank: int, world_size: int) -> RoundReport:
    """Return the report of a round with only this `rank`, and empty records for the others."""
    report = RoundReport.unpack([own.pack()[0]], len(own.used), len(own.changed))
    return among(report, rank, world_size)


def among(report: RoundReport, first: int, world_size: int) -> RoundReport:
    """Return a report of some ranks, numbered from `first`, with empty records for the others."""
    records = np.zeros(world_size, report.records.dtype)
    records["gradient_is_finite"] = records["buffers_are_finite"] = True
    records[first : first + len(report.records)] = report.records
    return RoundReport(records)


def news(met: RoundReport, last: RoundReport, ranks: Sequence[int]) -> RoundReport:
    """Return the part of a gathered report that the `ranks` of one worker have not reported before.

    Their records are reduced to their `last` round. The other ranks contribute everything since the last meeting, so
    that every contribution is counted once. Losses cover all ranks since then.
    """
    records = met.records.copy()
    for field in _COUNTS:
        records[field][ranks] = last.records[field][ranks]
    return RoundReport(records)


def with_news(earlier: RoundReport, later: RoundReport, ranks: Sequence[int]) -> RoundReport:
    """Return both reports as one; `later` ends with the same round of `ranks`, whose counts it repeats."""
    records = later.records.copy()
    for field in (*_COUNTS, *_LOSSES):
        added = earlier.records[field].copy()
        if field in _COUNTS:
            added[ranks] = 0
        records[field] += added
    return RoundReport(records)
