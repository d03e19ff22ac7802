"""The measured costs of strategies and wires in held-out loss: a small GPT, on two to 32 ranks."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

from stretto.strategies import Average, Strategy


@dataclasses.dataclass(frozen=True, slots=True)
class Evidence:
    """Measured cost of a strategy in held-out loss, relative to synchronous training on the same samples."""

    nats: float | None
    """Additional nats of held-out loss; None if not measured."""
    source: str
    """The measurement, or why there is none; empty if the strategy is exact or rounds to 16 bits as is usual."""

    @property
    def price(self) -> float:
        """The nats; infinity if not measured."""
        return math.inf if self.nats is None else self.nats


_SMALL_GPT = "a small GPT"
EVIDENCE: Mapping[str, Evidence] = MappingProxyType(
    {
        "zero1": Evidence(0.0, ""),
        "ddp": Evidence(0.0, ""),
        "acco": Evidence(0.013, _SMALL_GPT),
        "wp": Evidence(0.22, _SMALL_GPT),
        "dpu": Evidence(0.60, _SMALL_GPT),
        "average": Evidence(None, "not measured so"),
        "local": Evidence(None, "replicas drift"),
        "diloco": Evidence(None, "replicas drift"),
    }
)
"""By strategy, in the order of preference if times are too close to call; `AVERAGES` has more about averages."""
OF_WIRES: Mapping[str, Evidence] = MappingProxyType(
    {
        "fp32": Evidence(0.0, ""),
        "bf16": Evidence(0.0, ""),
        "int8": Evidence(0.0, _SMALL_GPT),
        "rotated2": Evidence(0.0, _SMALL_GPT),
        "int4": Evidence(0.010, _SMALL_GPT),
    }
)
"""By wire, the most exact wire first."""
AVERAGES: Mapping[str, tuple[Average, Mapping[int, float]]] = MappingProxyType(
    {
        "average:2": (Average(2), MappingProxyType({2: 0.038})),
        "average:4": (Average(4), MappingProxyType({2: 0.046, 8: 0.153, 32: 0.402})),
        "average:10": (Average(10), MappingProxyType({2: 0.086, 8: 0.221})),
        "average:30:fragments=10": (Average(30, 10), MappingProxyType({2: 0.124, 8: 0.348, 32: 0.718})),
    }
)
"""The measured averages, and their nats on 4 bits by number of replicas (`benchmarks/results/2026-11-23-frontier`).
Eight ranks on two nodes, with one replica per node, cost about as much as two replicas."""
SMALL = 0.02
"""Nats below which two losses are too close to call: about the spread between seeds in the measurements."""
ALIKE = 1.02
"""Ratio of two times up to which they are too close to call."""


def of_strategy(strategy: Strategy, replicas: int) -> Evidence:
    """Return the cost of a strategy; for averages, the cost at the next larger measured number of replicas.

    Args:
        strategy: The strategy with its options; averages with options other than in `AVERAGES` were not measured.
        replicas: Number of ranks, or nodes, that step alone.
    """
    if not isinstance(strategy, Average):
        return EVIDENCE[strategy.name]
    for measured, nats in AVERAGES.values():
        known = [count for count in nats if count >= replicas]
        if known and strategy == dataclasses.replace(measured, worker=strategy.worker):
            return Evidence(nats[known[0]], f"a small GPT, {known[0]} replicas")
    return EVIDENCE[strategy.name]


def of_wire_too(strategy: Strategy, wire: str, replicas: int) -> Evidence:
    """Return the larger cost of a strategy and a wire; as far as measured, both together cost no more."""
    return max(OF_WIRES[wire], of_strategy(strategy, replicas), key=lambda evidence: evidence.price)
