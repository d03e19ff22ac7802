"""The feed of ranks that hold one model in shards: a node's data end together.

No rank of a node can run a forward pass alone, because FSDP2 gathers parameters from all of them. So they ask each
other before every batch. The data of a node end when any of its ranks has no more; the other ranks skip their remaining
batches.
"""

from typing import Any

from stretto.engine import Job
from stretto.engine.node_group import NodeGroup
from stretto.feed.feed import NOTHING, Feed, Pass


class NodeFeed(Feed):
    """The batches of one rank of a node.

    Args:
        job: The job of this rank.
        node_group: The ranks of its node.
    """

    def __init__(self, job: Job, node_group: NodeGroup) -> None:
        super().__init__(job)
        self._node_group = node_group

    def _next(self, current: Pass) -> Any:
        """Return the next batch of a pass, or `NOTHING` if any rank of the node has none."""
        batch = super()._next(current)
        with self._compute.lifetime.running():
            if self._node_group.have_all(batch is not NOTHING):
                return batch
        batch, _ = current.take(_nothing)
        return batch


def _nothing(*_: object) -> tuple[object, int]:
    return NOTHING, 0
