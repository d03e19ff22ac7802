"""What a replica is asked at rest: the committed parameters, what ranks hold alike, and this rank's own state."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.engine.buffers import Buffer
from stretto.engine.replica import Replica
from stretto.engine.statistics import Statistics
from stretto.exchange import PlainWire
from stretto.optimizer import ShardedOptimizer


class AgreedReplica(Replica):
    """A replica with all that an update does not pass; arguments are those of `Replica`.

    Strategies whose ranks step alone, or whose replicas may differ, have subclasses.
    """

    @property
    def is_united(self) -> bool:
        """Whether all ranks hold the same masters, or should: in most jobs always, otherwise behind an average."""
        return self.gap == 0

    @property
    def has_drifted(self) -> bool:
        """Whether this rank's model may differ from other ranks' models."""
        return False

    @property
    def are_equal(self) -> bool:
        """Whether masters and state were the same on all ranks at the last call of `agreed_optimizer`."""
        return True

    @property
    def name(self) -> str:
        """Of this rank's own state in a checkpoint, for those who could use it."""
        return str(self.exchange.rank)

    def anchors(self, *, waits: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield, by name, what all ranks hold alike beside masters.

        What is changing now is left out, or waited for.
        """
        for index, anchor in enumerate(self._publication.anchor):
            yield f"set {index}", anchor

    def outer_state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield, with kind and name, what this rank keeps for steps with these, unless it is changing now."""
        yield from ()

    def gather_committed(self, flats: list[Tensor], statistics: Statistics) -> list[Buffer]:
        """Fill `flats`, one tensor per flat set, with the committed parameters; all ranks must call, at rest.

        Where replicas differ, the committed parameters are their mean, and the replicas stay as they are.

        Returns:
            The model's floating-point buffers that belong to these parameters.
        """
        self.sharded.publish(flats)
        if not self.replicated:
            if self._draws:
                self.exchange.begin_round(self.progress.round_index)
            self._gather_aside(flats)
        return statistics.agreed

    def agreed_optimizer(self, changed: bytes) -> ShardedOptimizer:
        """Return the optimizer; where replicas differ, a copy with their mean. All ranks must call.

        Args:
            changed: One byte per floating-point buffer: changed on this rank since ranks last agreed on it?
        """
        return self.sharded

    def wait_for_transfers(self) -> None:
        """Wait for what travels beside the rounds, if anything does, so that the group is free for other messages."""

    def begin_again(self) -> None:
        """Declare the present masters, equal on all ranks, to be what ranks agree on."""

    def shows_masters(self, storage: torch.dtype) -> bool:
        """Return whether models show committed masters as they are, where they store parameters in this dtype."""
        master, wire = torch.promote_types(storage, torch.float32), self._options.wire_of_changes
        if self.replicated:
            return storage == master
        return isinstance(wire, PlainWire) and wire.of(storage).dtype == master

    def differs(self, parameters: Sequence[Tensor]) -> str | None:
        """Return the name of a parameter that does not hold this rank's masters, where models show them; or None."""
        for piece in self.sharded.pieces:
            parameter = parameters[piece.slot.index]
            if not self.shows_masters(parameter.dtype):
                continue
            own = parameter.detach().reshape(-1)[piece.offset : piece.offset + piece.numel]
            if not torch.equal(own, self.sharded.values(self.sharded.masters, piece).reshape(-1)):
                return piece.slot.name
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own state for a bit-identical continuation, without what all ranks agree on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned on the same rank of the same layout."""
