"""The parts of one rank's job: everything that checkpoints, faults and tests may access."""

import dataclasses

from stretto.engine.comm_lane import CommLane
from stretto.engine.compute_lane import ComputeLane
from stretto.engine.performers import Core
from stretto.engine.replicas import ReplicaSet
from stretto.engine.user_model import UserModel
from stretto.exchange import Exchange
from stretto.flat import Layout
from stretto.optimizer import ShardedOptimizer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One rank's job, as `stretto.start` builds it."""

    user: UserModel
    """The user's model, parameters and optimizer."""
    layout: Layout
    exchange: Exchange
    sharded: ShardedOptimizer
    """This rank's masters and private optimizer."""
    core: Core
    replicas: ReplicaSet
    """How equal the ranks' replicas are, and what they agree on."""
    compute: ComputeLane
    comm: CommLane
