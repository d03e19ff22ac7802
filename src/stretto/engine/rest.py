"""What is done with a job at rest, or to bring it there: settle, save, continue from a checkpoint, drop."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from stretto.engine import misuse
from stretto.engine.accumulation import Accumulation, GradientBuffer
from stretto.engine.agreed import Alike
from stretto.engine.buffers import Buffer
from stretto.engine.compute_lane import ComputeLane, Stage
from stretto.engine.model import trains
from stretto.engine.round import Landing, Reduction
from stretto.engine.runtime import Arrived
from stretto.engine.statistics import at
from stretto.engine.written import agreed_at_rest, as_written
from stretto.errors import OutOfTurn
from stretto.optimizer import read_hyperparameters


class RestingLane(ComputeLane):
    """A compute lane with all that an update does not pass; arguments are those of `ComputeLane`."""

    @property
    def is_clear(self) -> bool:
        """Whether the last update has ended and this rank has counted no micro-batch since."""
        is_all_landed = self.course.stage is Stage.ACCUMULATING
        return self.course.at_boundary and is_all_landed and self.accumulation.contribution.count == 0

    @property
    def is_lane_idle(self) -> bool:
        """Whether the communication lane has no work, so that nobody writes the masters."""
        return not self.course.is_under_way and self._opening is None

    def drop(self) -> bool:
        """Drop what has been counted for the next update; return False, and drop nothing, if some is submitted."""
        if self.course.place or self.has_round_ready:
            return False
        self.accumulation.restart()
        for listener in self.model.listeners:
            listener.round_closed()
        return True

    def let_go(self) -> None:
        """Let go of the model; see Note [Jobs that nobody holds] in `engine/holding.py`."""
        self.hooks.unhook()
        self.lifetime.retire()

    def check_alike(self, what: str) -> None:
        """Raise `OutOfTurn` if a round is in flight that other ranks may not have submitted, under a `Clock`."""
        if self.course.is_under_way and not self.quota.is_fixed:
            raise OutOfTurn(
                f"{self.where}: {what} while a round is in flight, under a Clock: other ranks may have "
                "counted fewer rounds; call it right after an Update was returned, before the next forward "
                "pass"
            )

    def check_between_updates(self, what: str) -> None:
        """Raise `OutOfTurn` in the middle of an update, whose contributions `what` would lose."""
        self._finish_opening()
        accumulation = self.accumulation
        started = accumulation.has_arrived or (
            not self.has_round_ready and accumulation.contribution.count > 0
        )
        if started or not self.is_lane_idle or not self.course.at_boundary:
            raise OutOfTurn(
                f"{self.where}: {what} in the middle of an update: call it right after an Update was "
                "returned, before training, or after finish()"
            )

    @contextmanager
    def settled(self, *, meets: bool = False) -> Iterator[None]:
        """Show the committed parameters and the agreed buffers inside the block; see `show_committed`."""
        if self.model.held_back is not None:
            yield
            return
        self.show_committed(meets=meets)
        try:
            yield
        finally:
            changed = self.model.changed()
            is_shown_anyway = self.model.show_again()
        if changed is not None:
            raise misuse.written_at_rest(changed, self.where)
        if is_shown_anyway:
            self.model.accept_writes(lambda: self.replica.differs(self.model.parameters), self.where)

    def show_committed(self, *, meets: bool = False) -> None:
        """Put the committed parameters and the agreed buffers into the model; all ranks must call, alike.

        Args:
            meets: Let ranks agree on what was written to buffers: see Note [Buffers that are written at rest].
        """
        self.check_alike("settling")
        self._finish_opening()
        landing = self.wait_for_lane()
        for listener in self.model.listeners:
            listener.committed_is_read()  # the communication lane is at rest, so this thread may do it
        agreement = self.replica.agreement
        is_mean = agreement.steps_alone and not agreement.is_united and landing is None
        buffers = [] if is_mean else self._buffers(landing, meets=meets)
        if self.model.shown == "committed" and agreement.state is Alike.UNITED and landing is None:
            self.model.settle(None, buffers)
            return
        # The idle buffer may hold gathered values: the next take-off zeroes it.
        buffer = self._idle if self._idle is not None else GradientBuffer(self.layout)
        gathered = self.runtime.spawn(
            lambda: self.replica.gather_committed(buffer.flats, self.statistics)
        ).result()
        self.model.settle(buffer.views, gathered if is_mean else buffers)

    def _buffers(self, landing: Landing | None, *, meets: bool) -> list[Buffer]:
        """Return what ranks agree on once `landing` is installed, with what was written at rest."""
        statistics, round_index = self.statistics, self.comm.progress.round_index
        if not statistics.names:
            return []
        own, snapshot = self.model.trained_buffers, None if self._ready is None else self._ready.statistics
        buffers = statistics.with_late_writes(statistics.agreed_after(landing))
        if landing is None and (self.has_round_ready or not self.accumulation.contribution.count):
            buffers = as_written(statistics.left_by(snapshot, round_index), own, buffers)
        if not meets:
            return buffers
        agreed = self.runtime.spawn(
            lambda: agreed_at_rest(self.replica.exchange, statistics, buffers)
        ).result()
        statistics.agree_on(agreed, round_index, own)
        return agreed

    def _finish_opening(self) -> None:
        if self._opening is not None:
            self._opening = Arrived(self._opening.result())

    def reduce_ahead(self) -> Reduction:
        """Exchange now the gradients of the round that starts next, for a checkpoint and for it; all must call."""
        ready = self.close_round()
        if ready.reduction is not None:
            return ready.reduction
        hyperparameters = read_hyperparameters(self.model.optimizer)
        trained = bytes(map(trains, self.model.registered))
        ready = dataclasses.replace(
            ready, vote=self.course.vote, hyperparameters=hyperparameters, trains=trained
        )
        reduction = self.runtime.spawn(lambda: self.replica.reduce(ready)).result()
        self.close_round(reduction)
        self.accumulation.remember()  # an exchange may leave anything in the buffer
        return reduction

    def written_since_closed(self) -> dict[str, Buffer]:
        """Return, by name, what buffers were when the ready round was closed, where that is no longer so."""
        if self._ready is None:
            return {}
        return self.statistics.written_since(self._ready.statistics, self.model.trained_buffers)

    def closed_with(self, closed: Mapping[str, Buffer]) -> None:
        """Let the ready round be as if it had been closed with these buffers, by name."""
        device = self.layout.sets[0].device
        pairs = zip(self.statistics.names, self.close_round().statistics, strict=True)
        statistics = [at(closed[name], device) if name in closed else value for name, value in pairs]
        self._ready = dataclasses.replace(self.close_round(), statistics=statistics)

    def begin_again(self, steps: int, round_index: int) -> None:
        """Continue after so many updates and rounds, whose state is in place; drop what was accumulated.

        Args:
            steps: Updates that are committed.
            round_index: Of the round that comes next.
        """
        self._ready = None
        self.accumulation.begin(self.accumulation.buffer).attach()
        self._accounts.begin_again(steps, self.runtime.now())
        self.model.begin_again()
        if self._schedule is not None:
            self._schedule.forget()
        self.course.begin_again(steps)
        self.num_counted, self._exposed_seconds, self._skipped_rounds = 0, 0.0, 0
        self.comm.progress.begin_again(steps, round_index)
        self.replica.begin_again()
        for listener in self.model.listeners:
            listener.round_closed()

    def began_again(self) -> None:
        """Begin with the present state of the job, once it holds the state of a checkpoint; all ranks must call.

        Until training continues, the committed parameters are shown.
        """
        self.replica.models_show(self.model.parameters)
        statistics = self.statistics
        statistics.agree_on(statistics.agreed, self.comm.progress.round_index, statistics.copies)
        for listener in self.model.listeners:
            listener.began_again()
        if self.model.shown == "estimate":
            self.show_committed()
            self.model.until_training()

    @contextmanager
    def aside(self, accumulation: Accumulation) -> Iterator[None]:
        """Accumulate the gradients of the block in another round."""
        own, self.accumulation = self.accumulation, accumulation
        accumulation.attach()
        try:
            yield
        finally:
            self.accumulation = own
            own.attach(zero=False)
