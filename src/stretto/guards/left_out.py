"""The ranks without which a job continues after damage has ended it."""

from collections.abc import Sequence

from stretto.errors import CorruptionError, Quarantined
from stretto.guards.strikes import blame


def to_leave_out(damages: Sequence[CorruptionError], world_size: int) -> tuple[int, ...] | None:
    """Return the ranks without which a job continues; None if it cannot continue.

    These are the ranks that caused the damage; of a link, the sender. Where that is every rank, all of them continue,
    unless they have been repaired as often as allowed already.
    """
    culprits = blame({link for damage in damages for link in damage.links}).values()
    senders = {culprit if isinstance(culprit, int) else culprit[0] for culprit in culprits}
    named = senders.union(*(damage.ranks for damage in damages))
    if len(named) < world_size:
        return tuple(sorted(named))
    return None if any(isinstance(damage, Quarantined) for damage in damages) else ()
