"""The compute lane: the user's thread, from the first micro-batch of a round to its landing.

Note [Landing and take-off]
    Landing, at a micro-batch boundary when the quota is met and the communication lane is done: the values
    it brought are installed, and if an update was committed it is returned. The user may then look, evaluate,
    turn a schedule, save: nothing is under way. Take-off, at the next training forward or backward: the
    accumulated gradients go over and the other buffer, zeroed, takes their place. Hyperparameters are read
    at an update's first take-off and hold for all its rounds, so that an estimate and the update it
    anticipates use the same. Parameters change at landings and at no other moment.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from stretto.engine.accounts import Accounts
from stretto.engine.accumulation import Accumulation
from stretto.engine.audit import Audit
from stretto.engine.guarded_model import GuardedModel
from stretto.engine.job import Held, Job, Landing, Reduction, Shown
from stretto.engine.kept_round import LossFunction
from stretto.engine.lane import Lane
from stretto.engine.options import Options
from stretto.engine.quota import Quota
from stretto.engine.review import Review
from stretto.engine.roll_call import Vote
from stretto.engine.runtime import Arrived, Pending, Runtime
from stretto.engine.statistics import Statistics
from stretto.engine.unused import check_used
from stretto.errors import Finished, OutOfTurn
from stretto.flat import GradientBuffer, Layout
from stretto.optimizer import Hyperparameters, read_hyperparameters
from stretto.records import Incident, Update
from stretto.strategies import Strategy


class ComputeLane:
    """Accumulates gradients, takes off, lands."""

    def __init__(
        self,
        guarded: GuardedModel,
        layout: Layout,
        lane: Lane,
        runtime: Runtime,
        quota: Quota,
        *,
        strategy: Strategy,
        options: Options,
    ) -> None:
        self.lane = lane
        self.statistics = Statistics(guarded.model)
        self.vote = Vote.GO_ON
        self.votes: list[Vote] = []
        """What each rank wanted in the last round that landed."""
        self.at_boundary = True
        """Whether the last round that landed ended an update."""
        self.shown: Shown = "committed"
        self.steps = 0
        self.num_contributions = 0
        """Micro-batches of this rank so far, of any weight."""
        self.has_finished = False
        """Whether the job came to a good end: the committed parameters are shown and will be."""
        self._ended_because: str | None = None
        self._guarded = guarded
        self._layout = layout
        self.runtime = runtime
        self._quota = quota
        self._strategy = strategy
        self._allow_unused = options.allow_unused
        self.accumulation = Accumulation(guarded.parameters, GradientBuffer(layout))
        """The round that accumulates."""
        self._review = Review(guarded, lane, runtime)
        self._idle = GradientBuffer(layout) if strategy.overlaps else None
        self._in_flight: Pending[Landing] | None = None
        self._opening: Pending[None] | None = None  # what the script asks for ahead of the gradients
        self._job: Job | None = None
        """The round handed over at the next take-off, once its quota is met."""
        self._accumulating_round = 0
        """Position, in its update, of the round that accumulates: one ahead of the one in flight."""
        self._hyperparameters: Hyperparameters = []
        self._accounts = Accounts(strategy.staleness, runtime.now())
        self._use_is_known = False
        self._incidents: list[Incident] = []
        guarded.hook(
            on_gradient=self._note_gradient,
            on_forward=self._before_forward,
            shows_estimate=lambda: self.shown == "estimate",
            where=lambda: self.where,
        )
        self.accumulation.attach()

    @property
    def where(self) -> str:
        """Rank and step, for messages."""
        return f"rank {self.lane.exchange.rank}, after step {self.steps}"

    @property
    def guarded(self) -> GuardedModel:
        """The user's model and optimizer."""
        return self._guarded

    @property
    def has_round_ready(self) -> bool:
        """Whether a round waits for its take-off: the next update's first one, at an `Update` of an overlap."""
        return self._job is not None

    @property
    def is_at_rest(self) -> bool:
        """Whether the last round ended an update and nothing is under way."""
        return self.at_boundary and self._in_flight is None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Refuse use after the end, and let any error inside end the job on all ranks.

        Raises:
            Finished: The job has ended already.
        """
        if self._ended_because is not None:
            raise Finished(
                f"{self.where}: the job has ended ({self._ended_because}); make a new DataParallel to go on"
            )
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """End the job because of `error`: tell the other ranks, and leave the model to the user."""
        if self._ended_because is not None:
            return
        self._ended_because = f"{type(error).__name__}: {error}"
        if self.lane.watch.tell(error):
            self.lane.exchange.group.abort()
        self.runtime.leave()
        self._guarded.unhook()

    def contribute(self, weight: float, loss: Tensor | None, samples: int) -> Update | None:
        """Count one micro-batch whose gradients have been accumulated; land if its round's quota is met."""
        self.take_off_if_ready()
        self.accumulation.check_micro_batch(weight, self.where)
        self.runtime.charge("micro-batch")
        self.num_contributions += 1
        self.accumulation.count(weight, loss, samples)
        self._review.count(weight, samples)
        count = self.accumulation.contribution.count
        lane_is_free = self._in_flight is None or self._in_flight.done()
        if not self._quota.is_met(self._accumulating_round, count, lane_is_free=lane_is_free):
            return None
        self._inspect()
        update = self.land() if self._in_flight is not None else None
        self.make_ready()
        if not self._strategy.overlaps:
            self.take_off_if_ready()
            update = self.land()
        return update

    def before_micro_batch(self) -> None:
        """Take off if a round is ready; called before every training forward and backward pass."""
        self.accumulation.buffer.check_unwritten(self.where)
        self._guarded.check_unwritten(self.where)
        self.take_off_if_ready()
        if self.lane.asks_ahead and self._opening is None:
            self._opening = self.runtime.spawn(self.lane.open)

    def begin_micro_batch(self, loss_function: LossFunction, batch: object) -> None:
        """As `before_micro_batch`, with what it takes to run the micro-batch again."""
        self.before_micro_batch()
        self._review.begin(loss_function, batch)

    def make_ready(self) -> Job:
        """Close the accumulating round: its job takes off next."""
        if self._job is None:
            kept = (*self.statistics.snapshot(), self.statistics.agreed, self.vote)
            self._job = Job(self.accumulation.buffer, self.accumulation.contribution, *kept, [])
            self._job.incidents, self._incidents = self._incidents, []
            self._review.forget()
        return self._job

    def reduce_ahead(self) -> Reduction:
        """Reduce the gradients of the round that takes off next, now; all ranks must call.

        For a checkpoint: what it saves is what the running job goes on with, so that saving changes nothing.
        """
        self.check_settled("a checkpoint")
        job = self.make_ready()
        if job.reduction is None:
            job.hyperparameters = read_hyperparameters(self._guarded.optimizer)
            job.vote = self.vote
            job.reduction = self.runtime.spawn(lambda: self.lane.reduce(job)).result()
            self.accumulation.buffer.remember()  # an exchange may leave anything in the buffer
        return job.reduction

    def begin_again(self, steps: int, round_index: int) -> None:
        """Go on from what a checkpoint has put into model and owner; whatever was accumulated is forgotten.

        Args:
            steps: Committed updates behind it.
            round_index: Rounds behind it.
        """
        self._job = None
        self.accumulation.begin(self.accumulation.buffer).attach()
        self._review.forget()
        self._accumulating_round = 0
        self._accounts = Accounts(self._strategy.staleness, self.runtime.now())
        self._guarded.remember(self._guarded.parameters)
        self.statistics.agree()
        self.steps = self.lane.watch.step = steps
        self.lane.begin_again(round_index)
        self._use_is_known = steps > 0
        self.lane.sentry.start(steps)
        self.shown, self.votes = "committed", []

    def adopt(self, reduction: Reduction) -> None:
        """Let `reduction`, from a checkpoint, be the round that takes off next."""
        self.make_ready().reduction = reduction

    def show(self, values: list[Tensor], shown: Shown) -> None:
        """Show `values`, one per parameter, as a checkpoint's job did."""
        self._install(values)
        self.shown = shown

    def take_off_if_ready(self) -> None:
        """Hand the round over, if one is ready, and begin the next."""
        job = self._job
        if job is None:
            return
        if self._in_flight is not None:
            raise OutOfTurn(
                f"{self.where}: take-off while another round is in flight; every flight lands first"
            )
        self.accumulation.check_untouched(self.where)
        self._guarded.check_untouched(self.where)
        if self.at_boundary:
            self._hyperparameters = read_hyperparameters(self._guarded.optimizer)
        job.hyperparameters = self._hyperparameters
        job.vote = self.vote
        self._job = None
        opening, self._opening = self._opening or Arrived(None), None
        self._in_flight = self.runtime.spawn(lambda: self.lane.advance(job, opening))
        if self._idle is not None:
            buffer, self._idle = self._idle, None
            self.accumulation.begin(buffer).attach()
        else:
            self.accumulation.begin(job.buffer)  # and attached when it lands
        self._accumulating_round = (self._accumulating_round + 1) % self._quota.rounds

    def land(self) -> Update | None:
        """Wait for the round in flight, install what it brought, and return the update it committed."""
        if self._in_flight is None:
            raise OutOfTurn(f"{self.where}: landing without take-off")
        self._wait_for_lane()
        landing, self._in_flight = self._in_flight.result(), None
        self._guarded.check_untouched(self.where)
        self._install(landing.buffer.views)
        if landing.reduction.skipped:
            self.statistics.restore()
        self.statistics.install(landing.statistics, landing.reduction.statistics)
        self.shown = landing.shown
        if self._strategy.overlaps:
            self._idle = landing.buffer
        else:
            self.accumulation.attach()
        if landing.reduction.met:
            self.votes = landing.reduction.call.votes
        self._accounts.skipped_rounds += landing.reduction.skipped
        self.at_boundary = landing.at_boundary
        self.steps = self.lane.watch.step
        return self._update(landing)

    def hand_over(self) -> Update | None:
        """Land what is in flight; if nothing was, take off with whatever there is."""
        if self._in_flight is not None:
            if self._strategy.overlaps:
                self._inspect()
            return self.land()
        if self._job is None:
            self._inspect()
        self.make_ready()
        self.take_off_if_ready()
        return None

    def check_settled(self, what: str) -> None:
        """Raise unless the communication lane is at rest.

        Raises:
            OutOfTurn: A round is in flight.
        """
        if self._in_flight is not None:
            raise OutOfTurn(
                f"{self.where}: {what} while a round is in flight: do it right after an Update was returned, "
                "before the next forward pass"
            )
        if self._opening is not None:
            self._opening = Arrived(self._opening.result())

    def check_between_updates(self, what: str) -> None:
        """Raise unless the last update has ended, or none has begun, and no micro-batch was counted since.

        Raises:
            OutOfTurn: Something would be lost.
        """
        self.check_settled(what)
        accumulation = self.accumulation
        started = accumulation.has_arrived or (self._job is None and accumulation.contribution.count > 0)
        if started or self._opening is not None or not self.at_boundary:
            raise OutOfTurn(
                f"{self.where}: {what} in the middle of an update: do it right after an Update was returned, "
                "before training, or after finish()"
            )

    def show_committed(self) -> Held:
        """Put the committed parameters and the agreed buffers into the model; all ranks must call, at rest.

        Returns:
            What was there, for `show_again`.
        """
        self.check_settled("settling")
        self.lane.inspect()  # at rest, so that any thread may
        parameters, statistics = None, self.statistics.agreed
        if self.shown == "estimate" or self.lane.has_drifted:
            parameters = [parameter.detach().clone() for parameter in self._guarded.parameters]
            # The idle buffer: gathered values may lie in it until the next take-off zeroes it.
            buffer = self._idle if self._idle is not None else GradientBuffer(self._layout)
            statistics = self.runtime.spawn(
                lambda: self.lane.gather_committed(buffer.flats, self.statistics)
            ).result()
            self._install(buffer.views)
        held = Held(self.shown, parameters, self.statistics.exchange_live(statistics))
        self.shown = "committed"
        return held

    def show_again(self, held: Held) -> None:
        """Put back what `show_committed` took out."""
        if held.parameters is not None:
            self._install(held.parameters)
        self.statistics.exchange_live(held.statistics)
        self.shown = held.shown

    def close(self) -> None:
        """Join the communication lane and leave the model as it came; nobody may issue a collective before."""
        self.runtime.join()
        self._guarded.unhook()
        self._ended_because = "finish() was called"
        self.has_finished = True

    def _install(self, values: list[Tensor]) -> None:
        """Copy `values`, one per parameter, into the model."""
        with torch.no_grad():
            torch._foreach_copy_(list(self._guarded.parameters), values)
        self._guarded.remember(values)

    def _inspect(self) -> None:
        """Look once at a round that is all there, before parameters change; all ranks must, for audits."""
        if self.accumulation.is_reviewed:
            return
        self._guarded.check_unwritten(self.where)
        idle = self._in_flight is None and self._opening is None
        self._incidents += self._review.inspect(self.accumulation, self.steps + 1, lane_is_idle=idle)
        self.accumulation.is_reviewed = True  # last: a replay begins the round anew
        self._wait_for_lane()
        for guard, appointment in self._review.appointments(self.lane.round_index):
            self._incidents += Audit(self, self._review.kept, guard, appointment).perform()

    def _wait_for_lane(self) -> None:
        """Wait until the round in flight, if one is, could land."""
        if self._in_flight is not None and not isinstance(self._in_flight, Arrived):
            started = self.runtime.now()
            self._in_flight = Arrived(self._in_flight.result())
            self._accounts.exposed_seconds += self.runtime.now() - started

    def _before_forward(self) -> None:
        with self.running():
            self.before_micro_batch()

    def _note_gradient(self, index: int) -> None:
        if self._job is not None:
            raise OutOfTurn(
                f"{self.where}: a gradient arrived for a round that is closed: call the whole model in training "
                "mode before backward, so that the round takes off, or use parallel.backward"
            )
        self.accumulation.note(index)

    def _update(self, landing: Landing) -> Update | None:
        if landing.commit is None:
            return None
        self._check_used(landing.commit.reductions)
        self._guarded.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn without it
        return self._accounts.close(landing.commit, self.steps, self.runtime.now())

    def _check_used(self, reductions: tuple[Reduction, ...]) -> None:
        """Look once, at the first update of which it is known what all ranks have used."""
        if self._use_is_known or self._allow_unused or not reductions[-1].met:
            return
        self._use_is_known = True
        check_used(reductions, self._layout, self.where)
