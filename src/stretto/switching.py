"""Strategies that take turns in one job: a plan of them, and what happens where the next one takes over.

Note [A boundary]
    Behind the last update of a phase nothing is accumulated: what is in sight of that update lands at once. Replicas
    that differ are brought together as at the end of a job. Then the job's state is held in memory (`stretto.held`),
    the next strategy's exchange, masters, replica and communication lane take the place of the old ones, and the state
    is loaded as from a checkpoint. Model, hooks, group, layout, feed, schedulers, incidents and strikes stay.
"""

import dataclasses
import weakref
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from stretto.continuation import Continuation
from stretto.engine.job import Job
from stretto.engine.options import Clock, Options, Total
from stretto.errors import ConfigError
from stretto.feed import Feed
from stretto.fields import check_fields, is_count
from stretto.guards.replay import GuardedRounds
from stretto.held import go_on, hold
from stretto.start import Parts, exchange_of, lane_of, owner_of
from stretto.strategies import Strategy, check_strategy


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """A strategy for a part of a job, with settings of its own."""

    strategy: Strategy
    """How gradients become updates."""
    _: dataclasses.KW_ONLY
    wire: str | None = None
    """See `Options.wire`; None is the job's, here and below."""
    changes: str | None = None
    """See `Options.changes`."""
    estimates: str | None = None
    """See `Options.estimates`."""
    micro_batches: int | Total | Clock | None = None
    """Per rank and update, or a `Total` of all ranks, or a `Clock` per round."""

    def __post_init__(self) -> None:
        check_strategy(self.strategy)
        check_fields(self)

    def options(self, job: Options) -> Options:
        """Return the job's options with those of this phase."""
        own = {name: getattr(self, name) for name in ("wire", "changes", "estimates")}
        return dataclasses.replace(job, **{name: value for name, value in own.items() if value is not None})


@dataclasses.dataclass(frozen=True, slots=True)
class Switching:
    """A plan of strategies for one job, in the place of a strategy.

        Switching({0: ZeRO1(), 100: Phase(ACCO(), wire="int8"), 900: DDP()})

    Here `ACCO` takes over after update 100 and `DDP` after update 900.
    """

    phases: Mapping[int, Strategy | Phase]
    """A strategy, or a phase, by the number of committed updates after which it begins: from 0, in rising order."""

    def __post_init__(self) -> None:
        if not isinstance(self.phases, Mapping):
            raise ConfigError(
                f"Switching({self.phases!r}): expected strategies by update, as {{0: ZeRO1(), 100: DDP()}}"
            )
        check_starts(list(self.phases))
        # The dataclass is frozen.
        object.__setattr__(self, "phases", {step: _as_phase(one) for step, one in self.phases.items()})

    def parts(
        self,
        options: Options,
        micro_batches: int | Total | Clock,
        parts_of: Callable[[Strategy, Options, int | Total | Clock], Parts],
    ) -> dict[int, Parts]:
        """Return what a job is made of, by the update after which it is.

        Args:
            options: Of the job.
            micro_batches: Of the job.
            parts_of: Makes it of a phase's strategy, options and micro-batches.
        """
        phases = {step: _as_phase(one) for step, one in self.phases.items()}
        return {
            step: parts_of(
                phase.strategy,
                phase.options(options),
                micro_batches if phase.micro_batches is None else phase.micro_batches,
            )
            for step, phase in phases.items()
        }


def check_starts(starts: Sequence[int]) -> None:
    """Raise unless phases begin at 0 and then ever later.

    Raises:
        ConfigError: Says what was found, and in which order it could stand.
    """
    if wrong := [start for start in starts if not is_count(start, 0)]:
        raise ConfigError(f"switching at update {wrong[0]!r}: expected a number of committed updates, from 0")
    twice = [start for start in starts if starts.count(start) > 1]
    if twice:
        raise ConfigError(
            f"switching at update {twice[0]}: two strategies begin there; expected one, leave out the other"
        )
    if not starts or starts[0] != 0 or list(starts) != sorted(starts):
        order = ", ".join(map(str, sorted({0, *starts})))
        raise ConfigError(
            f"switching at updates {', '.join(map(str, starts)) or 'none'}: expected the first strategy at 0 and each "
            f"other one later than the one before; did you mean {order}?"
        )


def _as_phase(one: Strategy | Phase) -> Phase:
    return one if isinstance(one, Phase) else Phase(one)


class Phases:
    """The phases of one rank's job: it knows which one is at work, and lets the next one begin.

    Args:
        phases: What the job is made of, by the update after which it is.
        job: Runs the first one.
        feed: Of the job; it comes here after the last update of a phase.
        entered: Told of every phase that begins.
    """

    def __init__(
        self, phases: Mapping[int, Parts], job: Job, feed: Feed, entered: Callable[[Parts], None]
    ) -> None:
        self._starts = list(phases)
        self._phases = list(phases.values())
        self._job = job
        self._feed = feed
        self._entered = entered
        self._now = 0
        feed.take_turns(self._begin_next)
        job.compute.call_before_forward(_weakly(feed.land_phase))  # a checkpoint may have left a round
        self._look_ahead(0)

    def enter(self, step: int) -> None:
        """Let the phase begin that is due after `step` updates, if it is another one; all ranks must call, at rest."""
        due = self._look_ahead(step)
        if due != self._now:
            take_over(self._job, self._feed, self._phases[self._now], self._phases[due])
            self._now = due
            self._entered(self._phases[due])

    def _begin_next(self) -> None:
        """Begin the phase that is due; all ranks come here after the same update, with nothing accumulated."""
        job = self._job
        self._look_ahead(job.compute.course.steps)  # or the rounds below would come here again
        sent_bytes = job.exchange.sent_bytes
        self._feed.unite()
        self.enter(job.compute.course.steps)
        job.comm.progress.begin_phase(sent_bytes)

    def _look_ahead(self, step: int) -> int:
        """Tell the feed what follows after `step` updates, and return the index of the phase that is due there."""
        following = bisect_right(self._starts, step)
        self._feed.expect_phase(self._starts[following] if following < len(self._starts) else None)
        return following - 1


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return what calls a method as long as its object lives.

    The job may not hold its feed: see Note [Jobs that nobody holds] in `engine/holding.py`.
    """
    held = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := held()) is not None:
            alive()

    return call


def take_over(job: Job, feed: Feed, old: Parts, new: Parts) -> None:
    """Let the strategy of `new` take over a job at rest; all ranks must call. See Note [A boundary]."""
    compute, model, before, progress = job.compute, job.model, job.exchange, job.comm.progress
    compute.show_committed(meets=True)  # what has landed since a checkpoint was loaded may show an estimate
    held = hold(Continuation(job, feed, old.options, None), old.strategy.name, copies=False)
    progress.note([incident for one in model.listeners for incident in one.ended()])
    guards = [one for one in model.listeners if isinstance(one, GuardedRounds)]
    model.listeners[:] = [one for one in model.listeners if one not in guards]
    compute.runtime.join()
    exchange = exchange_of(new.options, before.group, job.layout, *before.waits, before.numbers)
    exchange.take_account(before)
    sharded = (
        job.sharded
        if new.ownership == old.ownership
        else owner_of(new, model.parameters, exchange, job.within)
    )
    strikes = guards[0].interpreter.strikes if guards else None
    lane = lane_of(new, exchange, job.inside, sharded, progress, strikes, job.within)
    job.work_with(lane.comm, exchange, sharded)
    compute.take_up(lane.comm, lane.quota, lane.accumulate, compute.accumulation.buffer)
    lane.watch(job)
    go_on(Continuation(job, feed, new.options, None), new.strategy.name, [held], counted=compute.num_counted)
