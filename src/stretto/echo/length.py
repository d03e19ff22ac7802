"""How many batches an epoch of a planned echo has: its decisions, made without the data."""

import math

from stretto.echo.chooser import Chooser, Held, Taken


def epoch_length(chooser: Chooser, fresh: int, step: int) -> int:
    """Return the batches from `step` on, where an epoch of `fresh` fresh batches begins.

    Args:
        chooser: Of a planned kind, as it is at the beginning of the epoch; it is used up.
        fresh: Batches of the bare loader.
        step: Batches handed out before.
    """
    held: Held | None = None
    taken = 0
    length = 0
    while taken <= fresh:
        is_fresh = held is None or chooser.choose(step + length, [held], _never) is None
        if is_fresh:
            held = Held(number=taken)
            taken += 1
        if taken > fresh or held is None:
            break
        held.uses += 1
        chooser.took(
            Taken(step=step + length, is_fresh=is_fresh, load_seconds=math.nan, use_seconds=math.nan)
        )
        length += 1
    return length


def _never() -> bool:
    return False
