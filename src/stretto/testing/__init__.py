"""Conformance kits: what a process group, a strategy, a guard or a loader must pass before the library trusts it."""

from stretto.testing.conformance import Conformance
from stretto.testing.guards import GuardConformance
from stretto.testing.jobs import Damage
from stretto.testing.loaders import LoaderConformance
from stretto.testing.process_groups import ProcessGroupConformance
from stretto.testing.strategies import StrategyConformance

__all__ = [
    "Conformance",
    "Damage",
    "GuardConformance",
    "LoaderConformance",
    "ProcessGroupConformance",
    "StrategyConformance",
]
