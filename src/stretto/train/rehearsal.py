"""A rehearsal: a run to which damage is done on purpose, on the wire and in memory."""

from torch import distributed as dist

from stretto.errors import ConfigError
from stretto.faults import FaultPlan, FaultyGroup, Injector, strike_memory
from stretto.parallel import DataParallel
from stretto.train.configuration import RunConfig, TaskT
from stretto.train.handle import Handle


class Rehearsal:
    """One rank's share of the faults of a run; does nothing where it has none.

    Args:
        run: With its faults.
        rank: This rank.
    """

    def __init__(self, run: RunConfig[TaskT], rank: int) -> None:
        self._injector = Injector(FaultPlan(run.faults), rank)
        self._is_on = bool(run.faults)

    def wrap(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """Return the group that the job is to be given in the place of `group`, None being torch's default one."""
        whole = dist.group.WORLD if group is None else group
        return FaultyGroup(whole, self._injector) if self._is_on and whole is not None else group

    def begin(self, handle: Handle) -> None:
        """Let faults strike the memory of the job from now on.

        Raises:
            ConfigError: The job is a stock method's.
        """
        if not self._is_on:
            return
        if not isinstance(handle, DataParallel):
            raise ConfigError(f"faults strike jobs of DataParallel, not {type(handle).__name__}")
        strike_memory(handle, self._injector)
