"""Deaths: what whoever supervises a process writes into the store of its job once the process has ended."""

from collections.abc import Mapping

from torch._C._distributed_c10d import PrefixStore, Store

_KEY = "stretto/deaths"


def announce_death(store: Store, rank: int, how: str) -> None:
    """Write how a rank has ended; ranks that wait for it read it at their next look.

    Args:
        store: With the prefix of the job, if it has one: what its ranks were given to meet at.
        rank: Of the default group.
        how: In one line.
    """
    store.append(_KEY, f"{rank} {how.splitlines()[0]}\n")  # type: ignore[attr-defined]  # missing in torch's stub


def deaths(store: Store) -> Mapping[int, str]:
    """Return how ranks of the default group have ended, as far as somebody has written it.

    Args:
        store: Of any group of the job.
    """
    given = store
    while isinstance(store, PrefixStore):  # every group has put a prefix of its own before that of the job
        given, store = store, store.underlying_store
    if not given.check([_KEY]):
        return {}
    lines = given.get(_KEY).decode().splitlines()
    return {int(rank): how for rank, _, how in (line.partition(" ") for line in lines)}
