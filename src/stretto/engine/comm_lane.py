"""The communication lane: runs the strategy's coroutine and has each of its effects performed."""

import functools
import math
import operator
from collections.abc import Callable, Generator, Mapping
from typing import Any

from stretto.engine import misuse
from stretto.engine.replica import NEED_ROUND, Performer, Replica
from stretto.engine.round import Round
from stretto.engine.runtime import Pending
from stretto.errors import ConfigError
from stretto.optimizer import learning_rate
from stretto.records import Update
from stretto.strategies import Strategy
from stretto.strategies.contract import ACCUMULATIONS, Begin, Boundary, Script

Woven = Generator[Any, Any, None]
Weave = Callable[[Script], Woven]
"""Adds effects to a script, before and after the script's own effects."""


class CommLane:
    """Performs one round per `advance`: from the reduction that waits for the round to the next reduction.

    No other code uses the lane's group, and the lane performs one effect after the other. So every rank issues the
    same collectives in the same order.

    Args:
        strategy: The strategy whose updates are performed.
        replica: This rank's replica; it exchanges gradients as the strategy needs.
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
        self.progress.bytes_before = replica.exchange.sent_bytes

    def advance(self, round: Round, opening: Pending[None] | None) -> Round:
        """Pass `round` to the waiting reduction, and perform effects until the update ends or the next reduction waits.

        Args:
            round: The round, closed.
            opening: The result of an earlier spawned `open`, if any; its error is raised here.
        """
        # It is over on this thread, which runs one after the other; the result raises what it raised.
        if opening is not None:
            opening.result()
        while not isinstance(self._waits_for, ACCUMULATIONS):  # guards may begin something too
            self.open()
        progress = self.progress
        started = self._timer.mark()
        # From here until the compute lane has waited for this call, the round and its buffer are this lane's alone.
        self._perform(round)
        progress.round_index += 1
        progress.lane_seconds += self._timer.since(started)
        if round.ends_update:
            self._commit(round)
        return round

    def _commit(self, last: Round) -> None:
        """Close the update that `last` has ended, and begin the next; it has no record if it did not step."""
        # The compute lane reads `progress` only once it has waited for this call.
        progress, replica = self.progress, self.replica
        sent_bytes, divergence = replica.exchange.sent_bytes, progress.divergence
        # A rank that steps alone does not ask the others: the step counts, whatever this rank contributed.
        if progress.stepped or not last.met:
            progress.step += 1
            # A rank alone has put an empty record in the place of a skipped one.
            reports = [one.report for one in progress.rounds if one.alone or not one.skipped]
            rounds = tuple(report.micro_batches for report in reports)
            loss_weight = sum(report.loss_weight for report in reports)
            last.update = Update(
                step=progress.step,
                round_index=progress.round_index - 1,
                samples=sum(report.samples for report in reports),
                fresh_samples=sum(report.fresh_samples for report in reports),
                weight=sum(report.weight for report in reports),
                loss=sum(report.loss_sum for report in reports) / loss_weight if loss_weight else math.nan,
                gradient_norm=progress.gradient_norm,
                staleness=min(self.strategy.staleness, progress.step - 1),
                micro_batches=tuple(map(sum, zip(*rounds, strict=True))),
                rounds=rounds,
                lane_seconds=progress.lane_seconds,
                seconds=0.0,  # the compute lane knows these two
                exposed_seconds=0.0,
                sent_bytes=sent_bytes - progress.bytes_before,
                learning_rates=tuple(map(learning_rate, progress.hyperparameters)),
                skipped_rounds=progress.skipped_rounds,
                incidents=tuple(progress.incidents),
                gap=replica.sync.gap,
                interval=replica.interval,
                noise=None if divergence is None else divergence.noise,
                divergence=None if divergence is None else divergence.mean_distance,
            )
            progress.incidents, progress.skipped_rounds = [], 0
        if last.met:
            # Bytes of 0 and 1, so that one "or" of long integers merges the rounds of all parameters.
            used = [int.from_bytes(one.report.used) for one in progress.rounds]
            last.used = functools.reduce(operator.or_, used).to_bytes(len(last.report.used))
        progress.rounds, progress.gradient_norm, progress.stepped, progress.divergence = (
            [],
            math.nan,
            False,
            None,
        )
        progress.lane_seconds, progress.bytes_before = 0.0, sent_bytes

    def open(self) -> None:
        """Perform the effects that come before the next gradients, unless that has been done.

        This may run while those gradients accumulate, because it does not change the model's parameters.
        """
        if self._waits_for is None:
            self._waits_for = next(self._script)
        if isinstance(self._waits_for, Begin):
            started = self._timer.mark()
            self._perform(None)
            self.progress.lane_seconds += self._timer.since(started)

    def _updates(self) -> Script:
        """Yield the effects of all updates, without end."""
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
            if round is None and isinstance(effect, NEED_ROUND):
                raise TypeError(f"a strategy asked for {effect!r} before its update's first gradient")
            try:
                answer = self._performers[type(effect)](effect, round)
            except Exception as error:
                misuse.check_step(error, effect, self.progress.hyperparameters, self.replica.where)
                raise
            self._waits_for = effect = self._script.send(answer)
            if isinstance(effect, (*ACCUMULATIONS, Begin)):
                return
