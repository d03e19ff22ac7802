"""Whether ranks hold the same parameters, and how what they agree on is found.

`ReplicaSet` is the set of jobs whose ranks cannot differ: all of them show what the owners have committed. Strategies
whose ranks step alone, or whose replicas may come apart, have sets of their own (`stretto.averaging`).
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stretto.engine.performers import Core, Performer
from stretto.engine.round import Reduction, Round
from stretto.engine.statistics import Statistics
from stretto.optimizer import ShardedOptimizer


class ReplicaSet:
    """All ranks hold the same, or a shard of the same.

    Args:
        core: Of this rank.
    """

    interval: int | None = None
    """Updates from one average to the next, where the strategy chooses."""
    may_differ = False
    """Whether ranks may hold different masters: strategies that average."""
    keeps_states_equal = True
    """Whether the optimizer's state is the same on all ranks that hold the same masters."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.exchange = core.exchange
        self.sharded = core.sharded

    @property
    def performers(self) -> Mapping[type, Performer]:
        """Performers by effect."""
        return {}

    @property
    def gap(self) -> int:
        """Rounds since replicas were last averaged."""
        return 0

    @property
    def has_drifted(self) -> bool:
        """Whether the model may show something else than other ranks' models."""
        return False

    @property
    def are_equal(self) -> bool:
        """Whether masters and state were the same on all ranks when `agreed_optimizer` last looked."""
        return True

    def reduce(self, round: Round) -> Reduction:
        """Exchange the gradients of `round`; all ranks must call, unless ranks step alone."""
        return self.core.reduce(round)

    def gather_committed(self, flats: list[Tensor], statistics: Statistics) -> list[Tensor]:
        """Fill `flats`, one tensor per flat set, with the committed parameters; all ranks must call, at rest.

        Where replicas differ, these are the mean of all, and the replicas stay as they are.

        Returns:
            The model's floating-point buffers that go with them.
        """
        self.sharded.publish(flats)
        if not self.core.replicated:
            self.exchange.all_gather(flats)
        return statistics.agreed

    def agreed_optimizer(self, changed: bytes) -> ShardedOptimizer:
        """Return the optimizer, or where replicas differ a copy that holds their mean; all ranks must call.

        Args:
            changed: One byte per floating-point buffer: changed on this rank since ranks last agreed on it?
        """
        return self.sharded

    def begin_again(self) -> None:
        """Take the present masters, alike on all ranks, for agreed."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a bit-identical continuation needs of this rank's replica, beside what all ranks agree on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned on the same rank of the same layout."""
