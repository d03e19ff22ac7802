"""The compute lane: the user's thread, from the first micro-batch of a round to its landing.

docs/architecture.md says what happens at a landing and at a take-off. Hyperparameters are read at an update's first
take-off and hold for all its rounds. Parameters change at landings only.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from stretto.engine.accumulation import Accumulate, Accumulation, GradientBuffer
from stretto.engine.comm_lane import CommLane
from stretto.engine.failures import FailureDetector, Lifetime
from stretto.engine.model import Gradients, UserModel
from stretto.engine.options import Quota
from stretto.engine.report import Vote
from stretto.engine.round import Accounts, Landing, Reduction, Round
from stretto.engine.runtime import Arrived, Pending
from stretto.engine.statistics import Carried
from stretto.errors import OutOfTurn, StepWithoutBackward
from stretto.optimizer import Hyperparameters, Schedule, read_hyperparameters
from stretto.records import Incident, Update


class ComputeLane:
    """Accumulates gradients, hands rounds over at a take-off, and installs values at a landing.

    Args:
        model: The user's model and optimizer.
        comm: The other lane.
        quota: Micro-batches of a rank in each round of an update.
        failures: Tells the other ranks that this one ends with an error.
        scheduler: Any object with `step()`, called at every committed update; or None.
        allow_unused: Accept parameters that no rank used in the first update.
        accumulate: Makes the accumulation, from parameters and a buffer.
    """

    def __init__(
        self,
        model: UserModel,
        comm: CommLane,
        quota: Quota,
        *,
        failures: FailureDetector,
        scheduler: Any,
        allow_unused: bool,
        accumulate: Accumulate = Accumulation,
    ) -> None:
        self.model, self.statistics = model, model.statistics
        self.vote = Vote.GO_ON
        self.votes: list[Vote] = []  # of each rank, in the last round that landed
        self._is_checked = False  # whether parameters were checked since the last micro-batch was counted
        self.at_boundary = True  # whether the last round that landed ended an update
        self.steps = 0
        self.num_counted = 0  # micro-batches of this rank, of any weight, since the job began or was loaded
        self.land_phase: Callable[[], None] | None = None  # lands what a checkpoint has left of one
        self.lifetime = Lifetime(failures, leave=self._leave)
        self._schedule = None if scheduler is None else Schedule(scheduler)
        self._in_flight: Pending[Landing] | None = None
        self._landing: Landing | None = None  # of the round in flight, once somebody has waited
        self._opening: Pending[None] | None = None  # the work that an update does ahead of its gradients
        self._hyperparameters: Hyperparameters = []
        self._incidents: list[Incident] = []
        self.take_up(comm, quota, accumulate, GradientBuffer(comm.replica.exchange.layout))
        self._accounts = Accounts(self.runtime.now(), use_is_known=allow_unused)
        model.hook(
            before_gradient=self._before_gradient,
            before_forward=self._before_forward,
            where=lambda: self.where,
        )

    def take_up(self, comm: CommLane, quota: Quota, accumulate: Accumulate, buffer: GradientBuffer) -> None:
        """Work with this communication lane from now on, and accumulate in `buffer`; nothing is under way."""
        self.comm, self.replica, self.runtime = comm, comm.replica, comm.runtime
        self._timer = self.runtime.timer()  # of waits for the other lane
        self.layout, self.overlaps, self.quota = buffer.layout, comm.strategy.overlaps, quota
        self.accumulation = accumulate(self.model.parameters, buffer)  # of the round that accumulates
        self._keeps_pace = not quota.is_fixed
        self._ready: Round | None = None  # the round that takes off next, once its quota is met
        self._accumulating_round = 0  # in its update; it is one ahead of the round in flight
        self._idle = GradientBuffer(self.layout) if self.overlaps else None
        self.accumulation.attach()
        self.replica.models_show(self.model.parameters)

    # Where the job stands

    @property
    def where(self) -> str:
        """Rank and step, for messages."""
        return f"rank {self.replica.exchange.rank}, after step {self.steps}"

    @property
    def has_round_ready(self) -> bool:
        """Whether a round waits for its take-off."""
        return self._ready is not None

    @property
    def begins_update(self) -> bool:
        """Whether the next micro-batch is the first of an update on this rank."""
        if self._ready is not None:
            return self._accumulating_round == len(self.quota.minima) - 1
        return self._accumulating_round == 0 and self.accumulation.contribution.count == 0

    @property
    def is_lane_idle(self) -> bool:
        """Whether the communication lane has no work, so that nobody writes the masters."""
        return self._in_flight is None and self._opening is None

    @property
    def ends_with_next(self) -> bool:
        """Whether the next micro-batch is sure to be an update's last; asked where no round is ready."""
        place, count = self._accumulating_round, self.accumulation.contribution.count + 1
        return place + 1 == len(self.quota.maxima) and count >= self.quota.maxima[place]

    @property
    def updates_in_sight(self) -> int:
        """Number of committed updates after every closed round has landed, if all of them step."""
        place, last = self._accumulating_round, len(self.quota.minima) - 1
        in_flight = self._in_flight is not None and place == 0
        return self.steps + in_flight + (self._ready is not None and place == last)

    @property
    def is_clear(self) -> bool:
        """Whether the last update has ended and this rank has counted no micro-batch since."""
        is_all_landed = self._in_flight is None and self._ready is None
        return self.at_boundary and is_all_landed and self.accumulation.contribution.count == 0

    # Micro-batches

    def before_micro_batch(self) -> None:
        """Take off if a round is ready; called before every training forward and backward pass."""
        if self.model.is_settled:
            self.model.train_on(self.where)
        if not self._is_checked:
            self.model.check_unwritten(self.where)
            self._is_checked = True
        self.take_off_if_ready()
        if self.comm.asks_ahead and self._opening is None:
            self._opening = self.runtime.spawn(self.comm.open)

    def backward(self, loss: Tensor, weight: float) -> None:
        """Run a micro-batch's backward pass."""
        self.before_micro_batch()
        if self.accumulation.apart:
            self.accumulation.check_own(self.where)
        self.accumulation.check_untouched(self.where)  # zero_grad() often stands right before
        self.accumulation.backward(loss, weight)

    def check_untouched(self) -> None:
        """Raise `GradientsTouched` or `ParametersTouched` if anybody has written them since the last micro-batch."""
        self.accumulation.check_untouched(self.where)
        self.model.check_unwritten(self.where)

    def count(
        self, weight: float, loss: Tensor | None, samples: int, fresh_samples: int, lacks: bool = False
    ) -> Update | None:
        """Count one micro-batch whose gradients have arrived, unless it may lack any; close and land full rounds."""
        if self.model.is_settled:
            self.model.train_on(self.where)
        self.take_off_if_ready()
        if weight > 0 and not (self.accumulation.has_arrived or lacks):
            raise StepWithoutBackward(
                f"{self.where}: no gradient has arrived since the last micro-batch was counted: run its backward pass "
                "first, or count it with weight=0 to contribute nothing"
            )
        self.accumulation.count(weight, loss, samples, fresh_samples)
        self.runtime.charge("micro-batch")
        self.num_counted += 1
        self._is_checked = False
        for listener in self.model.listeners:
            listener.micro_batch_counted(weight, samples, fresh_samples)
        if self._keeps_pace:
            self.runtime.keep_pace()  # a clock counts what has been computed, not what has been called for
        is_free = self._in_flight is None or self._landing is not None or self._in_flight.done()
        enough = self.quota.minima if is_free else self.quota.maxima
        if self.accumulation.contribution.count < enough[self._accumulating_round]:
            return None
        update = self.end_round()
        return update if self.overlaps else self.fly()

    def drop(self) -> bool:
        """Drop what has been counted for the next update; return False, and drop nothing, if some is handed over."""
        if self._accumulating_round or self._ready is not None:
            return False
        self.accumulation.restart()
        for listener in self.model.listeners:
            listener.round_closed()
        return True

    def fly(self) -> Update | None:
        """Hand over the ready round, if there is one, and land what is in flight."""
        self.take_off_if_ready()
        return self._land()

    def take_off_if_ready(self) -> None:
        """Hand over the ready round, if there is one, and begin the next."""
        ready = self._ready
        if ready is None:
            return
        if self._in_flight is not None:
            raise OutOfTurn(f"{self.where}: take-off while another round is in flight: that one lands first")
        if self.overlaps:
            self.check_untouched()
        if self.at_boundary:
            self._hyperparameters = read_hyperparameters(self.model.optimizer)
        ready.hyperparameters = self._hyperparameters
        ready.vote = self.vote
        self._ready = None
        opening, self._opening = self._opening, None
        self._in_flight = self.runtime.spawn(functools.partial(self.comm.advance, ready, opening))
        if self._idle is not None:
            buffer, self._idle = self._idle, None
            self.accumulation.begin(buffer).attach()
        else:
            self.accumulation.begin(ready.buffer)  # the landing attaches it
        self._accumulating_round = (self._accumulating_round + 1) % len(self.quota.minima)

    def close_round(self) -> Round:
        """Close the accumulating round and return it; it takes off next."""
        if self._ready is None:
            nothing: Carried = ([], None, [], [], [])
            self._ready = Round(
                self.accumulation.buffer,
                self.accumulation.contribution,
                *(self.statistics.carried() if self.statistics.names else nothing),
                self.vote,
                [],
                incidents=self._incidents,
                departure=self.accumulation.departure,
            )
            self._incidents = []
            for listener in self.model.listeners:
                listener.round_closed()
        return self._ready

    def end_round(self) -> Update | None:
        """Look at the accumulating round a last time, land the one before, and close it as it is."""
        self.check_untouched()
        self.model.check_complete(self.where)
        for listener in self.model.listeners:
            self._incidents += listener.round_ends()
        update = self._land() if self._in_flight is not None else None
        self.close_round()
        return update

    def _land(self) -> Update | None:
        """Wait for the round in flight, install what it brought, and return the update it committed."""
        landing, self._in_flight, self._landing = self.wait_for_lane(), None, None
        if landing is None:
            raise OutOfTurn(f"{self.where}: landing without take-off")
        for listener in self.model.listeners:
            listener.landing_begins()
        self.model.show(landing.buffer.views, landing.complete(self.accumulation))
        if self.statistics.names:
            self.statistics.install(landing)
        if self.overlaps:
            self._idle = landing.buffer
        else:
            self.accumulation.attach()
        self._accounts.skipped_rounds += landing.reduction.skipped
        if landing.reduction.met:
            self.votes = landing.reduction.report.votes
        self.at_boundary = landing.at_boundary
        before, self.steps = self.steps, self.comm.progress.step
        if landing.commit is not None and not self._accounts.use_is_known:
            self._accounts.check_used(landing.commit, self.layout, self.where)
        if self.steps > before:
            self.model.stepped(self._schedule, self.steps - before, self.where)
        if landing.commit is None:
            return None
        for listener in self.model.listeners:
            listener.update_landed()
        return self._accounts.close(landing.commit, self.steps, self.runtime.now())

    def wait_for_lane(self) -> Landing | None:
        """Wait until the round in flight can land; return what it will bring, or None without one."""
        if self._in_flight is not None and self._landing is None:
            self._timer.start()
            self._landing = self._in_flight.result()
            self._accounts.exposed_seconds += self._timer.stop()
        return self._landing

    def check_alike(self, what: str) -> None:
        """Raise `OutOfTurn` if a round is in flight that other ranks may not have handed over, under a `Clock`."""
        if self._in_flight is not None and not self.quota.is_fixed:
            raise OutOfTurn(
                f"{self.where}: {what} while a round is in flight, under a Clock: other ranks may have handed over "
                "fewer rounds; do it right after an Update was returned, before the next forward pass"
            )

    def check_between_updates(self, what: str) -> None:
        """Raise `OutOfTurn` in the middle of an update, whose contributions `what` would lose."""
        self._finish_opening()
        accumulation = self.accumulation
        started = accumulation.has_arrived or (self._ready is None and accumulation.contribution.count > 0)
        if started or self._opening is not None or self._in_flight is not None or not self.at_boundary:
            raise OutOfTurn(
                f"{self.where}: {what} in the middle of an update: do it right after an Update was returned, "
                "before training, or after finish()"
            )

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Show the committed parameters and the agreed buffers inside the block; see `show_committed`."""
        if self.model.is_settled:
            yield
            return
        self.show_committed()
        try:
            yield
        finally:
            is_shown_anyway = self.model.show_again()
        if is_shown_anyway:
            self.model.accept_writes(lambda: self.replica.differs(self.model.parameters), self.where)

    def show_committed(self) -> None:
        """Put the committed parameters and the agreed buffers into the model; all ranks must call, alike."""
        self.check_alike("settling")
        self._finish_opening()
        landing = self.wait_for_lane()
        for listener in self.model.listeners:
            listener.committed_is_read()  # the communication lane is at rest, so this thread may do it
        agreed = self.statistics.agreed_after(landing)
        if self.model.shown == "committed" and not self.replica.has_drifted and landing is None:
            self.model.settle(None, agreed)
            return
        # The idle buffer may hold gathered values: the next take-off zeroes it.
        buffer = self._idle if self._idle is not None else GradientBuffer(self.layout)
        gathered = self.runtime.spawn(
            lambda: self.replica.gather_committed(buffer.flats, self.statistics)
        ).result()
        self.model.settle(buffer.views, gathered if landing is None else agreed)

    def _finish_opening(self) -> None:
        if self._opening is not None:
            self._opening = Arrived(self._opening.result())

    def reduce_ahead(self) -> Reduction:
        """Exchange now the gradients of the round that takes off next, for a checkpoint and for it; all must call."""
        ready = self.close_round()
        if ready.reduction is None:
            ready.hyperparameters = read_hyperparameters(self.model.optimizer)
            ready.vote = self.vote
            ready.reduction = self.runtime.spawn(lambda: self.replica.reduce(ready)).result()
            self.accumulation.remember()  # an exchange may leave anything in the buffer
        return ready.reduction

    def begin_again(self, steps: int, round_index: int, counted: int) -> None:
        """Go on after so many updates and rounds, whose state is in place; drop what was accumulated."""
        self._ready = None
        self.accumulation.begin(self.accumulation.buffer).attach()
        self._accumulating_round = 0
        self._accounts.begin_again(steps, self.runtime.now())
        self.model.begin_again()
        if self._schedule is not None:
            self._schedule.forget()
        self.num_counted = counted
        self.steps = self.comm.progress.step = steps
        self.comm.progress.round_index = round_index
        self.replica.begin_again()
        for listener in self.model.listeners:
            listener.round_closed()
        self.votes = []

    def began_again(self) -> None:
        """Begin with what the job holds now, once all of a checkpoint's state is in its place; all ranks must call.

        Until training goes on, the committed parameters are shown.
        """
        self.replica.models_show(self.model.parameters)
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

    def _leave(self, *, waits: bool) -> None:
        """Leave the communication lane, once it is done or at once, and remove all hooks."""
        (self.runtime.join if waits else self.runtime.leave)()
        self.model.unhook()

    def _before_gradient(self, index: int, gradients: Gradients) -> Gradients | None:
        (gradient,) = gradients
        return None if gradient is None else self.accumulation.before_gradient(index, gradient)

    def _before_forward(self) -> None:
        with self.lifetime.running():
            # A take-off checks the parameters; their own backward pass brings it where others stand in for them.
            if self._ready is None or not self.model.is_replaced:
                if self.land_phase is not None:
                    self.land_phase()
                self.before_micro_batch()
