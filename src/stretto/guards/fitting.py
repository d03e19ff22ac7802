"""Checks which guards work with a job's strategy."""

import dataclasses
import logging
from collections.abc import Sequence

from stretto.engine.options import Options
from stretto.errors import ConfigError
from stretto.fields import did_you_mean
from stretto.guards.contract import Guard
from stretto.guards.replica import ReplicaGuard
from stretto.guards.rest import AtRest
from stretto.strategies import Strategy
from stretto.strategies.ledger import Ledger, ledger_of

_log = logging.getLogger("stretto")


def choose_guards(
    guards: Sequence[Guard] | str, strategy: Strategy, options: Options
) -> tuple[tuple[Guard, ...], Options]:
    """Return a job's guards and options; "standard" means all guards that fit the strategy, and a verified exchange.

    Raises:
        ConfigError: The argument is another word, or not a sequence.
    """
    if not isinstance(guards, Sequence):
        raise ConfigError(f"guards: expected 'standard' or a sequence of guards, found {guards!r}")
    if not isinstance(guards, str):
        return tuple(guards), options
    if guards != "standard":
        hint = did_you_mean(guards, ["standard"])
        raise ConfigError(f"guards={guards!r}: expected 'standard' or a sequence of guards{hint}")
    ledger = ledger_of(strategy)
    left_out: dict[str, str] = {}
    fitting = []
    for guard in (ReplicaGuard(), AtRest()):
        reason = unfit(guard, strategy, ledger)
        if reason is None:
            fitting.append(guard)
        else:
            left_out[guard.name] = reason
    if ledger.by_node:
        left_out["verified"] = "does not check sums inside a worker that is a node"
    else:
        options = dataclasses.replace(options, verified=True)
    for left, reason in left_out.items():
        _log.info("guards='standard' omits %s: it %s", left, reason)
    return tuple(fitting), options


def check_guards(guards: Sequence[Guard], strategy: Strategy, ledger: Ledger) -> None:
    """Raise unless all guards work under `strategy`.

    Raises:
        ConfigError: A guard does not; the message names the first.
    """
    for guard in guards:
        if reason := unfit(guard, strategy, ledger):
            raise ConfigError(
                f"guard {guard.name} {reason}; guards='standard' takes only the guards that fit"
            )


def unfit(guard: Guard, strategy: Strategy, ledger: Ledger) -> str | None:
    """Return why a guard does not work under `strategy`; None if it does."""
    if guard.needs_equal_parameters and (ledger.local or ledger.may_average):
        return (
            f"runs a rank's micro-batches again on another, and strategy {strategy.name} lets parameters differ "
            "between ranks"
        )
    if guard.overlaps and not strategy.overlaps:
        return f"runs during the next update's gradients, and strategy {strategy.name} waits for its communication lane"
    return None
