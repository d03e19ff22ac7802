"""What watches over a job's values: one file per guard."""

from stretto.guards.guard import Guard
from stretto.guards.replica import ReplicaGuard
from stretto.guards.rest import AtRest

GUARDS: dict[str, type[Guard]] = {kind.name: kind for kind in (ReplicaGuard, AtRest)}
"""Every guard by its name."""

__all__ = ["GUARDS", "AtRest", "Guard", "ReplicaGuard"]
