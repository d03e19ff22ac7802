"""Makes all ranks follow a stop that the module or a callback requests from Lightning's Trainer on one rank.

Note [Where ranks agree]
    The loops of every rank read `should_stop` on that rank alone. After a clock or a signal on one rank, that rank
    would end a loop in which the others wait for it. So ranks agree after each part of a loop in which user code may
    have set it, before the loops read it. They also agree on whether `on_train_batch_start` skips the rest of the
    epoch. Callbacks of Lightning itself make equal requests on all ranks. If there is no other callback, ranks do not
    meet.

    Each rank also sends the part of the loop that it is in. Ranks at different parts have loaders of different lengths,
    or one has left a loop by a StopIteration.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.model_helpers import is_overridden

from stretto.engine.method_patch import MethodPatch
from stretto.errors import UsageError

_PARTS = {
    ("fit_loop", "setup_data"): "the start of fit or of an epoch",
    ("fit_loop", "on_run_start"): "the start of training",
    ("fit_loop", "on_advance_start"): "the start of an epoch",
    ("fit_loop.epoch_loop", "advance"): "the end of a batch",
    ("fit_loop.epoch_loop.val_loop", "run"): "the end of a validation",
    ("fit_loop", "on_advance_end"): "the end of an epoch",
}
"""Parts of the loops that contain hooks or follow them, and their names in messages."""
_SKIPS = "on_train_batch_start"
"""Hook of a module that skips the rest of the epoch by returning -1."""
_WHERE = (*_PARTS.values(), "the start of a batch")
_OF_LIBRARIES = ("lightning", "stretto", "torch", "builtins", "typing", "abc")

ByRank = Callable[[int], list[int]]
"""Returns the numbers of all ranks; all ranks must call it."""


def may_ask(module: LightningModule, callbacks: Sequence[object]) -> bool:
    """Return whether user code may set `should_stop`: a callback, or a module that refers to its trainer."""
    asks = (_is_users(type(one)) or isinstance(one, LambdaCallback) for one in callbacks)
    return any(asks) or any(map(_names_trainer, filter(_is_users, type(module).__mro__)))


def _is_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in _OF_LIBRARIES


def _names_trainer(kind: type) -> bool:
    """Return whether a class refers to its trainer in its source, or in the source of a function attached to it."""
    parts: list[Any] = [kind, *filter(inspect.isfunction, vars(kind).values())]
    try:
        return any("trainer" in inspect.getsource(part) for part in parts)
    except (OSError, TypeError):  # nobody knows
        return True


class StoppedByAny:
    """Makes all ranks stop if one of them requests it; see Note [Where ranks agree].

    Args:
        trainer: The Trainer with the loops.
        callbacks: Its callbacks.
        by_rank: Returns the numbers of all ranks.
    """

    def __init__(self, trainer: Trainer, callbacks: Sequence[object], by_rank: ByRank) -> None:
        self._trainer, self._by_rank = trainer, by_rank
        self._stand_ins: list[MethodPatch] = []
        module = trainer.lightning_module
        if any(by_rank(may_ask(module, callbacks))):
            for place, (path, part) in enumerate(_PARTS):
                loop = attrgetter(path)(trainer)
                agreeing = partial(self._then_agree, getattr(loop, part), place)
                self._stand_ins.append(MethodPatch(loop, part, agreeing))
        if any(by_rank(is_overridden(_SKIPS, module))):
            self._stand_ins.append(MethodPatch(module, _SKIPS, partial(self._skip, getattr(module, _SKIPS))))

    def end(self) -> None:
        """Restore the original methods of loops and module."""
        for stands in self._stand_ins:
            stands.remove()

    def _then_agree(self, part: Callable[..., Any], place: int, *args: Any) -> Any:
        """Run a part of a loop, then stop on all ranks if one has requested it."""
        result = part(*args)
        self._trainer.should_stop = self._any_rank(self._trainer.should_stop, place)
        return result

    def _skip(self, hook: Callable[..., int | None], *args: Any) -> int | None:
        """Run the hook, then skip the rest of the epoch on all ranks if one has requested it."""
        return -1 if self._any_rank(hook(*args) == -1, len(_PARTS)) else None

    def _any_rank(self, says: bool, place: int) -> bool:
        """Return whether `says` is true on any rank; all ranks must call it.

        Raises:
            UsageError: Ranks are not at the same place.
        """
        found = self._by_rank(2 * place + says)
        places = [number // 2 for number in found]
        if len(set(places)) > 1:
            raise UsageError(_parted(places, self._trainer.global_rank))
        return any(number % 2 for number in found)


def _parted(places: Sequence[int], rank: int) -> str:
    other = next(other for other, place in enumerate(places) if place != places[rank])
    return (
        f"StrettoStrategy: rank {rank} is at {_WHERE[places[rank]]}, and rank {other} at "
        f"{_WHERE[places[other]]}: expected all ranks in the same part of fit; give each rank equally many "
        "batches, and let no rank end a loop with its own StopIteration"
    )
