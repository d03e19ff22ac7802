"""The job of an estimate, a row for each strategy and wire, and the first choice among the rows."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from stretto.errors import ConfigError
from stretto.fields import check_at_least
from stretto.strategies import ACCO, Strategy, WeightPrediction, ZeRO1
from stretto_lab.estimate.times import Time, Work, time_of
from stretto_lab.evidence import ALIKE, AVERAGES, OF_WIRES, SMALL, of_wire_too
from stretto_lab.links import parse_link

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMB]?)")
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EstimateConfig:
    """How long an update would take on a link; computed, without measuring."""

    parameters: str = "124M"
    """Trainable parameters, as 124M or 1.3B."""
    update_seconds: float = 1.0
    """Seconds of computing per rank and update: all its micro-batches and the optimizer, without communication."""
    ranks: int = 4
    """Ranks, each with its own link."""
    network: str = "1gbit"
    """free, datacenter, ethernet, office, internet, or a link of every rank such as 100mbit."""
    device: Literal["cuda", "cpu"] = "cuda"
    """What packs: on cpu one core of each rank, which may be slower than the link; a GPU takes next to no time."""
    micro_batches: int = 4
    """Micro-batches per rank and update; only the last one hides a synchronous exchange."""
    allow_loss: float = SMALL
    """Nats of held-out loss that the first choice may cost, where measured: averages of replicas need 0.04 and
    more."""

    def __post_init__(self) -> None:
        check_at_least(self, ranks=1, micro_batches=1, allow_loss=0)
        if not 0 < self.update_seconds < float("inf"):
            raise ConfigError(f"update_seconds={self.update_seconds}: expected a positive, finite number")
        _ = self.work  # refuses what cannot be read

    @property
    def work(self) -> Work:
        """The job as plain numbers."""
        return Work(
            parameters=_count(self.parameters),
            update_seconds=self.update_seconds,
            ranks=self.ranks,
            micro_batches=self.micro_batches,
            link=parse_link(self.network),
            packs_on_core=self.device == "cpu",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One strategy on one wire."""

    strategy: str
    wire: str
    time: Time
    nats: float | None
    """Measured cost in held-out loss: the larger of the strategy's and the wire's; None if not measured."""

    @property
    def options(self) -> str:
        """The options to type after `stretto train RECIPE`."""
        return f"--strategy {self.strategy} --wire {self.wire}"


def estimate(work: Work, allow_loss: float = SMALL) -> tuple[list[Row], Row]:
    """Return all rows, and the fastest that costs no more loss than allowed; of rows that are equally fast, the most
    exact.
    """
    rows = [
        Row(text, wire, time_of(work, strategy, wire), of_wire_too(strategy, wire, work.ranks).nats)
        for text, (strategy, wires) in ARMS.items()
        if not (isinstance(strategy, ACCO) and work.micro_batches < 2)
        for wire in wires
    ]
    cheap = [row for row in rows if row.nats is not None and row.nats <= allow_loss]
    limit = ALIKE * min(row.time.seconds for row in cheap)
    return rows, next(row for row in cheap if row.time.seconds <= limit)


ARMS: Mapping[str, tuple[Strategy, Sequence[str]]] = MappingProxyType(
    {
        **{strategy.name: (strategy, tuple(OF_WIRES)) for strategy in (ZeRO1(), ACCO(), WeightPrediction())},
        **{text: (average, ("int4",)) for text, (average, _) in AVERAGES.items()},
    }
)
"""Strategies to estimate, each with its wires; averages only with the wire of their measurement."""


def _count(text: str) -> int:
    found = _COUNT.fullmatch(text.strip().upper())
    if found is None or not float(found[1]):
        raise ConfigError(f"parameters={text!r}: expected a positive number with K, M or B, as 124M")
    return round(float(found[1]) * _FACTORS[found[2]])
