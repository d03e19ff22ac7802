"""Deaths: the supervisor of a process writes them into the store of its job when the process has ended."""

from collections.abc import Mapping

from torch._C._distributed_c10d import PrefixStore, Store

_KEY = "stretto/deaths"


def announce_death(store: Store, rank: int, how: str) -> None:
    """Write how a rank has ended; ranks that wait for it read it at their next look.

    Args:
        store: What the job's ranks were given to meet at, or that of any group of the job.
        rank: Of the default group, or the seat of a process that `survives` runs.
        how: In one line.
    """
    _outermost(store).append(_KEY, f"{rank} {how.splitlines()[0]}\n")  # type: ignore[attr-defined]  # missing in torch's stub


def deaths(store: Store) -> Mapping[int, str]:
    """Return how ranks of the default group have ended, as far as somebody has written it.

    Args:
        store: Of any group of the job.
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
