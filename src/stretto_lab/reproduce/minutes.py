"""How long records take, so that a list can say so before anything is run."""

from collections.abc import Mapping
from types import MappingProxyType

MINUTES: Mapping[str, float] = MappingProxyType(
    {
        "acco.quality": 6.5,
        "acco.wp": 1.8,
        "acco.dpu": 1.9,
        "acco.convolutions": 1,
        "acco.workers-8": 1.5,
        "acco.workers-32": 2.7,
        "acco.time": 1.8,
        "acco.time-to-loss": 1.8,
        "acco.time-zero": 1.8,
        "acco.heterogeneous": 1.4,
        "acco.figure3": 1.6,
        "acco.hidden": 0.6,
        "paft.table1": 8,
        "paft.small-noise": 8,
        "paft.defended": 1.6,
        "paft.gap": 8,
        "paft.interval": 8,
        "paft.dynamic": 2.2,
        "paft.our-estimate": 2.3,
        "paft.lemma": 0.5,
        "paft.accumulates": 0.5,
        "paft.table2": 10.9,
        "paft.table3": 2.7,
        "paft.bursts": 1.1,
        "paft.large-bursts": 1.1,
        "paft.state": 0.5,
        "paft.figure7": 1.5,
        "echo.saves": 3.9,
        "echo.speedup": 3.9,
        "echo.burn-in": 3.9,
        "echo.schedules": 2.2,
        "echo.steps": 0.9,
        "echo.same-rate": 1.4,
        "echo.averaging": 2.9,
        "echo.communication": 2.9,
        "echo.figure7": 1.8,
        "acco.split": 1.4,
        "paft.sharded": 3.3,
        "paft.hit-averages": 2.3,
        "paft.weights-instead": 2.1,
        "paft.clipping": 1.3,
        "echo.loads-saved": 3.9,
    }
)
"""Minutes of one core for all runs of a record, on the machine of docs/papers.md. Records share runs: several together
take less. Records without runs are left out."""
