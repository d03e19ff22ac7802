"""Owners send new parameters to all ranks as values or as changes.

    values     b ← wire(θ)              on a plain wire
    changes    b ← b + wire(θ - b)      on a packed wire

θ are the owner's values, and the anchor b the values that the models of all ranks show. An owner subtracts the anchor,
so the packing error of one change is a part of the next change: no residual is kept, and ranks stay bit-identical.

Source: weight differences as in Jia et al., "SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data
Parallelism for LLM Training".
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stretto.exchange.exchange import Exchange
from stretto.exchange.wire import PackedWire, Wire


class Publication:
    """Gathers the parameters that owners publish.

    Note [Not finite]
        A value that is not finite would stay in the anchor forever, because no change can correct it. So all ranks show
        it without keeping it, and the next change leads back to the owner's value.

    Args:
        exchange: The job's.
        wire: The format in which parameters are published.
    """

    def __init__(self, exchange: Exchange, wire: Wire) -> None:
        self._exchange = exchange
        self._layout = exchange.layout
        self._wire = wire
        self.anchor = [
            torch.zeros(flat.numel, dtype=flat.dtype, device=flat.device)
            for flat in self._layout.sets
            if isinstance(wire, PackedWire)
        ]
        """One tensor per flat set, equal on all ranks; empty if only values are sent."""

    def begin(self, shown: Sequence[Tensor]) -> None:
        """Start with the values that the models of all ranks show: one tensor per parameter."""
        for slot, value in zip(self._layout.slots, shown, strict=True):
            if self.anchor:
                self.anchor[slot.set_index][slot.start : slot.stop].copy_(value.detach().reshape(-1))

    def gathering(self, *, keeps: bool = True) -> Callable[[Sequence[Tensor]], None]:
        """Return the function that gathers parameters, chosen once, so that values alone take the shortest path.

        It takes one tensor per flat set, `(flat.numel,)`, with this rank's own slices, and replaces every bucket by the
        values for all ranks' models.

        Args:
            keeps: Whether models show the result until the next gather; otherwise the next changes do not build on it.
        """
        if isinstance(self._wire, PackedWire):
            return functools.partial(self._gather_changes, wire=self._wire, keeps=keeps)
        formats = [self._wire.values.of(flat.dtype) for flat in self._layout.sets]
        return functools.partial(self._exchange.all_gather, formats=formats)

    def _gather_changes(self, flats: Sequence[Tensor], *, wire: PackedWire, keeps: bool) -> None:
        rank, world_size = self._exchange.rank, self._exchange.world_size

        def change(index: int) -> Tensor:
            bucket = self._layout.buckets[index]
            own = slice(*bucket.owned_range(rank, world_size))
            return _wide(flats[bucket.set_index][own]) - self.anchor[bucket.set_index][own]

        def add(index: int, changes: Tensor) -> None:
            bucket = self._layout.buckets[index]
            inside = slice(bucket.start, bucket.stop)
            anchor, flat = self.anchor[bucket.set_index][inside], flats[bucket.set_index][inside]
            # Rounded to what models can show, before anything else is done with it.
            shown = changes.add(anchor).to(anchor.dtype)
            flat.copy_(shown)
            if keeps:
                torch.where(shown.isfinite(), shown, anchor, out=anchor)  # see Note [Not finite]

        self._exchange.gather_changes(wire, change, add)


def _wide(values: Tensor) -> Tensor:
    """Return values in a dtype in which a small difference is exact."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
