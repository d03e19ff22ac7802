"""Whether ranks hold the same parameters, and how to find what they agree on.

`ReplicaSet` is for jobs whose ranks cannot differ: every rank shows what the owners have committed. Strategies whose
ranks step alone, or whose replicas may differ, have subclasses (`stretto.averaging`).
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stretto.engine.performers import Core, Performer
from stretto.engine.round import Reduction, Round
from stretto.engine.statistics import Statistics
from stretto.optimizer import ShardedOptimizer


class ReplicaSet:
    """The replicas of a job whose ranks hold the same values, or shards of the same values.

    Args:
        core: This rank's performers of the common effects.
    """

    interval: int | None = None
    """Updates from one average to the next, where the strategy chooses."""
    may_differ = False
    """Whether ranks may hold different masters, as under strategies that average."""
    keeps_states_equal = True
    """Whether the optimizer's state is the same on all ranks that hold the same masters."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.exchange = core.exchange
        self.sharded = core.sharded

    @property
    def performers(self) -> Mapping[type, Performer]:
        """The performer of each kind of effect that this class adds to those of the core."""
        return {}

    @property
    def gap(self) -> int:
        """Rounds since replicas were last averaged."""
        return 0

    @property
    def has_drifted(self) -> bool:
        """Whether this rank's model may differ from other ranks' models."""
        return False

    @property
    def are_equal(self) -> bool:
        """Whether masters and state were the same on all ranks at the last call of `agreed_optimizer`."""
        return True

    def reduce(self, round: Round) -> Reduction:
        """Exchange the gradients of `round`; all ranks must call, unless ranks step alone."""
        return self.core.reduce(round)

    def gather_committed(self, flats: list[Tensor], statistics: Statistics) -> list[Tensor]:
        """Fill `flats`, one tensor per flat set, with the committed parameters; all ranks must call, at rest.

        Where replicas differ, the committed parameters are their mean, and the replicas stay as they are.

        Returns:
            The model's floating-point buffers that belong to these parameters.
        """
        self.sharded.publish(flats)
        if not self.core.replicated:
            self.exchange.all_gather(flats)
        return statistics.agreed

    def agreed_optimizer(self, changed: bytes) -> ShardedOptimizer:
        """Return the optimizer; where replicas differ, a copy with their mean. All ranks must call.

        Args:
            changed: One byte per floating-point buffer: changed on this rank since ranks last agreed on it?
        """
        return self.sharded

    def begin_again(self) -> None:
        """Declare the present masters, equal on all ranks, to be what ranks agree on."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own state for a bit-identical continuation, without what all ranks agree on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned on the same rank of the same layout."""
