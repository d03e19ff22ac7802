"""The round report: one small record per rank, gathered with every round.

It is the only control channel of a healthy job. Ranks must agree on weights, on the end, on a gradient to skip and
on an error to raise. They decide all of this from the same gathered records, so that no rank takes another path.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.engine.accumulation import Totals
from stretto.exchange.transfer import Place
from stretto.optimizer import Hyperparameters


class Vote(IntEnum):
    """A rank's vote in a round about continuing."""

    GO_ON = 0
    DATA_ENDED = 1
    """Its data have ended: this round contains its last contribution, or none if ranks step alone."""
    PASS_LEFT = 2
    """It has left a pass that ranks have agreed to end, and submits remaining rounds; another pass may come."""
    STOP = 3
    """It wants every rank to stop at this round."""
    FINISHING = 4
    """It has left its training loop for good, and only submits remaining rounds."""


class Asks(IntFlag):
    """A rank's requests in addition to its vote, in the upper bits of the same byte: all ranks read them at the same
    update.
    """

    NOTHING = 0
    SAVED = 8
    """Its background write is complete; this takes effect once all ranks report it."""
    KEEP = 16
    """All ranks keep a state after this update if any rank requests it: that rank leaves, or another process waits
    to join."""


_VOTES = tuple(Vote)
"""Votes by number; a lookup here is much faster than `Vote(number)`."""
ADDRESS = re.compile(" at 0x[0-9a-f]+")  # in an object's text: every process has its own


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """A rank's measurements of a round on its device, which writes them into the record so that the host need not wait.

    Names and meanings are as in `RankReport`.
    """

    loss_sum: Tensor
    """`()`, float64, like `norm_squared`."""
    gradient_is_finite: Tensor
    """`()`, bool, like `buffers_are_finite`."""
    norm_squared: Tensor
    changed: Tensor | None = None
    """`(buffers,)`, uint8; None for a model without buffers."""
    buffers_are_finite: Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """One rank's report of a round; at an average of replicas, of all rounds since the last average."""

    totals: Totals
    gradient_is_finite: bool = True
    norm_squared: float = 0.0
    """Squared 2-norm of the summed gradient on the slices that this rank owns."""
    vote: Vote
    settings: int
    """CRC-32 of the hyperparameters that this rank uses for the next step."""
    used: bytes
    """One byte per parameter slot: used by a micro-batch of this rank?"""
    changed: bytes
    """One byte per floating-point buffer: how it differs on this rank from the agreed value."""
    round_index: int = 0
    """The round in which this rank averages; unused if all ranks take part in every round."""
    step: int = 0
    """Number of updates that this rank has committed before that round; unused in the same case."""
    stepped: bool = False
    """Whether this rank has stepped in that round; unused in the same case."""
    stale: bool = False
    """Whether gradients of this rank changed after they were sent, so that all ranks sum them again."""
    buffers_are_finite: bool = True
    """Whether no buffer of the model got an infinity or a NaN in this round, from a micro-batch of any weight."""
    asks: Asks = Asks.NOTHING
    measured: Measured | None = None
    """Values that only the device knows yet; they replace the values above."""

    def pack(self) -> tuple[bytes, list[Place]]:
        """Return this record as bytes, and what the device has yet to write into them."""
        dtype = record_dtype(len(self.used), len(self.changed))
        record = np.zeros(1, dtype)
        for source in (self.totals, self):
            for field in dataclasses.fields(source):
                if field.name not in ("totals", "asks", "measured"):
                    value = getattr(source, field.name)
                    record[field.name] = list(value) if isinstance(value, bytes) else value
        record["vote"] = self.vote | self.asks
        offsets: Mapping[str, Any] = dtype.fields or {}
        places: list[Place] = []
        for field in () if self.measured is None else dataclasses.fields(self.measured):
            if (value := getattr(self.measured, field.name)) is not None:
                places.append((offsets[field.name][1], value.view(-1).view(torch.int8)))
        return record.tobytes(), places


@functools.cache
def record_dtype(num_slots: int, num_buffers: int) -> np.dtype[np.void]:
    """Return the fixed layout of one rank's record."""
    return np.dtype(
        [
            ("weight", "<f8"),
            ("samples", "<i8"),
            ("fresh_samples", "<i8"),
            ("micro_batches", "<i8"),
            ("loss_sum", "<f8"),
            ("loss_weight", "<f8"),
            ("gradient_is_finite", "?"),
            ("norm_squared", "<f8"),
            ("vote", "u1"),
            ("settings", "<u4"),
            ("used", "u1", (num_slots,)),
            ("changed", "u1", (num_buffers,)),
            ("round_index", "<i8"),
            ("step", "<i8"),
            ("stepped", "?"),
            ("stale", "?"),
            ("buffers_are_finite", "?"),
        ]
    )


class RoundReport:
    """All ranks' reports of one round, in rank order.

    Args:
        records: One structured record per rank, of `record_dtype`.
    """

    def __init__(self, records: NDArray[np.void]) -> None:
        self.records = records
        self.weight = in_rank_order(records["weight"])
        """Σ w over ranks, in rank order."""
        self.samples = int(records["samples"].sum())
        """Samples of all ranks."""
        self.fresh_samples = int(records["fresh_samples"].sum())
        """Samples used for the first time."""
        self.micro_batches: tuple[int, ...] = tuple(records["micro_batches"].tolist())
        """Contributing micro-batches by rank."""
        self.loss_sum = in_rank_order(records["loss_sum"])
        """Σ w·loss over ranks, in rank order."""
        self.loss_weight = in_rank_order(records["loss_weight"])
        """Σ w over the micro-batches with a loss."""
        self.used = records["used"].any(axis=0).tobytes()
        """One byte per parameter slot: whether any rank used it."""
        self.changed: list[int] = np.bitwise_or.reduce(records["changed"], axis=0).tolist()
        """Per buffer: the bits of its change on any rank."""
        self.votes = list(map(_VOTES.__getitem__, (records["vote"] & 7).tolist()))
        """Each rank's vote."""
        by_all, by_any = (int(merge.reduce(records["vote"])) for merge in (np.bitwise_and, np.bitwise_or))
        self.asks = Asks(by_all & Asks.SAVED | by_any & Asks.KEEP)
        """The combined requests of all ranks."""
        self.stepped = bool(records["stepped"].any())
        """Whether any rank stepped in the round of this average."""
        self.settings_agree = bool((records["settings"] == records["settings"][0]).all())
        """Whether all ranks have equal hyperparameters."""
        self.stale: list[int] = np.flatnonzero(records["stale"]).tolist()
        """Ranks whose gradients changed after they were sent."""

    @classmethod
    def unpack(cls, records: Sequence[bytes], num_slots: int, num_buffers: int) -> "RoundReport":
        """Read gathered records."""
        return cls(np.frombuffer(b"".join(records), record_dtype(num_slots, num_buffers)))

    def norm_squared(self, *, replicated: bool) -> float:
        """Return the squared norm of the whole sum; if `replicated`, every rank has measured it."""
        norms = self.records["norm_squared"]
        return float(norms[0]) if replicated else in_rank_order(norms)

    def not_finite(self, norm_squared: float, who: str = "ranks") -> str | None:
        """Return a description of the values that are not finite, with their ranks; None if all are finite.

        `norm_squared` is the squared norm of the whole sum, and is checked too; `who` has made these reports.
        """
        if losses := np.flatnonzero(~np.isfinite(self.records["loss_sum"])).tolist():
            return f"the loss is not finite on {who} {losses}"
        if gradients := np.flatnonzero(~self.records["gradient_is_finite"]).tolist():
            return f"the gradient is not finite on {who} {gradients}"
        if buffers := np.flatnonzero(~self.records["buffers_are_finite"]).tolist():
            return (
                f"buffers of the model are not finite on {who} {buffers} (if you mean this, set "
                "Options(buffers='NAME=alone'))"
            )
        return None if math.isfinite(norm_squared) else f"the sum of the {who}' gradients overflows"


def settings_text(hyperparameters: Hyperparameters) -> str:
    """Return hyperparameters as text, one line each; equal hyperparameters give equal texts."""
    text = "\n".join(
        f"group {index}: {key}={value.to_dense().tolist() if isinstance(value, torch.Tensor) else value!r}"
        for index, group in enumerate(hyperparameters)
        for key, value in sorted(group.items())
    )
    return ADDRESS.sub("", text)


def in_rank_order(values: NDArray[np.float64]) -> float:
    """Return the sum in rank order, so that every rank and every replay gets the same bits."""
    return float(np.add.accumulate(values)[-1])
