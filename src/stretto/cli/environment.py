"""What the environment variables of a launcher such as torchrun say about ranks."""

import os
import sys
from collections.abc import Mapping

from stretto.errors import ConfigError
from stretto.train.launch import JoinedRank, LocalRanks, Ranks
from stretto.train.workers import RankInfo


def find_ranks(workers: int) -> Ranks:
    """Return the rank that a launcher has made of this process, or else `workers` local ones.

    Raises:
        ConfigError: A launcher's variables are incomplete.
    """
    if is_joined():
        # torchrun's agent may host the store itself; otherwise rank 0 does.
        agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        info = _rank_info(os.environ)
        return JoinedRank(info, hosts_store=info.rank == 0 and not agent_hosts)
    # Without it Gloo looks up the machine's own name, which fails on many machines.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return LocalRanks(workers)


def is_joined() -> bool:
    """Return whether a launcher has started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _rank_info(variables: Mapping[str, str]) -> RankInfo:
    try:
        return RankInfo(
            rank=int(variables["RANK"]),
            world_size=int(variables["WORLD_SIZE"]),
            local_rank=int(variables.get("LOCAL_RANK", "0")),
            local_world_size=int(variables.get("LOCAL_WORLD_SIZE", "1")),
            host=variables["MASTER_ADDR"],
            port=int(variables["MASTER_PORT"]),
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"RANK and WORLD_SIZE say that a launcher started this process, but its other variables do not fit "
            f"({error}): expected MASTER_ADDR and MASTER_PORT too"
        ) from error
