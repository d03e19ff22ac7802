"""Transfers: the collectives that an exchange starts and waits for, and their values."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch import distributed as dist

Wait = Callable[[dist.Work, str], None]
"""Waits for a collective, which the text names in messages. Raises the job's error if it cannot complete. One that
*follows* instead lets the host continue at once, where works order streams."""

Started = tuple[dist.Work, str]
"""A collective that has been started, and its name."""
Transfer = Generator[Started, None, None]
"""The transfer of one bucket: yields each collective it starts, and continues when that is complete."""
Barrier = Literal["barrier"]  # what comes next waits for all ranks: not within a backward pass
Transfers = Generator[int | Started | Barrier, None, None]
"""The transfers of many buckets: also yields the index of each before it starts, and continues when its values are
ready. Its caller decides only the time: the collectives and their order are the same on every rank."""

Change = Callable[[int], Tensor]
"""Returns this rank's change of its slice of a bucket, by the bucket's index; called once, even if it is sent again."""
Add = Callable[[int, Tensor], None]
"""Receives all ranks' changes of a bucket, `(bucket.numel,)`, by its index."""
Prepare = Callable[[int], None]
"""Prepares the values of a bucket, by its index, for sending."""

Place = tuple[int, Tensor]
"""Bytes of a record that a device computes, `(n,)` int8, and their offset."""


def filled(record: bytes, places: Sequence[Place]) -> bytes:
    """Return a record with the bytes from devices filled in; the host waits once for each device."""
    content = bytearray(record)
    by_device: dict[torch.device, list[Place]] = defaultdict(list)
    for begin, part in places:
        by_device[part.device].append((begin, part))
    for parts in by_device.values():
        known = torch.cat([part for _, part in parts]).cpu().numpy().tobytes()
        for begin, part in parts:
            content[begin : begin + part.numel()], known = known[: part.numel()], known[part.numel() :]
    return bytes(content)


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """Ranks that exchange parts with each other, including this rank; each rank belongs to one level of every
    number.
    """

    number: int
    """Number of the level, the same on all ranks."""
    ranks: Sequence[int]
    """The ranks, ascending."""
    where: str
    """Name for messages."""
    crosses: bool = False
    """Whether it connects different nodes."""
