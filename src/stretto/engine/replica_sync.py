"""Whether the replicas of all ranks are equal, and for how many rounds they have not been."""

from enum import Enum


class SyncState(Enum):
    """How far the replicas of all ranks are equal."""

    SYNCED = "united"
    """All ranks hold the same masters, and models show them."""
    AHEAD = "ahead"
    """All ranks hold the same masters, but models still show the values from before the last average."""
    DIVERGING = "drifting"
    """Each rank has stepped alone, or may have, since the last average."""
    PARTIAL = "apart"
    """A fragment is in flight, or ranks have kept some of their values at an arrival."""


class ReplicaSync:
    """The state of replicas: whether they are equal.

    Args:
        steps_alone: Whether ranks step without communicating, and may be at different rounds.
    """

    def __init__(self, *, steps_alone: bool = False) -> None:
        self.steps_alone = steps_alone
        self.state = SyncState.SYNCED
        self.gap = 0
        """Rounds since replicas were last averaged, or the last fragment arrived."""
        self.states_are_synced = True
        """Whether the optimizer's state was averaged too, so that it is equal if masters are."""

    @property
    def is_synced(self) -> bool:
        """Whether all ranks hold the same masters, or should: in most jobs always, otherwise after an average."""
        return self.state is SyncState.SYNCED or self.state is SyncState.AHEAD

    @property
    def is_whole(self) -> bool:
        """Whether all ranks hold the same masters and the same optimizer state."""
        return self.is_synced and self.states_are_synced

    def diverge(self) -> None:
        """Note that a round begins in which each rank steps alone."""
        self.gap += 1
        if self.state is not SyncState.PARTIAL:
            self.state = SyncState.DIVERGING

    def fragment_launched(self) -> None:
        """Note that a fragment was sent."""
        self.state = SyncState.PARTIAL

    def fragment_landed(self, *, is_whole: bool, states: bool | None) -> None:
        """Note that a fragment has arrived.

        Args:
            is_whole: Whether it contained all parameters, and no rank kept a part: then all ranks hold equal masters
                again.
            states: Whether the optimizer's state is equal now, too; None leaves that unchanged.
        """
        self.mark_synced(states=states)
        if not is_whole:
            self.state = SyncState.PARTIAL

    def mark_synced(self, *, states: bool | None = None, is_shown: bool = True) -> None:
        """Note that all replicas are equal now.

        Args:
            states: Whether the optimizer's state is equal now, too; None leaves that unchanged.
            is_shown: Whether models show it.
        """
        self.state, self.gap = SyncState.SYNCED if is_shown else SyncState.AHEAD, 0
        self.states_are_synced = self.states_are_synced if states is None else states

    def resume(self, state: SyncState, gap: int, *, states: bool | None = None) -> None:
        """Continue from a checkpoint."""
        self.mark_synced(states=states)
        self.state, self.gap = state, gap
