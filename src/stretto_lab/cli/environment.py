"""Where the ranks of a command come from: a launcher, or local processes."""

import dataclasses
import os
import sys

from stretto.groups import is_hosted_by_agent, launched_rank, meeting_point
from stretto_lab.train.launch import Ranks
from stretto_lab.train.workers import DeviceKind, RankInfo, local_workers


def find_ranks(workers: int | None, device: DeviceKind = "cpu") -> Ranks:
    """Return the rank that a launcher has started here, or else `workers` local ranks.

    Args:
        workers: Number of local ranks; None starts one for each device of this kind.
        device: Kind of device for their models.

    Raises:
        ConfigError: A launcher's variables are incomplete.
    """
    launched = launched_rank(os.environ)
    if launched is not None:
        host, port = meeting_point(launched, os.environ)
        info = RankInfo(**dataclasses.asdict(launched), host=host, port=port)
        return Ranks([info], hosts_store=info.rank == 0 and not is_hosted_by_agent(os.environ))
    # Without it Gloo looks up the machine's own name, which fails on many machines.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return Ranks.local(local_workers(workers, device))


def is_joined() -> bool:
    return launched_rank(os.environ) is not None
