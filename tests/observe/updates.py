"""Updates to observe."""

from typing import Any

from stretto.records import Update


def update(step: int, **different: Any) -> Update:
    """One of a series in which every update has 100 samples and took a second."""
    fields: dict[str, Any] = {
        "step": step,
        "round_index": step - 1,
        "samples": 100,
        "weight": 8.0,
        "loss": 2.0,
        "gradient_norm": 1.0,
        "staleness": 0,
        "micro_batches": (4, 4),
        "rounds": ((4, 4),),
        "seconds": 1.0,
        "lane_seconds": 0.5,
        "exposed_seconds": 0.25,
        "sent_bytes": 3_000_000,
        "learning_rates": (0.1, 0.2),
        "skipped_rounds": 0,
    }
    return Update(**{**fields, **different})
