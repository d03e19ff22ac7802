"""What a run reports: one record per committed update, and one per corruption that was found."""

import dataclasses
import itertools
import math
from typing import Any

from stretto.terminal import printable


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """One found corruption, its attributed ranks, and the action against it; the same on every rank."""

    step: int
    """The update it was found in, counted from 1."""
    guard: str
    """Who found it: a guard's name, or "verified" for the exchange."""
    site: str
    """Where the damage was: "contribution", "sum", "gathered values", "masters", "optimizer state", ..."""
    part: str
    """Which tensor, bucket or slice of that site, and where in it if that is known."""
    ranks: tuple[int, ...]
    """Ranks that hold or sent the damaged values; empty if no rank can be named."""
    link: tuple[int, int] | None = None
    """Sender and receiver, for damage on a link."""
    action: str
    """The action against it: "sent again", "summed again", "mended", "copied from rank 2", ..."""
    expected: str | None = None
    """Digest of the healthy values, hexadecimal, where it is known."""
    found: str | None = None
    """Digest of the damaged values."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Incident":
        """Return the incident that `as_json` wrote, also after a way through text."""
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
    """One committed optimizer update, the same on every rank but for this rank's own times, bytes and batches."""

    step: int
    """Committed updates so far, from 1: what learning-rate schedules count."""
    round_index: int
    """Exchanges so far, from 0; advances also where nothing was committed."""
    samples: int
    """Samples behind this update, over all ranks: every use counts."""
    weight: float
    """Total weight behind this update (micro-batches, or tokens where the user weighs by tokens)."""
    loss: float
    """Mean loss over all ranks' micro-batches, weighted; nan where `step` was given no loss."""
    gradient_norm: float
    """Global 2-norm of the mean gradient, before clipping."""
    staleness: int
    """Committed updates between the parameters a gradient was taken at and those it was applied to."""
    micro_batches: tuple[int, ...]
    """Micro-batches behind this update, by rank."""
    rounds: tuple[tuple[int, ...], ...]
    """Micro-batches by round and rank: with these counts a run can be replayed to the bit."""
    seconds: float
    """Wall time since the previous update was returned, on this rank."""
    lane_seconds: float
    """Time the communication lane was busy with this update, on this rank. A device is asked for times that are in
    its past: what it has not done when the update is returned is counted in a later one."""
    exposed_seconds: float
    """Part of `seconds` in which this rank's compute lane waited for the communication lane; late as above."""
    sent_bytes: int
    """Bytes this rank handed to collectives for other ranks, for this update."""
    learning_rates: tuple[float, ...]
    """Learning rate of each parameter group, as this update used it; nan where the optimizer has none."""
    skipped_rounds: int
    """Rounds skipped since the previous update because a loss or gradient was not finite."""
    gap: int = 0
    """Updates since all ranks' replicas were last averaged: 0 but for strategies that do so now and then. Where ranks
    step alone this rank's own samples, weight and loss stand here; the update with gap 0 brings those of the others."""
    interval: int | None = None
    """Updates from one average to the next, as the strategy has last chosen; None for strategies that do not choose."""
    noise: float | None = None
    """Estimated standard deviation, per coordinate of the mean gradient, of noise that ranks do not share; None but in
    updates with an average of `paft-dyn`."""
    divergence: float | None = None
    """2-norm of the distance between a replica and the mean of all, in the mean of replicas, before that average; from
    the coordinates of its probe, scaled to all. None where `noise` is."""
    incidents: tuple[Incident, ...] = ()
    """What guards and the verified exchange have found since the previous update, on any rank."""
    fresh_samples: int = 0
    """Samples of `samples` at their first use: loaded for this update, over all ranks."""

    fresh: int = 0
    """Batches that `feed` gave this rank since the previous update and that it had not given before."""
    echoed: int = 0
    """Batches that `feed` gave this rank since the previous update for another use."""
    mixed: int = 0
    """Updates since then, begun by this rank, whose batches were fresh in part and held in part."""
    uses: tuple[int, ...] = ()
    """The use of each of these, in their order: 1 for the first."""
    first_use_loss: float = math.nan
    """Mean loss of this rank's micro-batches at their first use, weighted; nan without an `EchoLoader`."""
    wait_seconds: float = 0.0
    """Part of `seconds` in which `feed` waited for the loader, on this rank."""

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
    """Return a value as JSON has it: a number that is not finite, for which it has no word, becomes None."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value
