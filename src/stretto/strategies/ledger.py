"""The ledger: runs a strategy's coroutine without performing anything, and adds up its effects."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from stretto.errors import ConfigError
from stretto.strategies import Strategy
from stretto.strategies.contract import (
    ACCUMULATIONS,
    AllReduce,
    Average,
    Divergence,
    Effect,
    Gather,
    Land,
    Launch,
    Local,
    Look,
    Moment,
    Postpone,
    Preview,
    Reduce,
    Step,
)

_DRY_UPDATES = 3
_DRY_UPDATES_THAT_LOOK = 1000
"""Number of updates to count if averages are not in every update."""
_ASIDES = (Look, Average, Postpone, Launch, Land)
"""Optional effects of an update."""


class _StandIn:
    """A gradient without values that can be added and passed on."""

    def __add__(self, other: object) -> "_StandIn":
        return self


@dataclasses.dataclass(frozen=True, slots=True)
class Ledger:
    """The costs of one update of a strategy, counted from its coroutine."""

    rounds: int
    """Number of exchanges that need a gradient from the compute lane."""
    replicated: bool
    """Whether every rank holds the whole optimizer state."""
    local: bool
    """Whether every worker steps with its own gradients, so that replicas differ between averages."""
    by_node: bool
    """Whether a worker is a node: its ranks sum their gradients, and hold the same replica."""
    asks_ahead: bool
    """Whether an update may begin with an effect before the reduction, which overlaps the gradients."""
    steps: int
    previews: int
    gradient_transfers: int
    """Gradients sent, in units of the buffer: a reduce-scatter, or half an all-reduce, counts as one."""
    gathers: int
    """Parameters gathered, in units of the buffer."""
    sum_transfers: int
    """Sums gathered by an all-reduce, in units of the buffer."""
    may_average: bool
    """Whether updates may average replicas, however rarely; outer steps do not count."""
    averages: float
    """Averages of the parameters by all-reduce; a mean over many updates. After `AllReduce` the largest number:
    equal replicas are not sent."""
    state_averages: float
    """Averages of the optimizer's state; a mean over many updates."""
    probe: int
    """Number of coordinates at which averages compare ranks; 0 if they do not."""
    fragments: int
    """Number of fragments into which outer steps cut the parameters; 0 without outer steps."""
    keeps_progress: bool
    """Whether a rank keeps a fragment's sent values until it arrives."""
    outer_steps: float
    """Outer steps of all parameters: a sum that is sent like a gradient, and a gather; a mean over many updates."""

    @property
    def sends_changes(self) -> bool:
        """Whether owners publish parameters, for which `Options.changes` can set the format."""
        return not self.replicated or self.fragments > 0

    def inside_bytes(self, accumulation: float) -> float:
        """Return bytes per parameter and update that are sent inside a worker, before the factor (L - 1) / L of L
        ranks.

        Args:
            accumulation: Bytes of one element of the gradient buffer.
        """
        return 2 * accumulation if self.by_node else 0.0

    def wire_bytes(self, gradient: float, value: float | None = None, *, moments: int = 2) -> float:
        """Return bytes per parameter and update that are sent between workers, before the factor (N - 1) / N.

        They do not include bytes between the ranks of a worker: see `inside_bytes`.

        Args:
            gradient: Bytes of one element of a gradient that is sent to its owner, and of a parameter that is gathered.
            value: Bytes of one element of sums and averages; None if the wire sends them like gradients.
            moments: Values that the optimizer keeps per element; averages of them are in float32.
        """
        value = gradient if value is None else value
        gradients = self.gradient_transfers + self.gathers + 2 * self.outer_steps
        values = self.sum_transfers + 2 * self.averages
        return gradients * gradient + values * value + 2 * self.state_averages * moments * 4

    def memory_bytes(
        self, strategy: Strategy, *, parameter: int, accumulation: int, world_size: int
    ) -> float:
        """Return the bytes per parameter that a rank holds with an Adam-like optimizer (two fp32 moments).

        Args:
            strategy: The strategy of this ledger.
            parameter: Bytes of one parameter.
            accumulation: Bytes of one element of the gradient buffer.
            world_size: Number of ranks that share the optimizer.
        """
        owners = 1 if self.replicated else world_size
        # A round beside the next one's gradients takes a buffer of its own, and so does an average.
        buffers = 2 if strategy.overlaps or self.asks_ahead else 1
        # A rank that steps alone needs no sums beside its buffer, where that is wide enough to step with.
        sums = 0 if self.local and accumulation >= 4 else 4 * self.rounds
        # Narrower replicas are averaged by what they have changed, which takes the last average to tell.
        last_average = 4 if self.may_average and parameter < 4 else 0
        # The anchor, a fragment on its way, perhaps what it was when it left, and the owner's share of the velocity.
        carried = 8 if self.keeps_progress else 4
        outer = 4 + carried / self.fragments + 4 / world_size if self.fragments else 0
        master, moments = 4, 8
        return parameter + buffers * accumulation + (master + moments + sums) / owners + last_average + outer


def ledger_of(strategy: Strategy) -> Ledger:
    """Return the strategy's ledger; equal strategies share one.

    Raises:
        ConfigError: Updates differ from each other, do not start with a reduction, or mix sharded and replicated
            reductions, so that quotas and ownership would be undefined; or the argument is not a strategy.
    """
    if not isinstance(strategy, Strategy):
        raise ConfigError(f"a ledger of {strategy!r}: expected a strategy")
    # A strategy of one's own may hold a list, and so have no hash.
    return _read_off_once(strategy) if _has_hash(strategy) else _read_off(strategy)


def _has_hash(strategy: Strategy) -> bool:
    try:
        hash(strategy)
    except TypeError:
        return False
    return True


def _read_off(strategy: Strategy) -> Ledger:
    runs = [_dry_run(strategy, Moment(0, 1, is_finishing=True))]
    if Launch not in map(type, runs[0]) and Local in map(type, runs[0]):
        raise ConfigError(
            f"strategy {strategy.name}: an update of a rank without further data must contain a Launch, so "
            "that ranks that step alone can agree on an end"
        )
    num_updates = _DRY_UPDATES_THAT_LOOK if Look in map(type, runs[0]) else _DRY_UPDATES
    averages: list[Any] = []
    outer_steps = 0.0
    gap, interval, in_flight_rounds = 0, None, None
    for index in range(num_updates):
        gap += 1
        in_flight_rounds = None if in_flight_rounds is None else in_flight_rounds + 1
        runs.append(
            _dry_run(
                strategy,
                Moment(index, gap, is_finishing=False, interval=interval, in_flight_rounds=in_flight_rounds),
            )
        )
        for effect in runs[-1]:
            outer_steps += 1 / effect.fragments if isinstance(effect, Launch) and effect.outer else 0
            in_flight_rounds = _in_flight_after(strategy, effect, in_flight_rounds)
        interval = next((e.updates for e in runs[-1] if isinstance(e, Postpone)), interval)
        means = [effect for effect in runs[-1] if _is_mean(effect)]
        if means and in_flight_rounds is not None:
            raise ConfigError(
                f"strategy {strategy.name}: a mean of everything must arrive in the update that sends it: "
                "expected `Land` right after Launch()"
            )
        averages += means
        gap = 0 if any(isinstance(effect, Average | Land) for effect in runs[-1]) else gap
    kinds = _check_rounds(strategy, runs)
    count = Counter(kinds)
    effects = [effect for run in runs for effect in run]
    launches = [effect for effect in effects if isinstance(effect, Launch) and effect.outer]
    _check_launches(strategy, effects)
    return Ledger(
        rounds=sum(count[kind] for kind in ACCUMULATIONS),
        replicated=count[AllReduce] + count[Local] > 0,
        local=count[Local] > 0,
        by_node=any(isinstance(effect, Local) and effect.worker == "node" for effect in effects),
        asks_ahead=isinstance(runs[0][0], _ASIDES),
        steps=count[Step],
        previews=count[Preview],
        gradient_transfers=count[Reduce] + count[AllReduce],
        gathers=count[Gather],
        sum_transfers=count[AllReduce],
        may_average=not launches and any(isinstance(effect, Look | Average | Launch) for effect in effects),
        averages=len(averages) / num_updates,
        state_averages=sum(effect.state for effect in averages) / num_updates,
        probe=max((effect.probe for effect in effects if isinstance(effect, Average)), default=0),
        fragments=max((effect.fragments for effect in launches), default=0),
        keeps_progress=any(effect.keeps_progress for effect in launches),
        outer_steps=outer_steps / num_updates,
    )


_read_off_once = functools.lru_cache(256)(_read_off)


def _is_mean(effect: Effect) -> bool:
    """Return whether an effect averages all replicas without an outer step."""
    return isinstance(effect, Average) or (isinstance(effect, Launch) and effect.outer is None)


def _check_launches(strategy: Strategy, effects: Sequence[Effect]) -> None:
    """Raise unless all launches are of one kind, with only the settings of that kind."""
    launches = [effect for effect in effects if isinstance(effect, Launch)]
    if len({effect.outer is None for effect in launches}) > 1:
        raise ConfigError(
            f"strategy {strategy.name}: expected an outer step in all of its launches, or in none"
        )
    for effect in launches:
        if effect.state if effect.outer else (effect.fragments > 1 or effect.keeps_progress):
            raise ConfigError(
                f"strategy {strategy.name}: fragments and progress need an outer step, and the optimizer's "
                f"state needs a mean of everything, found {effect}"
            )


def _in_flight_after(strategy: Strategy, effect: Effect, in_flight_rounds: int | None) -> int | None:
    """Return the number of rounds for which a fragment is in flight after `effect`; None if none is."""
    if isinstance(effect, Launch | Land) and (in_flight_rounds is None) != isinstance(effect, Launch):
        raise ConfigError(
            f"strategy {strategy.name}: one fragment is in flight at a time: expected `Launch` and `Land` "
            f"alternately, found {effect} while {'none' if in_flight_rounds is None else 'one'} was in flight"
        )
    return 0 if isinstance(effect, Launch) else None if isinstance(effect, Land) else in_flight_rounds


def _check_rounds(strategy: Strategy, runs: Sequence[Sequence[Effect]]) -> list[type[Effect]]:
    """Return the effects that every update yields, after checking them."""
    distinct = {tuple(type(e) for e in run if not isinstance(e, _ASIDES)) for run in runs}
    if len(distinct) > 1:
        raise ConfigError(
            f"strategy {strategy.name}: every update must ask for the same effects, found {sorted(map(str, distinct))}"
        )
    kinds: list[type[Effect]] = list(distinct.pop())
    if not kinds or kinds[0] not in ACCUMULATIONS:
        raise ConfigError(f"strategy {strategy.name}: an update must begin with Reduce, AllReduce or Local")
    count = Counter(kinds)
    if sum(count[kind] > 0 for kind in ACCUMULATIONS) > 1:
        raise ConfigError(f"strategy {strategy.name}: Reduce, AllReduce and Local cannot be mixed")
    _check_asides(strategy, runs, count)
    for number, kind in enumerate(kinds):
        ends_round = number + 1 == len(kinds) or kinds[number + 1] in ACCUMULATIONS
        if ends_round and kind not in ((Gather,) if count[Reduce] else (Step, Preview)):
            raise ConfigError(
                f"strategy {strategy.name}: every round must end with the values that the model shows next, a "
                f"Gather after Reduce, a Step or Preview after AllReduce or Local; found {kind.__name__} as "
                f"effect {number + 1} of {len(kinds)}"
            )
    if count[Step] != 1:
        raise ConfigError(
            f"strategy {strategy.name}: an update must step exactly once, found {count[Step]} steps"
        )
    if count[Local] > 1:
        raise ConfigError(
            f"strategy {strategy.name}: expected one Local per update, found {count[Local]}: raise "
            "micro_batches instead"
        )
    return kinds


def _check_asides(strategy: Strategy, runs: Sequence[Sequence[Effect]], count: Counter[type[Effect]]) -> None:
    """Raise unless averages and outer steps have replicas, and come at an allowed place."""
    if not count[Local] and any(isinstance(effect, Launch | Land) for run in runs for effect in run):
        raise ConfigError(
            f"strategy {strategy.name}: `Launch` and `Land` need replicas that step alone, with Local"
        )
    if count[Local] and any(isinstance(effect, Average) for run in runs for effect in run):
        raise ConfigError(
            f"strategy {strategy.name}: replicas that step alone, with Local, need `Launch()` and `Land()`; "
            "Average is for replicas that step with AllReduce"
        )
    asks_ahead = any(isinstance(run[0], _ASIDES) for run in runs)
    if asks_ahead and (strategy.overlaps or not count[AllReduce]):
        raise ConfigError(
            f"strategy {strategy.name}: only an update with AllReduce and without overlaps may look and average ahead "
            "of its gradients; with Local, ranks agree on their end at averages, so averages come after the step"
        )
    if count[Reduce] and any(isinstance(effect, _ASIDES) for run in runs for effect in run):
        raise ConfigError(
            f"strategy {strategy.name}: Look and averages need replicas, after Local or AllReduce; after Reduce every "
            "rank holds another shard"
        )


def _dry_run(strategy: Strategy, moment: Moment) -> list[Effect]:
    effects: list[Effect] = []
    script = strategy.update()
    try:
        effect = next(script)
        while True:
            effects.append(effect)
            effect = script.send(_answer(effect, moment))
    except StopIteration:
        return effects


def _answer(effect: Effect, moment: Moment) -> Any:
    if isinstance(effect, Look):
        return moment
    if isinstance(effect, Average) and effect.probe:
        return Divergence.none()
    if isinstance(effect, Launch):
        return True
    return _StandIn() if isinstance(effect, ACCUMULATIONS) else None
