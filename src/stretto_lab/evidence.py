"""What strategies and wires cost in held-out loss, as far as it was measured: a small GPT, and two ranks."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True, slots=True)
class Evidence:
    """What a strategy costs in held-out loss, on the same samples as synchronous training."""

    nats: float | None
    """More of them; None where nothing is known."""
    source: str
    """Where that was measured; empty where it is exact, or rounds to 16 bits as everybody does."""


_FRONTIER = "benchmarks/results/2026-11-23-frontier"
_LEARNING = "benchmarks/results/2026-11-21-learning"
EVIDENCE: Mapping[str, Evidence] = MappingProxyType(
    {
        "zero1": Evidence(0.0, ""),
        "ddp": Evidence(0.0, ""),
        "acco": Evidence(0.013, _FRONTIER),
        "wp": Evidence(0.22, _LEARNING),
        "dpu": Evidence(0.60, _LEARNING),
        "local": Evidence(None, "replicas drift"),
        "diloco": Evidence(None, "replicas drift"),
    }
)
"""By strategy, in the order of preference where times are alike."""
OF_WIRES: Mapping[str, Evidence] = MappingProxyType(
    {
        "fp32": Evidence(0.0, ""),
        "bf16": Evidence(0.0, ""),
        "int8": Evidence(0.0, _FRONTIER),
        "int4": Evidence(0.010, _FRONTIER),
    }
)
"""By wire."""
SMALL = 0.02
"""Nats that hardly anybody would notice: about the spread between seeds in the measurements."""
