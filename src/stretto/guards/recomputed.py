"""What a rank holds, computed again: it tells which of several ranks that differ is right."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from stretto.checksums import digests, on_host
from stretto.guards.contract import Part
from stretto.guards.seals import Seals
from stretto.optimizer import MASTER, RehearsingOptimizer, ShardedOptimizer, digests_of


def recomputed(sharded: ShardedOptimizer, seals: Seals, shown: Mapping[Part, Tensor]) -> dict[Part, bool]:
    """Compute parts again where possible, and return for each whether the result is the same.

    Args:
        sharded: This rank's masters and state; compared with the rehearsal of the last step, if there was one.
        seals: What was sealed is compared with its seals.
        shown: Values to be shown, one part per flat set, of masters that this rank holds whole; otherwise empty.
    """
    right: dict[Part, bool] = {}
    rehearsed = sharded.rehearsed if isinstance(sharded, RehearsingOptimizer) else []
    for index, (expected, found) in enumerate(zip(rehearsed, digests_of(sharded), strict=False)):
        for key in expected.keys() | found.keys():
            for part in _parts_of(sharded, index, key):
                right[part] = right.get(part, True) and expected.get(key) == found.get(key)
    sealed = [part for part, _ in seals.sealed(("values to be shown", "anchor"))]
    changed = {difference.part for difference in seals.differences(sealed)}
    right |= {part: part not in changed for part in sealed}
    flats = [torch.zeros_like(flat) for flat in shown.values()]
    if flats:
        sharded.publish(flats)
    numbers = on_host(digests([*flats, *shown.values()]))
    pairs = zip(shown, numbers[: len(flats)], numbers[len(flats) :], strict=True)
    return right | {part: expected == found for part, expected, found in pairs}


def _parts_of(sharded: ShardedOptimizer, segment: int, key: str) -> Iterator[Part]:
    """Yield the parts that hold one of a segment's tensors."""
    if key != MASTER:
        yield Part("optimizer state", f"{key} of segment {segment}")
        return
    for bucket in sorted({piece.bucket for piece in sharded.segments[segment].pieces}):
        yield Part("masters", f"bucket {bucket}")
