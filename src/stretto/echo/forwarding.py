"""Telling a loader, and what it is made of, which epoch begins."""

from typing import Any


def set_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch(epoch)` once on each of the loader, its samplers and its dataset that has it."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "dataset", None),
    ]
    told: list[Any] = []
    for part in parts:
        if hasattr(part, "set_epoch") and not any(part is other for other in told):
            part.set_epoch(epoch)
            told.append(part)
