"""The ranks that are excluded when a job continues after damage."""

from collections.abc import Sequence

from stretto.errors import CorruptionError, Quarantined
from stretto.guards.strikes import blame


def to_leave_out(damages: Sequence[CorruptionError], world_size: int) -> tuple[int, ...] | None:
    """Return the ranks to exclude; None if the job cannot continue.

    These are the ranks that caused the damage; for a link, the sender. If that is every rank, all of them continue,
    unless they have already been repaired as often as allowed.
    """
    culprits = blame({link for damage in damages for link in damage.links}).values()
    senders = {culprit if isinstance(culprit, int) else culprit[0] for culprit in culprits}
    named = senders.union(*(damage.ranks for damage in damages))
    if len(named) < world_size:
        return tuple(sorted(named))
    return None if any(isinstance(damage, Quarantined) for damage in damages) else ()
