"""Makes all ranks follow a request that a callback makes to the Trainer of transformers on one rank."""

from collections.abc import Callable, Sequence
from typing import Any

from transformers import TrainerCallback

from stretto.integrations.refused import overrides

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_HOOKS = ("on_substep_end", "on_step_end", "on_epoch_end", "on_evaluate", "on_save")
"""Hooks that all ranks call, and after which the Trainer reads the flags."""


class AskedByAny(TrainerCallback):
    """A callback after all others: if one of them may request something, all ranks agree on it at once.

    Without it, a clock or a signal on one rank would make that rank enter a collective that the others do not enter.
    The callbacks of transformers itself make equal requests on all ranks, and cost nothing here.

    Args:
        callbacks: The Trainer's other callbacks.
        by_rank: Returns the numbers of all ranks; all ranks must call it.
    """

    def __init__(
        self, callbacks: Sequence[object], by_rank: Callable[[Sequence[int]], Sequence[Sequence[int]]]
    ) -> None:
        self._by_rank = by_rank
        own = [one for one in callbacks if not type(one).__module__.startswith(("transformers.", "stretto."))]
        asks = [any(overrides(one, TrainerCallback, hook) for one in own) for hook in _HOOKS]
        self._hooks = {hook for hook, found in zip(_HOOKS, self._on_any(asks), strict=True) if found}

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Agree after a micro-batch that is not the last of its step."""
        self._agree("on_substep_end", control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Agree after a step."""
        self._agree("on_step_end", control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Agree after an epoch."""
        self._agree("on_epoch_end", control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Agree after an evaluation."""
        self._agree("on_evaluate", control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Agree after a checkpoint."""
        self._agree("on_save", control)

    def _agree(self, hook: str, control: Any) -> None:
        if hook not in self._hooks:
            return
        found = self._on_any([getattr(control, flag) for flag in _FLAGS])
        for flag, is_asked in zip(_FLAGS, found, strict=True):
            setattr(control, flag, is_asked)  # as callbacks do: some keep the object

    def _on_any(self, flags: list[bool]) -> list[bool]:
        return [any(flag) for flag in zip(*self._by_rank(flags), strict=True)]
