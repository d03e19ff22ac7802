"""Laws for a strategy, a wire, a guard or a process group that you write; each returns how the law is broken."""

from stretto_lab.testing.guards import guard_faults
from stretto_lab.testing.jobs import Damage, Job, differing, goes_on, on_virtual_ranks, plain, train
from stretto_lab.testing.strategies import strategy_faults

__all__ = [
    "Damage",
    "Job",
    "differing",
    "goes_on",
    "guard_faults",
    "on_virtual_ranks",
    "plain",
    "strategy_faults",
    "train",
]
