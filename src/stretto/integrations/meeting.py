"""Where the ranks of another trainer meet, and raise if one has failed.

Note [A trainer's own collectives]
    A trainer runs its own collectives to log, evaluate and save. They learn of no failure: in such a collective a
    rank would wait for a rank that has raised an error, until that process ends or a timeout passes. So ranks meet
    right before, in a collective that reports the error. It costs one small message per rank.
"""

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from stretto.errors import ConfigError
from stretto.parallel import DataParallel


def by_rank(parallel: DataParallel, numbers: Sequence[int], purpose: str) -> list[list[int]]:
    """Return the numbers of each rank; all ranks call it, with equally many. A job of one rank sends nothing.

    Args:
        parallel: The job, which has not ended.
        numbers: Numbers of this rank.
        purpose: Purpose, for messages.

    Raises:
        PeerFailed: A rank has raised an error, or died.
    """
    if parallel.world_size == 1:
        return [list(numbers)]
    compute = parallel.job.compute
    own = torch.tensor([numbers], dtype=torch.int64, device=compute.layout.sets[0].device)
    found = own.new_empty(parallel.world_size, len(numbers))
    with compute.lifetime.running():
        work = dist.all_gather_into_tensor(found, own, async_op=True)
        compute.lifetime.failures.wait(work, purpose)
    rows: list[list[int]] = found.tolist()
    return rows


def check_alike(parallel: DataParallel, settings: Mapping[str, object]) -> None:
    """Raise if ranks differ in settings by which a trainer decides when they meet; all ranks call it, with equal names.

    Raises:
        ConfigError: They differ, so ranks would wait for each other at different places; the message names the first
            setting.
    """
    own = [zlib.crc32(repr(value).encode()) for value in settings.values()]
    rows = by_rank(parallel, own, "the settings of the trainer")
    for column, (name, value) in enumerate(settings.items()):
        others = [rank for rank, row in enumerate(rows) if row[column] != own[column]]
        if others:
            raise ConfigError(
                f"{name}={value!r}: expected the same value on all ranks, found another value on rank "
                f"{others[0]}: ranks would wait for each other at different places"
            )
