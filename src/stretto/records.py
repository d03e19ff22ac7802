"""The records of a run: one per committed update, and one per found corruption."""

import dataclasses
import itertools
import math
from typing import Any

from stretto.terminal import printable


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """A found corruption, the ranks it is attributed to, and the action against it; the same on every rank."""

    step: int
    """The update in which it was found, counted from 1."""
    guard: str
    """The guard that found it, or "verified" for the exchange."""
    site: str
    """The damaged values: "contribution", "sum", "gathered values", "masters", "optimizer state", ..."""
    part: str
    """The tensor, bucket or slice of that site, and the place in it if known."""
    ranks: tuple[int, ...]
    """Ranks that held or sent the damaged values; empty if no rank can be named."""
    link: tuple[int, int] | None = None
    """Sender and receiver, for damage on a link."""
    action: str
    """The action against it: "sent again", "summed again", "mended", "copied from rank 2", ..."""
    expected: str | None = None
    """Digest of the healthy values, hexadecimal, if known."""
    found: str | None = None
    """Digest of the damaged values."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Incident":
        """Return the incident from the output of `as_json`, also after a conversion to text."""
        link = fields["link"]
        return cls(
            **{
                **fields,
                "ranks": tuple(fields["ranks"]),
                "link": None if link is None else (link[0], link[1]),
            }
        )

    def __str__(self) -> str:
        whom = f"rank {', '.join(map(str, self.ranks))}" if self.ranks else "no rank can be named"
        way = "" if self.link is None else f", on the way from rank {self.link[0]} to rank {self.link[1]}"
        return printable(f"update {self.step}: {self.site} damaged ({self.part}; {whom}{way}): {self.action}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One committed optimizer update; equal on all ranks except for a rank's own times, bytes and batches."""

    step: int
    """Number of committed updates, from 1; learning-rate schedules count these."""
    round_index: int
    """Number of exchanges so far, from 0; it also grows if nothing was committed."""
    samples: int
    """Samples in this update, over all ranks; repeated samples count each time."""
    weight: float
    """Total weight in this update (micro-batches, or tokens if your weights count tokens)."""
    loss: float
    """Weighted mean loss over all ranks' micro-batches; NaN if `step` received no loss."""
    gradient_norm: float
    """Global 2-norm of the mean gradient, before clipping."""
    staleness: int
    """Number of updates committed between the computation of a gradient and its application."""
    micro_batches: tuple[int, ...]
    """Micro-batches in this update, by rank."""
    rounds: tuple[tuple[int, ...], ...]
    """Micro-batches by round and rank: with these counts a run can be repeated bit-identically."""
    seconds: float
    """Wall time since the previous update was returned, on this rank."""
    lane_seconds: float
    """Time for which this rank's communication lane was busy with this update. A device reports a time only once it
    has passed: work that it has not finished when the update is returned counts in a later update."""
    exposed_seconds: float
    """Part of `seconds` for which this rank's compute lane waited for the communication lane; late like
    `lane_seconds`."""
    sent_bytes: int
    """Bytes that this rank passed to collectives for other ranks, for this update."""
    learning_rates: tuple[float, ...]
    """Learning rate of each parameter group in this update; NaN if the optimizer has none."""
    skipped_rounds: int
    """Rounds skipped since the previous update because a loss or gradient was not finite."""
    gap: int = 0
    """Number of updates since all replicas were last averaged: 0 for strategies without averages. If ranks step
    alone, an update reports this rank's samples, weight and loss, and the update with gap 0 adds the other ranks'."""
    interval: int | None = None
    """Updates between two averages, as the strategy last chose; None for strategies that do not choose."""
    noise: float | None = None
    """Estimated standard deviation, per coordinate of the mean gradient, of noise that ranks do not share; None
    except in updates with an average of `paft-dyn`."""
    divergence: float | None = None
    """Mean 2-norm distance between a replica and the mean of all replicas before the average, estimated from the
    probe's coordinates. None if `noise` is None."""
    incidents: tuple[Incident, ...] = ()
    """Incidents that guards and the verified exchange found since the previous update, on any rank."""
    fresh_samples: int = 0
    """Those of `samples` that were used for the first time, over all ranks."""

    fresh: int = 0
    """Batches that `feed` gave this rank for the first time since the previous update."""
    echoed: int = 0
    """Batches that `feed` gave this rank for a repeated use since the previous update."""
    mixed: int = 0
    """Updates that this rank began since then with some fresh and some repeated batches."""
    uses: tuple[int, ...] = ()
    """The use of each of these batches, in order: 1 for the first."""
    first_use_loss: float = math.nan
    """Weighted mean loss of this rank's micro-batches at their first use; NaN without an `EchoLoader`."""
    wait_seconds: float = 0.0
    """Part of `seconds` for which `feed` waited for the loader, on this rank."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values; a number that is not finite becomes None.

        Counts by rank are pairs of a count and of how many ranks in a row have it, so that a record of a thousand ranks
        is no longer than one of two.
        """
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields["micro_batches"] = _in_a_row(self.micro_batches)
        fields["rounds"] = [_in_a_row(counts) for counts in self.rounds]
        fields["incidents"] = [incident.as_json() for incident in self.incidents]
        found: dict[str, Any] = plain(fields)
        return found


def _in_a_row(counts: tuple[int, ...]) -> list[list[int]]:
    return [[count, len(list(ranks))] for count, ranks in itertools.groupby(counts)]


def plain(value: Any) -> Any:
    """Return a value for JSON: a number that is not finite, which JSON lacks, becomes None."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value
