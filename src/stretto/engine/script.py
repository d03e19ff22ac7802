"""What the communication lane performs: a strategy's updates one after the other, with what guards ask between them."""

from collections.abc import Generator
from typing import Any

from stretto.engine.sentry import Sentry
from stretto.guards.contract import GuardEffect
from stretto.optimizer import ReducedGradient
from stretto.strategies import Strategy
from stretto.strategies.contract import Boundary, Effect


def updates(strategy: Strategy, sentry: Sentry) -> Generator[Effect | GuardEffect, Any, None]:
    """Yield effects for ever."""
    while True:
        yield from strategy.update()
        yield Boundary()
        yield from sentry.ask("after_update")


def reduced(gradient: object) -> ReducedGradient:
    """Return the gradient that a strategy has passed on.

    Raises:
        TypeError: It is none that it was given.
    """
    if not isinstance(gradient, ReducedGradient):
        raise TypeError(f"a strategy must pass on the gradient it was given, not {type(gradient).__name__}")
    return gradient
