"""The contract of an exchange, and what all exchanges share: gathering parameters and small records."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from stretto.exchange.wire import narrower
from stretto.flat import Bucket, Layout

Wait = Callable[[dist.Work, str], None]
"""Waits for a collective; the text says what is waited for. Raises the job's error if it cannot complete."""


class Exchange(ABC):
    """Performs the collectives of one job on one process group that nobody else uses.

    Buffers are one tensor per flat set, padded as the layout says. Reductions end in float32 sums, whatever
    the wire; the division by the total weight is the owner's. One bucket travels per collective, so that one
    bucket of scratch memory per direction is all an exchange holds.

    Note [Wire rounding]
        Whatever comes back over the wire is what every rank installs, the owner and a lone rank included:
        an owner that kept its own wider values would differ from everybody else in every element.
    """

    def __init__(self, group: dist.ProcessGroup, layout: Layout, wire: torch.dtype, wait: Wait) -> None:
        self.group = group
        self.layout = layout
        self.wire = wire
        self.wait = wait
        self.rank = group.rank()
        self.world_size = group.size()
        self.sent_bytes = 0
        """Bytes this rank has sent to others since construction."""
        self._scratch: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    @abstractmethod
    def reduce_scatter(self, flats: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """Sum `flats` over ranks.

        Args:
            flats: One gradient tensor per flat set, `(flat.numel,)`; left undefined.
            sums: One float32 tensor per bucket, `(bucket.numel / world_size,)`, overwritten with this rank's slice.
        """

    @abstractmethod
    def all_reduce(self, flats: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """Sum `flats` over ranks.

        Args:
            flats: One gradient tensor per flat set, `(flat.numel,)`; left undefined.
            sums: One float32 tensor per bucket, `(bucket.numel,)`, overwritten with the whole sum, equal on all ranks.
        """

    def all_gather(self, flats: Sequence[Tensor]) -> None:
        """Replace every bucket of `flats` by the owners' slices, rounded to the wire.

        Args:
            flats: One tensor per flat set, `(flat.numel,)`, holding this rank's own slices; overwritten whole.
        """
        for index, bucket in enumerate(self.layout.buckets):
            start, stop = bucket.owned_range(self.rank, self.world_size)
            flat = flats[bucket.set_index]
            dtype = narrower(self.wire, self.layout.sets[bucket.set_index].dtype)
            own = self.scratch("own", stop - start, dtype, flat.device)
            own.copy_(flat[start:stop])
            self.gather_bucket(own, flat[bucket.start : bucket.stop], f"gather of bucket {index}")

    def gather_bucket(self, own: Tensor, out: Tensor, what: str) -> None:
        """Gather `own`, `(numel / world_size,)` in its wire dtype, into `out`, `(numel,)` in any dtype."""
        whole = out if out.dtype == own.dtype else self.scratch("whole", out.numel(), own.dtype, out.device)
        self.wait(self.group.all_gather_single(whole, own), what)
        self.sent_bytes += (self.world_size - 1) * own.nbytes
        if whole is not out:
            out.copy_(whole)

    def gather_bytes(self, record: bytes) -> list[bytes]:
        """Return every rank's `record`, in rank order; all records must have one length."""
        device = self.layout.sets[0].device
        own = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(device)
        whole = torch.empty(self.world_size * own.numel(), dtype=torch.uint8, device=device)
        self.wait(self.group.all_gather_single(whole, own), "roll call")
        self.sent_bytes += (self.world_size - 1) * own.nbytes
        content = whole.cpu().numpy().tobytes()
        return [content[i * len(record) : (i + 1) * len(record)] for i in range(self.world_size)]

    def scratch(self, role: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return `numel` reusable elements; valid until the same role is asked for again."""
        held = self._scratch.get((role, dtype, device))
        if held is None or held.numel() < numel:
            held = self._scratch[role, dtype, device] = torch.empty(numel, dtype=dtype, device=device)
        return held[:numel]

    def outgoing(self, flat: Tensor, bucket: Bucket, dtype: torch.dtype) -> Tensor:
        """Return the bucket of `flat` in `dtype`: the buffer itself where it already has it."""
        content = flat[bucket.start : bucket.stop]
        if content.dtype == dtype:
            return content
        return self.scratch("outgoing", bucket.numel, dtype, flat.device).copy_(content)
