"""Guards woven into a strategy's script: their effects come before a step, after a sum, and after an update.

    reduce  ->  Arrived, after_reduce  ->  preview or step: before_step, Forget  ->  boundary: after_update, Conclude

An average replaces masters, so the seals are forgotten before it. An average that runs before the next gradients is
guarded like a separate update without a step.
"""

import dataclasses
from collections.abc import Callable, Generator
from typing import Any, Literal

from stretto.guards.contract import GuardScript
from stretto.optimizer import ReducedGradient
from stretto.strategies.contract import ACCUMULATIONS, Average, Boundary, Preview, Script, Step

Moment = Literal["at_start", "after_reduce", "before_step", "after_update"]
"""When guards are asked; see Note [When] in `stretto.guards.contract`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arrived:
    """A gradient has been summed, and waits for its step."""

    gradient: ReducedGradient


@dataclasses.dataclass(frozen=True, slots=True)
class Forget:
    """Masters and optimizer state are about to change."""


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
        if isinstance(effect, Step | Average):
            yield Forget()
        reply = yield effect
        if isinstance(effect, ACCUMULATIONS):
            is_ahead = False
            yield Arrived(reply)
            yield from ask("after_reduce")
        elif isinstance(effect, Boundary):
            is_ahead = True
            yield from ask("after_update")
            yield Conclude()
        elif runs_ahead:
            yield from ask("after_update")
