"""The communication lane: runs the strategy's coroutine and has each of its effects performed."""

from collections.abc import Callable, Generator, Mapping
from typing import Any

from stretto.engine import misuse
from stretto.engine.replica import Performer, Replica
from stretto.engine.round import Round
from stretto.engine.runtime import Pending
from stretto.errors import ConfigError
from stretto.strategies import Strategy
from stretto.strategies.contract import ACCUMULATIONS, Begin, Boundary, Script

Woven = Generator[Any, Any, None]
Weave = Callable[[Script], Woven]
"""Adds effects to a script, before and after the script's own."""


class CommLane:
    """Performs one round per `advance`: from the reduction that waits for the round to the next reduction.

    No other code uses the lane's group, and the lane performs one effect after the other. So every rank issues the
    same collectives in the same order.

    Args:
        strategy: Its updates are performed.
        replica: This rank's; it exchanges gradients as the strategy needs.
        performers: The performer of each kind of effect.
        asks_ahead: Whether an update may begin with an effect that needs no gradients.
        weave: Adds the guards' effects to the strategy's effects.
    """

    def __init__(
        self,
        strategy: Strategy,
        replica: Replica,
        performers: Mapping[type, Performer],
        *,
        asks_ahead: bool,
        weave: Weave | None = None,
    ) -> None:
        self.strategy = strategy
        self.replica = replica
        self.runtime = replica.runtime
        self.progress = replica.progress
        self.asks_ahead = asks_ahead
        self._performers = performers
        self._timer = self.runtime.timer()
        self._script = self._updates() if weave is None else weave(self._updates())
        self._waits_for: Any = None
        """The effect that waits for its answer; None before the script begins."""
        self.progress.begin_update(replica.exchange.sent_bytes)

    def advance(self, round: Round, opening: Pending[None] | None) -> Round:
        """Hand `round` to the waiting reduction, and perform effects until the update ends or the next one waits.

        Args:
            round: The round, closed.
            opening: A call of `open` that was spawned before, if one was; its error, if any, is raised here.
        """
        if opening is not None:
            opening.result()
        while not isinstance(self._waits_for, ACCUMULATIONS):  # guards may begin something too
            self.open()
        progress = self.progress
        started = self._timer.mark()
        # From here until the compute lane has waited for this call, the round and its buffer are this lane's alone.
        self._perform(round)
        progress.end_round(self._timer.since(started))
        if round.ends_update:
            # `commit` begins the next update, with a list of its own.
            replica, round.reductions = self.replica, progress.reductions
            round.update = progress.commit(
                replica.exchange.sent_bytes,
                gap=replica.sync.gap,
                interval=replica.interval,
                staleness=self.strategy.staleness,
            )
        return round

    def open(self) -> None:
        """Perform the effects that come before the next gradients, unless that has been done.

        This may run while those gradients accumulate, because the model's parameters stay as they are.
        """
        if self._waits_for is None:
            self._waits_for = next(self._script)
        if isinstance(self._waits_for, Begin):
            started = self._timer.mark()
            self._perform(None)
            self.progress.open(self._timer.since(started))

    def _updates(self) -> Script:
        """Yield the effects of one update after the other, without end."""
        while True:
            if self.asks_ahead:
                yield Begin()
            yield from self.strategy.update()
            yield Boundary()

    def _perform(self, round: Round | None) -> None:
        """Perform the waiting effect and the following effects, until one waits for the next round."""
        effect = self._waits_for
        while True:
            if type(effect) not in self._performers:
                raise ConfigError(
                    f"strategy {self.strategy.name} asks for {type(effect).__name__} in update "
                    f"{self.progress.step + 1}: expected an effect of its first updates, from which the job "
                    "planned its buffers"
                )
            try:
                answer = self._performers[type(effect)](effect, round)
            except Exception as error:
                misuse.check_step(error, effect, self.progress.hyperparameters, self.replica.where)
                raise
            self._waits_for = effect = self._script.send(answer)
            if isinstance(effect, (*ACCUMULATIONS, Begin)):
                return
