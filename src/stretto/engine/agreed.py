"""What a replica is asked at rest: the committed parameters, what ranks hold alike, and this rank's own state."""

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from stretto.engine.buffers import Buffer
from stretto.engine.replica import Replica
from stretto.engine.statistics import Statistics
from stretto.engine.within import Within
from stretto.exchange import PlainWire
from stretto.optimizer import ShardedOptimizer


class Alike(Enum):
    """How far the replicas of all ranks are alike."""

    UNITED = "united"
    """All ranks hold the same masters, and models show them."""
    AHEAD = "ahead"
    """All ranks hold the same masters, and models still show what was there before the last average."""
    DRIFTING = "drifting"
    """Each rank has stepped, or may have, on its own since then."""
    APART = "apart"
    """A fragment is under way, or ranks have kept a part of their own as one landed."""


class Agreement:
    """The one answer to the question whether replicas are alike.

    Args:
        steps_alone: Whether ranks step without asking the others, and may be at different rounds.
    """

    def __init__(self, *, steps_alone: bool = False) -> None:
        self.steps_alone = steps_alone
        self.state = Alike.UNITED
        self.gap = 0
        """Rounds since replicas were last averaged, or the last fragment landed."""
        self.states_are_alike = True
        """Whether the optimizer's state was averaged too, so that it is the same where masters are."""

    @property
    def is_united(self) -> bool:
        """Whether all ranks hold the same masters, or should: in most jobs always, otherwise after an average."""
        return self.state is Alike.UNITED or self.state is Alike.AHEAD

    @property
    def is_whole(self) -> bool:
        """Whether all ranks hold the same masters and the same optimizer state."""
        return self.is_united and self.states_are_alike

    def drift(self) -> None:
        """A round begins in which each rank steps on its own."""
        self.gap += 1
        if self.state is not Alike.APART:
            self.state = Alike.DRIFTING

    def depart(self) -> None:
        """A fragment has left."""
        self.state = Alike.APART

    def land(self, *, is_whole: bool, states: bool | None) -> None:
        """A fragment has landed.

        Args:
            is_whole: Whether it was all there is, and nobody kept a part: then all ranks hold the same again.
            states: Whether the optimizer's state has become the same, too; None leaves that as it was.
        """
        self.unite(states=states)
        if not is_whole:
            self.state = Alike.APART

    def unite(self, *, states: bool | None = None, is_shown: bool = True) -> None:
        """All replicas have become the same.

        Args:
            states: Whether the optimizer's state has, too; None leaves that as it was.
            is_shown: Whether models show it.
        """
        self.state, self.gap = Alike.UNITED if is_shown else Alike.AHEAD, 0
        self.states_are_alike = self.states_are_alike if states is None else states

    def resume(self, state: Alike, gap: int, *, states: bool | None = None) -> None:
        """Go on from a checkpoint."""
        self.unite(states=states)
        self.state, self.gap = state, gap


class AgreedReplica(Replica):
    """A replica with all that an update does not pass; arguments are those of `Replica`.

    Strategies whose ranks step alone, or whose replicas may differ, have subclasses.

    Args:
        steps_alone: Whether ranks step without asking the others, and may be at different rounds.
        within: The ranks of this node, where each holds a shard of the replica.
    """

    has_anchor = False
    """Whether ranks take outer steps from an anchor, whatever their replicas hold."""

    def __init__(
        self, *args: Any, steps_alone: bool = False, within: Within | None = None, **others: Any
    ) -> None:
        super().__init__(*args, **others)
        if within is not None:
            self.within, self.rank = within, within.rank
        self.agreement = Agreement(steps_alone=steps_alone)

    @property
    def name(self) -> str:
        """Of this rank's own state in a checkpoint, for those who could use it."""
        return str(self.rank)

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
