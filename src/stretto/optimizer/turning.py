"""Schedulers: a check whether Stretto can step one at every committed update, and that it steps exactly once."""

import inspect
from typing import Any

import torch

from stretto.errors import ConfigError, UsageError
from stretto.optimizer.several import SeveralSchedulers, members_of

# Most wrappers around a scheduler that are searched.
_DEEPEST = 8


def check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise unless step() without arguments sets the rates of `optimizer`; None is no scheduler.

    Raises:
        ConfigError: It does not; the message gives the remedy.
    """
    if scheduler is None:
        return
    if isinstance(scheduler, SeveralSchedulers):
        for member in scheduler.members:
            check_scheduler(member, optimizer)
        return
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "scheduler: a ReduceLROnPlateau needs a metric at every step, which the library does not have; "
            "omit scheduler=, and call its step(metric) in on_update, with a metric that is the same on all "
            "ranks, such as update.loss"
        )
    step = getattr(scheduler, "step", None)
    if isinstance(scheduler, torch.optim.Optimizer) or not callable(step):
        raise ConfigError(
            f"scheduler: expected one of torch.optim.lr_scheduler, or anything with step(), found {scheduler!r}"
        )
    kinds = [kind.__name__ for kind in type(scheduler).__mro__]
    if "AcceleratedScheduler" in kinds:
        raise ConfigError(
            "scheduler: at each step(), a scheduler that Accelerate has prepared steps once for every "
            "process; pass its attribute .scheduler, which Stretto steps once per update"
        )
    if "AdafactorSchedule" in kinds:
        raise ConfigError(
            "scheduler: an AdafactorSchedule only reports rates, which it reads from the optimizer's state, "
            "which is empty during a job; omit scheduler=: Adafactor finds its rates without it"
        )
    needed = _needed(step)
    if needed:
        raise ConfigError(
            f"scheduler: step() of a {type(scheduler).__name__} needs {', '.join(needed)}, which the library "
            f"does not have; omit scheduler=, and call its step({', '.join(needed)}) in on_update, with "
            "values that are the same on all ranks"
        )
    of_another = getattr(scheduler, "optimizer", optimizer)
    # Its groups, because it may be of a wrapper that shows them.
    groups = getattr(of_another, "param_groups", None)
    if not any(groups is one.param_groups for one in (optimizer, *members_of(optimizer))):
        raise ConfigError(
            "scheduler: expected a scheduler of the optimizer that you pass, found a scheduler of another "
            f"{type(of_another).__name__}: its learning rates would have no effect"
        )


def _needed(step: Any) -> list[str]:
    """Return the required arguments of `step`."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # nobody knows
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in optional]


class Schedule:
    """A scheduler that only the job steps, once per committed update.

    Args:
        scheduler: A scheduler with `step()`.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._turned_to: Any = None

    def forget(self) -> None:
        """Read the scheduler's position again: a checkpoint may have changed it."""
        self._turned_to = None

    def turn(self, times: int, where: object) -> None:
        """Step it this number of times.

        Raises:
            UsageError: User code stepped it too, it steps several times at once, or its schedule has ended.
        """
        before = _positions(self._scheduler)
        if self._turned_to not in (None, before):
            raise UsageError(
                f"{where}: the scheduler is at {_text(before)}, and Stretto had stepped it to "
                f"{_text(self._turned_to)}: expected no other call of scheduler.step(); remove the call, or "
                "omit scheduler= in DataParallel"
            )
        try:
            for _ in range(times):
                self._scheduler.step()
        except ValueError as error:
            raise UsageError(
                f"{where}: scheduler.step() raised {str(error)!r}: expected a schedule as long as the run, "
                "whose updates per epoch are the batches of a rank divided by micro_batches, rounded up; "
                "make it longer, or end with feed(loader, updates=N)"
            ) from error
        except (TypeError, LookupError, AttributeError) as error:
            raise UsageError(
                f"{where}: scheduler.step() raised {type(error).__name__} ({error}): expected a schedule that steps "
                "without arguments and reads no optimizer state; omit scheduler=, and step it in on_update"
            ) from error
        self._turned_to = after = _positions(self._scheduler)
        for old, new in zip(before, after, strict=False):
            if isinstance(old, int) and isinstance(new, int) and new > old + times:
                raise UsageError(
                    f"{where}: {times} step() of the scheduler moved it from {old} to {new}: expected one "
                    "step; if this scheduler wraps another scheduler, pass the wrapped scheduler"
                )


def _positions(scheduler: Any, depth: int = 0) -> tuple[Any, ...]:
    """Return the positions of a scheduler and of each scheduler in it; None for one that does not report it."""
    members = getattr(scheduler, "members", None) or getattr(scheduler, "_schedulers", None)
    position = getattr(scheduler, "last_epoch", None)
    if isinstance(position, int) or depth == _DEEPEST:
        return (position,)
    if isinstance(members, list | tuple):
        return tuple(one for member in members for one in _positions(member, depth + 1))
    inner = getattr(scheduler, "scheduler", None)
    return (None,) if inner is None else _positions(inner, depth + 1)


def _text(positions: Any) -> str:
    return str(positions[0] if len(positions) == 1 else positions)
