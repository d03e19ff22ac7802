"""What the training loop holds: our `DataParallel`, or a stock method that offers the same.

A rehearsal: a run to which damage is done on purpose, on the wire and in memory.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Literal, Protocol, Self, TypeVar

from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup

from stretto.engine.listener import Weighed
from stretto.errors import ConfigError
from stretto.faults import FaultPlan, FaultyGroup, Injector, strike_memory
from stretto.guards.text import parse_guard
from stretto.parallel import DataParallel
from stretto.peers import make_peer
from stretto.recipes import Task
from stretto.records import Incident, Update
from stretto.train.arms import parse_arm
from stretto.train.configuration import RunConfig, TaskT

Batch = TypeVar("Batch")


class Handle(Protocol):
    """See `DataParallel`, whose words these are."""

    model: nn.Module
    """Whose forward pass gives the loss."""
    late_incidents: tuple[Incident, ...]
    """Found while `finish` drained, behind the last update."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def steps(self) -> int: ...

    @property
    def sent_bytes(self) -> int: ...

    def feed(
        self, loader: Iterable[Batch], updates: int | None = None, until: Literal["any", "all"] = "any"
    ) -> Iterator[Batch]: ...

    def micro_batch(
        self, loss_function: Callable[[Batch], Tensor | Weighed], batch: Batch
    ) -> Update | None: ...

    def settled(self) -> AbstractContextManager[None]: ...

    def stop(self) -> None: ...

    def finish(self) -> list[Update]: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_handle(run: RunConfig[TaskT], task: Task, group: ProcessGroup | None = None) -> Handle:
    """Wrap the task's model as the run's strategy says; all ranks of `group`, or the default group, must call.

    Raises:
        ConfigError: The strategy, or a setting, does not fit the task.
    """
    arm = parse_arm(run.strategy)
    if not arm.is_ours:
        return make_peer(arm.name, task.model, task.optimizer, run.micro_batches, clip_norm=run.clip_norm)
    micro_batches = run.micro_batches if run.clock is None else run.clock
    return DataParallel(
        task.model,
        task.optimizer,
        arm.strategy(),
        micro_batches=micro_batches,
        group=group,
        guards=tuple(map(parse_guard, run.guards)),
        options=run.options,
    )


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
