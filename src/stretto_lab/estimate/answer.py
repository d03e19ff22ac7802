"""The job of an estimate, a row for each strategy and wire, and the first choice among them."""

import dataclasses
import re
from collections.abc import Sequence

from stretto.errors import ConfigError
from stretto.fields import check_at_least
from stretto.strategies import ACCO, Strategy, WeightPrediction, ZeRO1
from stretto_lab.estimate.times import Time, Work, time_of
from stretto_lab.evidence import EVIDENCE, OF_WIRES, SMALL
from stretto_lab.links import parse_link

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMB]?)")
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
_ALIKE = 1.02
"""Factor between times up to which the more exact way is taken."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EstimateConfig:
    """What an update would take on a link: nothing is measured."""

    parameters: str = "124M"
    """Trainable ones, as 124M or 1.3B."""
    update_seconds: float = 1.0
    """Of computing, per rank and update: all its micro-batches and the optimizer, without communication."""
    ranks: int = 4
    """Ranks, with a link of their own each."""
    network: str = "1gbit"
    """free, datacenter, ethernet, office, internet, or a link of every rank such as 100mbit."""
    micro_batches: int = 4
    """Per rank and update; only the last one hides a synchronous exchange."""

    def __post_init__(self) -> None:
        check_at_least(self, ranks=1, micro_batches=1)
        if not 0 < self.update_seconds < float("inf"):
            raise ConfigError(f"update_seconds={self.update_seconds}: expected a positive, finite number")
        _ = self.work  # refuses what cannot be read

    @property
    def work(self) -> Work:
        """The job in figures."""
        return Work(
            parameters=_count(self.parameters),
            update_seconds=self.update_seconds,
            ranks=self.ranks,
            micro_batches=self.micro_batches,
            link=parse_link(self.network),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One strategy on one wire."""

    strategy: str
    wire: str
    time: Time
    nats: float
    """What it cost in held-out loss where that was measured: the larger of what strategy and wire cost."""

    @property
    def options(self) -> str:
        """What to type after `stretto train RECIPE`."""
        return f"--strategy {self.strategy} --wire {self.wire}"


def estimate(work: Work) -> tuple[list[Row], Row]:
    """Return all rows, and of those whose cost in loss is small the fastest; of some that are alike the most exact."""
    strategies: Sequence[Strategy] = (ZeRO1(), ACCO(), WeightPrediction())
    rows = [
        Row(strategy.name, wire, time_of(work, strategy, wire), _nats(strategy.name, wire))
        for strategy in strategies
        if not (isinstance(strategy, ACCO) and work.micro_batches < 2)
        for wire in OF_WIRES
    ]
    cheap = [row for row in rows if row.nats <= SMALL]
    limit = _ALIKE * min(row.time.seconds for row in cheap)
    return rows, next(row for row in cheap if row.time.seconds <= limit)


def _nats(strategy: str, wire: str) -> float:
    return max(EVIDENCE[strategy].nats or 0.0, OF_WIRES[wire].nats or 0.0)


def _count(text: str) -> int:
    found = _COUNT.fullmatch(text.strip().upper())
    if found is None or not float(found[1]):
        raise ConfigError(f"parameters={text!r}: expected a positive number with K, M or B, as 124M")
    return round(float(found[1]) * _FACTORS[found[2]])
