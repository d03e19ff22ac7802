"""Checks of loaders of any kind, and the record of a pass in a checkpoint.

Note [A pass in a checkpoint]
    A loader's state has the position of its iterator, which may be the end although the loop has not left the pass:
    in the last batch, in an update that is committed after it, or while other ranks have more data. A checkpoint with
    a loader says where the pass is, too, and the first one after `load` is the rest of it, which may be empty. If a
    pass ended early, because another rank had no more data or the updates were done, no loop gets the rest: the first
    pass after `load` begins again, as it does in the run that saved.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from stretto.echo.buffer import copied
from stretto.echo.loader import EchoLoader, check_iterable
from stretto.echo.state import left, state_of
from stretto.engine.report import Vote
from stretto.errors import ConfigError, OutOfTurn, StepWithoutBackward
from stretto.fields import check_callable, is_count, shown

MOST_OUT = 4
"""Most batches that a looking-ahead loop may hold uncounted; a loop with more skips batches."""


def check_arguments(loader: object, updates: object, until: object, on_update: object) -> None:
    """Raise unless these can be arguments of `feed`.

    Raises:
        ConfigError: One cannot; the message names it.
    """
    check_iterable(loader, "feed")
    if not isinstance(until, str) or until not in ("any", "all"):
        raise ConfigError(f"feed(until={shown(until)}): expected 'any' or 'all'")
    if updates is not None and not is_count(updates, 0):
        raise ConfigError(f"feed(updates={shown(updates)}): expected a number of updates, or None")
    if on_update is not None:
        check_callable(on_update, "feed(on_update=...)", "a function of an Update, or None")


def check_trained(where: object, num_fed: int, num_counted: int, steps: int) -> None:
    """Raise if a loader had no batch, or a loop counted none of its batches.

    Args:
        where: The place, for messages.
        num_fed: Number of batches in the pass.
        num_counted: Number of the job's micro-batches so far.
        steps: Number of the job's updates, including those before a checkpoint.

    Raises:
        ConfigError: There was no batch.
        StepWithoutBackward: No batch became a micro-batch.
    """
    goes_on = steps > 0 and not num_counted  # from a checkpoint, which may be of a pass's end
    if not num_fed and not goes_on:
        raise ConfigError(f"{where}: the loader has no batch; expected at least one per rank")
    if num_fed and not num_counted:
        raise StepWithoutBackward(
            f"{where}: {num_fed} batches, and not one micro-batch: expected parallel.backward(loss) for each "
            "batch, instead of loss.backward(), optimizer.step() and optimizer.zero_grad()"
        )


def one_at_a_time(where: object) -> OutOfTurn:
    """Return the error for a `feed` that continues after another `feed` has begun."""
    return OutOfTurn(
        f"{where}: another feed() has begun inside this one: expected one at a time; for two loaders side by side "
        "feed(zip(one, other))"
    )


def counted_behind(where: object, num_out: int) -> OutOfTurn:
    """Return the error for a batch that is counted after its pass."""
    return OutOfTurn(
        f"{where}: a micro-batch is counted after its feed() ended with {num_out} batches not counted: ask "
        "for the next batch after parallel.backward, or look ahead by the same number of batches, at most "
        f"{MOST_OUT}, from the first batch on; before batches from elsewhere call parallel.commit()"
    )


def ahead_of_clock(where: object) -> OutOfTurn:
    """Return the error for a loop that looks ahead under a `Clock`, where the last micro-batch of an update is not
    known.
    """
    return OutOfTurn(
        f"{where}: the loop asked for the next batch of feed(updates=...) before it counted the current batch; under a "
        "Clock no rank knows which batch is the last: ask for the next batch after parallel.backward"
    )


def ahead_of_end(where: object, num_out: int, num_lacking: int) -> OutOfTurn:
    """Return the error for a loop that looks ahead further than the updates reach."""
    return OutOfTurn(
        f"{where}: the loop has not counted {num_out} batches yet, and feed(updates=...) ends {num_lacking} "
        "micro-batches from here, before the last of these batches: look ahead by fewer batches, or ask for "
        "the next batch after parallel.backward"
    )


def length_of(loader: Iterable[Any]) -> int | None:
    """Return the loader's own length; None if it has none."""
    try:
        return len(loader)  # type: ignore[arg-type]  # whether it has one is the question
    except Exception:  # a loader may raise anything that says so
        return None


def rest_of(
    restored: Mapping[str, Any], loader: Any, batches: Iterator[Any]
) -> tuple[Iterator[Any], list[Vote]]:
    """Return the rest of the pass in which a checkpoint was saved, and the votes by which all ranks had ended it, if
    so.

    Args:
        restored: The checkpoint's record.
        loader: The loader, with its state loaded.
        batches: An iterator over it.
    """
    votes = [Vote(vote) for vote in restored["votes"]]
    if votes and isinstance(loader, EchoLoader):
        leave(loader)  # its next iterator begins another pass; any other loader has just made one
    return (iter(()) if votes or restored["is_exhausted"] else batches), votes


def leave(loader: Any) -> None:
    """Let the next iterator of a loader, loaded in the middle of a pass, start another pass."""
    if isinstance(loader, EchoLoader):
        loader.load_state_dict(left(loader.state_dict()))
        loader = loader.loader
    if hasattr(loader, "state_dict"):
        iter(loader)  # one with a state begins once where it was loaded


def state_before(loader: Any) -> Any:
    """Return a copy of the loader's state, for a checkpoint that may be saved later; None if it has none."""
    try:
        return state_of(loader)
    except Exception:  # whoever saves this loader's state is told
        return None


def own_tensors(batch: Any) -> Any:
    """Return a copy of a batch; parts that cannot be copied are shared with the loader."""
    return _own(batch, {})


def _own(batch: Any, apart: dict[int, Any]) -> Any:
    """Copy as `own_tensors`; `apart` maps ids to objects that were copied in parts."""
    copies: dict[int, Any] = {}

    def own(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return copied(leaf)
        try:
            is_mark = type(leaf).__basicsize__ == object.__basicsize__ and not getattr(leaf, "__dict__", None)
            return leaf if is_mark else copy.deepcopy(leaf, copies)
        except Exception:  # a batch may hold any object, for which no job may end
            copies.clear()  # one of them is half made
            return apart[id(leaf)] if id(leaf) in apart else _parts_copied(leaf, apart)

    try:
        return tree_map(own, batch)
    except RecursionError:  # it holds itself
        return copy.deepcopy(batch)


def _parts_copied(whole: Any, apart: dict[int, Any]) -> Any:
    """Return a copy of an object that cannot be copied as a whole, such as one with a lock, part by part where
    possible.
    """
    try:
        state = object.__getstate__(whole)
        kind: Any = type(whole)
        made = apart[id(whole)] = kind.__new__(kind)
        if isinstance(whole, dict):
            dict.update(made, {key: _own(value, apart) for key, value in dict.items(whole)})
        if isinstance(whole, list):
            list.extend(made, [_own(part, apart) for part in list.__iter__(whole)])
        for fields in state if isinstance(state, tuple) else (state,):
            for name, value in (fields or {}).items():
                object.__setattr__(made, name, _own(value, apart))
        return made
    except Exception:  # it is made of something else
        return whole
