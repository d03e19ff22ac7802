"""Deaths: when a process has ended, its supervisor writes this into the job's store."""

from collections.abc import Mapping

from torch._C._distributed_c10d import PrefixStore, Store

_KEY = "stretto/deaths"


def announce_death(store: Store, rank: int, how: str) -> None:
    """Write how a rank has ended; ranks that wait for it read this at their next check.

    Args:
        store: The store that the job's ranks share, or the store of any group of the job.
        rank: Rank in the default group, or the seat of a process that `survives` runs.
        how: Description in one line.
    """
    _outermost(store).append(_KEY, f"{rank} {how.splitlines()[0]}\n")  # type: ignore[attr-defined]  # missing in torch's stub


def deaths(store: Store) -> Mapping[int, str]:
    """Return how ranks of the default group have ended, as far as the store records it.

    Args:
        store: The store of any group of the job.
    """
    given = _outermost(store)
    if not given.check([_KEY]):
        return {}
    lines = given.get(_KEY).decode().splitlines()
    return {int(rank): how for rank, _, how in (line.partition(" ") for line in lines)}


def _outermost(store: Store) -> Store:
    """Return the store with the prefix of the job alone: every group adds its own prefix."""
    given = store
    while isinstance(store, PrefixStore):
        given, store = store, store.underlying_store
    return given
