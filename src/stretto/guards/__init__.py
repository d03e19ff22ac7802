"""Guards, which check a job's values between their uses: one file per guard, and the code that runs the guards."""

from stretto.guards.audit import Audit
from stretto.guards.contract import Guard
from stretto.guards.replica import ReplicaGuard
from stretto.guards.rest import AtRest

GUARDS: dict[str, type[Guard]] = {kind.name: kind for kind in (ReplicaGuard, AtRest, Audit)}
"""Every guard by name."""

__all__ = ["GUARDS", "AtRest", "Audit", "Guard", "ReplicaGuard"]
