"""The ledger: runs a strategy's coroutine without performing anything, and adds up what it asks for."""

import dataclasses
from collections import Counter

from stretto.effects import AllReduce, Effect, Gather, Preview, Reduce, Step
from stretto.errors import ConfigError
from stretto.strategies import Strategy

_DRY_UPDATES = 3


class _StandIn:
    """A gradient that can be added and passed on, and holds nothing."""

    def __add__(self, other: object) -> "_StandIn":
        return self


@dataclasses.dataclass(frozen=True, slots=True)
class Ledger:
    """What one update of a strategy costs, read off its coroutine."""

    rounds: int
    """Exchanges that need a gradient from the compute lane."""
    replicated: bool
    """Whether every rank holds the whole optimizer."""
    steps: int
    previews: int
    gradient_transfers: int
    """Gradients sent, in buffers' worth: a reduce-scatter or half an all-reduce is one."""
    parameter_transfers: int
    """Parameters (or, for an all-reduce, sums) gathered, in buffers' worth."""

    def wire_bytes(self, bytes_per_element: float) -> float:
        """Return bytes per parameter and update that cross the wire, before the factor (N - 1) / N."""
        return (self.gradient_transfers + self.parameter_transfers) * bytes_per_element

    def memory_bytes(
        self, strategy: Strategy, *, parameter: int, accumulation: int, world_size: int
    ) -> float:
        """Return bytes per parameter that a rank holds with an Adam-like optimizer (two fp32 moments).

        Args:
            strategy: Whose ledger this is.
            parameter: Bytes of one parameter.
            accumulation: Bytes of one element of the gradient buffer.
            world_size: Ranks that share the optimizer.
        """
        owners = 1 if self.replicated else world_size
        buffers = 2 if strategy.overlaps else 1
        master, moments, sums = 4, 8, 4 * self.rounds
        return parameter + buffers * accumulation + (master + moments + sums) / owners


def ledger_of(strategy: Strategy) -> Ledger:
    """Return the strategy's ledger.

    Raises:
        ConfigError: Updates differ from each other, do not start with a reduction, or mix sharded and
            replicated reductions, so that quotas and ownership would be undefined.
    """
    runs = [_dry_run(strategy) for _ in range(_DRY_UPDATES)]
    if any(run != runs[0] for run in runs):
        raise ConfigError(
            f"strategy {strategy.name}: every update must ask for the same effects, found {runs}"
        )
    kinds = runs[0]
    if not kinds or kinds[0] not in (Reduce, AllReduce):
        raise ConfigError(f"strategy {strategy.name}: an update must begin with Reduce or AllReduce")
    count = Counter(kinds)
    if count[Reduce] and count[AllReduce]:
        raise ConfigError(f"strategy {strategy.name}: Reduce and AllReduce cannot be mixed")
    for number, kind in enumerate(kinds):
        ends_round = number + 1 == len(kinds) or kinds[number + 1] in (Reduce, AllReduce)
        if ends_round and kind not in ((Gather,) if count[Reduce] else (Step, Preview)):
            raise ConfigError(
                f"strategy {strategy.name}: every round must end with what its landing shows, a Gather after Reduce, "
                f"a Step or Preview after AllReduce; found {kind.__name__} as effect {number + 1} of {len(kinds)}"
            )
    if count[Step] != 1:
        raise ConfigError(
            f"strategy {strategy.name}: an update must step exactly once, found {count[Step]} steps"
        )
    return Ledger(
        rounds=count[Reduce] + count[AllReduce],
        replicated=count[AllReduce] > 0,
        steps=count[Step],
        previews=count[Preview],
        gradient_transfers=count[Reduce] + count[AllReduce],
        parameter_transfers=count[Gather] + count[AllReduce],
    )


def _dry_run(strategy: Strategy) -> list[type[Effect]]:
    kinds: list[type[Effect]] = []
    script = strategy.update()
    try:
        effect = next(script)
        while True:
            kinds.append(type(effect))
            effect = script.send(_StandIn() if isinstance(effect, Reduce | AllReduce) else None)
    except StopIteration:
        return kinds
