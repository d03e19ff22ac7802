"""What the training loop holds: our `DataParallel`, or a stock method that offers the same."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Literal, Protocol, Self, TypeVar

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stretto.engine.kept_round import Weighed
from stretto.guards.text import parse_guard
from stretto.parallel import DataParallel
from stretto.peers import make_peer
from stretto.recipes import Task
from stretto.records import Update, Verdict
from stretto.train.arms import parse_arm
from stretto.train.configuration import RunConfig, TaskT

Batch = TypeVar("Batch")


class Handle(Protocol):
    """See `DataParallel`, whose words these are."""

    model: nn.Module
    """Whose forward pass gives the loss."""
    late_verdicts: tuple[Verdict, ...]
    """Found while `finish` drained, behind the last update."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def steps(self) -> int: ...

    @property
    def sent_bytes(self) -> int: ...

    def feed(self, loader: Iterable[Batch], until: Literal["any", "all"] = "any") -> Iterator[Batch]: ...

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
