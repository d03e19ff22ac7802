"""Everything about a campaign that can be chosen."""

import dataclasses
from typing import Generic

from stretto.errors import ConfigError
from stretto.train.configuration import TaskT

_CLEAN_ROUNDS_PER_FAULT = 10
_FAULTS_PER_REAL_ONE = 20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CampaignConfig(Generic[TaskT]):
    """Faults drawn from a seed, each put into a small job of its own; see docs/campaign.md."""

    task: TaskT
    """Model, data and optimizer of every job: the recipe, at the size that `stretto.campaign.small` gives it."""
    faults: int = 2000
    """How many are drawn."""
    seed: int = 0
    """Decides faults, initial parameters and the order of the data; not negative."""
    out: str = "campaign"
    """Folder for campaign.json; what it holds is replaced."""
    clean_rounds: int | None = None
    """Exchanges of jobs without a fault, in which guards have to stay silent; None is ten per fault."""
    real: int | None = None
    """Faults of these that strike real workers, the others virtual ones; None is one of twenty."""
    workers: int = 2
    """Processes that the virtual jobs are shared out to."""
    only: int | None = None
    """Repeat the fault of this number alone, with what every rank saw; nothing is written."""

    def __post_init__(self) -> None:
        if self.faults < 1 or self.workers < 1 or self.seed < 0:
            raise ConfigError(
                f"faults={self.faults}, workers={self.workers}, seed={self.seed}: expected at least one fault, one "
                "worker, and a seed that is not negative"
            )
        if self.clean_rounds is not None and self.clean_rounds < 0:
            raise ConfigError(f"clean_rounds={self.clean_rounds}: expected at least 0")
        if self.real is not None and not 0 <= self.real <= self.faults:
            raise ConfigError(f"real={self.real}: expected a number of the {self.faults} faults")
        if self.only is not None and not 0 <= self.only < self.faults:
            raise ConfigError(
                f"only={self.only}: expected the number of a fault, from 0 to {self.faults - 1}"
            )

    @property
    def num_real(self) -> int:
        """How many faults strike real workers."""
        return self.faults // _FAULTS_PER_REAL_ONE if self.real is None else self.real

    @property
    def num_clean_rounds(self) -> int:
        """How many exchanges are made without a fault, at least."""
        return self.faults * _CLEAN_ROUNDS_PER_FAULT if self.clean_rounds is None else self.clean_rounds
