"""Update strategies: one file each, with only the coroutine and its options."""

from stretto.errors import ConfigError
from stretto.fields import unknown_name
from stretto.strategies.acco import ACCO
from stretto.strategies.average import Average
from stretto.strategies.contract import Strategy
from stretto.strategies.delayed import DPU, WeightPrediction
from stretto.strategies.diloco import DiLoCo
from stretto.strategies.local import LocalSGD
from stretto.strategies.paft import PAFTDyn, PAFTSync
from stretto.strategies.synchronous import DDP, ZeRO1

STRATEGIES: dict[str, type[Strategy]] = {
    kind.name: kind
    for kind in (DDP, ZeRO1, DPU, WeightPrediction, ACCO, Average, LocalSGD, DiLoCo, PAFTSync, PAFTDyn)
}


def strategy_by_name(name: str) -> Strategy:
    """Return the strategy of that name with its default options.

    Raises:
        UnknownName: There is no such strategy.
    """
    if name not in STRATEGIES:
        raise unknown_name("no strategy is called", name, STRATEGIES)
    return STRATEGIES[name]()


def check_strategy(strategy: object) -> Strategy:
    """Return `strategy` if it is a strategy.

    Raises:
        ConfigError: It is not; the message covers its class or its name.
    """
    if isinstance(strategy, Strategy):
        return strategy
    named = strategy.name if isinstance(strategy, type) and issubclass(strategy, Strategy) else strategy
    kind = STRATEGIES.get(named) if isinstance(named, str) else None
    meant = "" if kind is None else f"; did you mean {kind.__name__}()?"
    raise ConfigError(f"strategy: expected an instance such as ACCO(), found {strategy!r}{meant}")


__all__ = [
    "ACCO",
    "DDP",
    "DPU",
    "STRATEGIES",
    "Average",
    "DiLoCo",
    "LocalSGD",
    "PAFTDyn",
    "PAFTSync",
    "Strategy",
    "WeightPrediction",
    "ZeRO1",
    "strategy_by_name",
]
