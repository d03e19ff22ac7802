"""Conformance kits: what a process group, a strategy, a guard or a loader must pass before the library trusts it."""

from stretto_lab.testing.conformance import Conformance
from stretto_lab.testing.guards import GuardConformance
from stretto_lab.testing.jobs import Damage
from stretto_lab.testing.loaders import LoaderConformance
from stretto_lab.testing.process_groups import ProcessGroupConformance
from stretto_lab.testing.strategies import StrategyConformance

__all__ = [
    "Conformance",
    "Damage",
    "GuardConformance",
    "LoaderConformance",
    "ProcessGroupConformance",
    "StrategyConformance",
]
