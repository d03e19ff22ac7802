"""The parts of one rank's job, which checkpoints, faults and tests may access."""

import dataclasses

from stretto.engine.comm_lane import CommLane
from stretto.engine.compute_lane import ComputeLane
from stretto.engine.model import UserModel
from stretto.engine.node_group import NodeGroup
from stretto.engine.replica import Replica
from stretto.exchange import Exchange
from stretto.flat import Layout
from stretto.optimizer import ShardedOptimizer


@dataclasses.dataclass(kw_only=True, slots=True)
class Job:
    """One rank's job, as `stretto.start` builds it."""

    model: UserModel
    """The user's model, parameters and optimizer."""
    layout: Layout
    exchange: Exchange
    sharded: ShardedOptimizer
    """This rank's masters and private optimizer."""
    replica: Replica
    """This rank's replica; it knows which values are equal on all ranks."""
    compute: ComputeLane
    comm: CommLane
    layout_digest: str
    """Digest of all ranks' layouts; equal in another job only if each of its ranks has the same layout."""
    node_group: NodeGroup | None = None
    """The ranks of this node, if each holds a shard of the model."""
    num_checkpoints: int = 0
    """Number of saves so far; the first is checked for whether this job could load it."""

    @property
    def everyone(self) -> Exchange:
        """The exchange among all ranks of the job, for messages between updates."""
        return self.exchange if self.node_group is None else self.node_group.everyone

    def count_checkpoint(self) -> None:
        self.num_checkpoints += 1
