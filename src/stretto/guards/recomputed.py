"""Computes parts of a rank's state again; if ranks differ, this shows which rank is right."""

from collections.abc import Mapping

import torch
from torch import Tensor

from stretto.checksums import digests, on_host
from stretto.guards.contract import Part
from stretto.guards.seals import Seals
from stretto.optimizer import ShardedOptimizer


def recomputed(sharded: ShardedOptimizer, seals: Seals, shown: Mapping[Part, Tensor]) -> dict[Part, bool]:
    """Compute parts again where possible, and return for each whether the result is the same.

    Args:
        sharded: This rank's masters.
        seals: Seals, with which sealed parts are compared.
        shown: Values for the model, one part per flat set, of masters that this rank holds completely; otherwise empty.
    """
    sealed = [part for part, _ in seals.sealed(("values to be shown", "anchor"))]
    changed = {difference.part for difference in seals.differences(sealed)}
    right = {part: part not in changed for part in sealed}
    flats = [torch.zeros_like(flat) for flat in shown.values()]
    if flats:
        sharded.publish(flats)
    numbers = on_host(digests([*flats, *shown.values()]))
    pairs = zip(shown, numbers[: len(flats)], numbers[len(flats) :], strict=True)
    return right | {part: expected == found for part, expected, found in pairs}
