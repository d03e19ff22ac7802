"""Adds the guards' effects to a strategy's script, between the strategy's effects.

    Begin, before_reduce  ->  reduce  ->  Arrived, after_reduce
    before_step, Forget   ->  preview or step
    Forget                ->  gather    ->  after_gather
    Conclude, Forget      ->  launch
    before_land, Forget   ->  `land`
                              boundary  ->  after_update, Conclude

What comes before a reduction needs a `Begin`: the lane then performs it when the round has been submitted, and not at
the end of the round before. An average replaces masters, so the seals are forgotten before it. An average that runs
before the next gradients is guarded like a separate update without a step.
"""

import dataclasses
from collections.abc import Callable, Generator
from typing import Any, Literal

from stretto.guards.contract import GuardScript, Sealable
from stretto.optimizer import ReducedGradient
from stretto.strategies.contract import (
    ACCUMULATIONS,
    Average,
    Begin,
    Boundary,
    Gather,
    Land,
    Launch,
    Preview,
    Script,
    Step,
)

Moment = Literal[
    "at_start",
    "before_reduce",
    "after_reduce",
    "before_step",
    "after_gather",
    "before_land",
    "after_update",
    "before_install",
]
"""When guards run; see Note [When] in `stretto.guards.contract`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arrived:
    """A gradient has been summed, and waits for its step."""

    gradient: ReducedGradient


@dataclasses.dataclass(frozen=True, slots=True)
class Forget:
    """Values are about to change: their seals no longer count."""

    what: tuple[Sealable, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Conclude:
    """The update has ended, and all ranks gather their incidents."""


def guarded(script: Script, ask: Callable[[Moment], GuardScript]) -> Generator[Any, Any, None]:
    """Yield the effects of `script` and, between them, the guards' effects, which `ask` returns."""
    reply: Any = None
    is_ahead = True  # no gradient of this update has arrived yet
    while True:
        effect = script.send(reply)
        runs_ahead = is_ahead and isinstance(effect, Average)
        if isinstance(effect, Step | Preview) or runs_ahead:
            yield from ask("before_step")
        if isinstance(effect, Launch):
            yield Conclude()  # after a landing, as on ranks that have more data
        if isinstance(effect, Land):
            yield from ask("before_land")
        if isinstance(effect, Step | Average | Launch | Land):
            yield Forget(("state", "anchor", "reduced gradient"))
        if isinstance(effect, Gather):
            yield Forget(("anchor", "values to be shown"))
        if isinstance(effect, ACCUMULATIONS):
            # The lane performs what follows when the round has been submitted, not at the end of the round before.
            yield Begin()
            yield from ask("before_reduce")
        reply = yield effect
        if isinstance(effect, ACCUMULATIONS):
            is_ahead = False
            yield Arrived(reply)
            yield from ask("after_reduce")
        elif isinstance(effect, Gather):
            yield from ask("after_gather")
        elif isinstance(effect, Boundary):
            is_ahead = True
            yield from ask("after_update")
            yield Conclude()
        elif runs_ahead:
            yield from ask("after_update")
