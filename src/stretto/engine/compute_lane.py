"""The compute lane: the user's thread, from the first micro-batch of a round until its values are installed.

docs/architecture.md describes how a round is sent and installed. Hyperparameters are read when the first round of an
update is sent, and hold for all its rounds. Parameters change only when a round is installed.

Note [The stages of a round]
    stage           meaning                                                                 end
    ACCUMULATING    micro-batches are counted; no round is closed                           the quota is met
    READY           a round is closed; the next forward or backward pass submits it         it is submitted
    IN_FLIGHT       the communication lane has it; a strategy that overlaps accumulates     a wait for it has ended
    ARRIVED         its values are known, and are installed next                            it is installed
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stretto.engine import misuse
from stretto.engine.accumulation import Accumulate, Accumulation, GradientBuffer
from stretto.engine.buffer_sync import Carried, as_written, at, average_at_rest
from stretto.engine.buffers import Buffer
from stretto.engine.comm_lane import CommLane
from stretto.engine.failures import FailureDetector, Lifetime
from stretto.engine.first_loss import check_first_loss
from stretto.engine.hooks import Hooks
from stretto.engine.model import UserModel, trains
from stretto.engine.options import Quota
from stretto.engine.replica_sync import SyncState
from stretto.engine.report import Asks, RoundReport, Vote
from stretto.engine.round import Round
from stretto.engine.runtime import Arrived, Pending
from stretto.errors import OutOfTurn
from stretto.optimizer import Hyperparameters, Schedule, read_hyperparameters
from stretto.records import Incident, Update

Until = Literal["any", "all"]
"""Which ranks' data must have ended to end a pass: any rank's, or all ranks'."""


class Stage(Enum):
    """The stage of a rank's rounds; see Note [The stages of a round]."""

    ACCUMULATING = "accumulating"
    READY = "ready"
    IN_FLIGHT = "in flight"
    ARRIVED = "arrived"


BEFORE = dict(zip(Stage, (Stage.ARRIVED, *Stage), strict=False))
"""The stage before each stage."""
SUBMITTED = (Stage.IN_FLIGHT, Stage.ARRIVED)
"""Stages in which a round has been submitted and not installed."""
DECISIVE: dict[Until, Callable[[Sequence[Vote]], Vote]] = {"any": max, "all": min}
"""Which of the ranks' votes decides on the end of a pass."""


class RoundState:
    """The stage of this rank's rounds, and the votes of all ranks. As text it is rank and step, for messages.

    Args:
        rank: This rank.
        num_rounds: Number of rounds in an update.
    """

    def __init__(self, rank: int, num_rounds: int) -> None:
        self._rank = rank
        self.steps = 0
        """Committed updates that are installed."""
        self.at_boundary = True
        """Whether the last installed round ended an update."""
        self.vote = Vote.GO_ON
        """This rank's vote in its rounds: it continues, is exhausted, has left a pass, asks all ranks to stop, or
        only submits remaining rounds."""
        self.votes: list[Vote] = []
        """Each rank's vote in the last installed round."""
        self.asks = self.asked = Asks.NOTHING
        """This rank's requests in its rounds, and the combined requests of all ranks in the last update's rounds."""
        self.num_changes = 0
        """How many rounds were closed and installed: in between, nothing that ranks have agreed on changes."""
        self._is_stopped = False
        """Whether some rank has asked all to end for good."""
        self.stage = Stage.ACCUMULATING
        self._last = num_rounds - 1
        self.place = 0
        """Index of the accumulating round in its update; one ahead of the round in flight."""

    def __str__(self) -> str:
        return f"rank {self._rank}, after step {self.steps}"

    # Rounds

    def enter(self, stage: Stage) -> None:
        """Enter the next stage.

        Raises:
            OutOfTurn: It is not the next stage.
        """
        if self.stage is not BEFORE[stage]:
            raise OutOfTurn(
                f"{self}: a round is to be {stage.value} while one is {self.stage.value}: expected one that is "
                f"{BEFORE[stage].value}; the library's own calls came in another order: please report it"
            )
        self.stage = stage
        self.num_changes += stage in (Stage.READY, Stage.ACCUMULATING)
        if stage is Stage.IN_FLIGHT:
            self.place = 0 if self.place == self._last else self.place + 1

    def install(self, *, at_boundary: bool, steps: int, met: RoundReport | None) -> None:
        """Record that a round's values are installed.

        Args:
            at_boundary: Whether it ended an update.
            steps: Number of committed updates so far.
            met: The votes of all ranks; None if they did not communicate in it.
        """
        self.enter(Stage.ACCUMULATING)
        if self.at_boundary:
            self.asked = Asks.NOTHING
        self.at_boundary, self.steps = at_boundary, steps
        if met is not None:
            self.votes = met.votes
            self.asked |= met.asks

    @property
    def is_under_way(self) -> bool:
        """Whether a round has been submitted and is not installed."""
        return self.stage in SUBMITTED

    @property
    def is_in_last_round(self) -> bool:
        """Whether the round that accumulates, or is ready, ends its update."""
        return self.place == self._last

    @property
    def steps_once_installed(self) -> int:
        """Number of committed updates once every closed round is installed, if all of them step."""
        ends_update = self.place == 0 if self.is_under_way else self.is_in_last_round
        return self.steps + (ends_update and self.stage is not Stage.ACCUMULATING)

    def begin_again(self, steps: int) -> None:
        """Continue after so many updates; accumulated gradients are dropped."""
        self.stage, self.place = Stage.ACCUMULATING, 0
        self.steps, self.votes = steps, []
        self.num_changes += 1

    # What ranks say

    def end_data(self) -> None:
        """Note that this rank's data have ended."""
        self.vote = max(self.vote, Vote.DATA_ENDED)

    def stop(self) -> None:
        """Ask all ranks to stop."""
        self.vote = max(self.vote, Vote.STOP)

    def finish(self) -> None:
        """Note that this rank has left its loop for good, and only submits remaining rounds."""
        self.vote = Vote.FINISHING

    @contextmanager
    def finishing(self, *, forgets: bool) -> Iterator[None]:
        """During the block, let this rank only submit remaining rounds.

        Args:
            forgets: Whether votes in the block only concern these rounds, and not the end of the data.
        """
        own, self.vote = self.vote, Vote.FINISHING if self._is_stopped else Vote.PASS_LEFT
        yield
        self.vote = own
        if forgets:
            self.votes = []

    def begin_pass(self) -> None:
        """Start again after an agreed end of data, which a loop over epochs passes many times; a request to stop
        stays.
        """
        if self.vote == Vote.DATA_ENDED:
            self.vote = Vote.GO_ON
        self._is_stopped |= max(self.votes, default=Vote.GO_ON) == Vote.STOP
        self.votes = [Vote.STOP if self._is_stopped else Vote.GO_ON for _ in self.votes]

    def resume_pass(self, votes: Sequence[Vote]) -> None:
        """Continue with these votes of the ranks, from a checkpoint."""
        self.votes = list(votes)

    def end_pass(self) -> None:
        """Record that all ranks have agreed to end; if one of them asked to stop, they end for good."""
        self._is_stopped |= max(self.votes, default=Vote.GO_ON) >= Vote.STOP

    def is_pass_over(self, until: Until) -> bool:
        """Return whether all ranks have agreed to end; the same on every rank at the same round."""
        return bool(self.votes) and (
            max(self.votes) >= Vote.PASS_LEFT or DECISIVE[until](self.votes) >= Vote.DATA_ENDED
        )

    def have_data_ended(self, until: Until) -> bool:
        """Return whether all ranks have agreed to end because of the data."""
        is_end = Vote.DATA_ENDED in self.votes and DECISIVE[until](self.votes) >= Vote.DATA_ENDED
        return is_end and max(self.votes) < Vote.STOP

    def have_all_left(self) -> bool:
        """Return whether no rank has anything to contribute."""
        votes = set(self.votes)
        return bool(votes) and (votes <= {Vote.PASS_LEFT, Vote.FINISHING} or votes == {Vote.DATA_ENDED})


class ComputeLane:
    """Accumulates gradients, submits rounds, and installs their values.

    Args:
        model: The user's model and optimizer.
        comm: The communication lane.
        quota: Micro-batches of a rank in each round of an update.
        failures: Reports to the other ranks if this rank ends with an error.
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
        self.model, self.buffer_sync = model, model.buffer_sync
        self._is_checked = False  # whether parameters were checked since the last micro-batch was counted
        self.lifetime = Lifetime(failures, leave=self._leave)
        self._schedule = None if scheduler is None else Schedule(scheduler)
        self.rounds = RoundState(comm.replica.rank, len(quota.minima))
        self.where: object = self.rounds
        """Rank and step, for messages; formatted only when a message is needed."""
        self.num_counted = 0  # micro-batches of this rank, of any weight, since the job began or was loaded
        self._ready: Round | None = None  # while one is
        self._in_flight: Pending[Round] | None = None  # while one is
        self._arrived: Round | None = None  # while one has arrived
        self._has_failed = False  # whether the other lane has, or the wait for it
        self._opening: Pending[None] | None = None  # the work that an update does ahead of its gradients
        self._hyperparameters: Hyperparameters = []
        self._trains = b""
        self._incidents: list[Incident] = []
        self._exposed_seconds = 0.0  # since the last update
        self.comm, self.replica, self.runtime = comm, comm.replica, comm.runtime
        self._timer = self.runtime.timer()  # of waits for the other lane
        self.layout, self.overlaps, self.quota = comm.replica.exchange.layout, comm.strategy.overlaps, quota
        self.accumulation = accumulate(
            model.registered, GradientBuffer(self.layout)
        )  # of the round that accumulates
        self._keeps_pace = not quota.is_fixed
        self._idle = GradientBuffer(self.layout) if self.overlaps else None
        self.accumulation.attach()
        self.replica.models_show(model.parameters)
        self._updated_at = self.runtime.now()  # when the last update was returned
        self._use_is_known = allow_unused  # whether each parameter is known to be used by some rank
        self.hooks = Hooks(
            model,
            before_gradient=self.accumulation.before_gradient,
            before_forward=self._before_forward,
            where=self.where,
        )

    # Where the job stands

    @property
    def has_round_ready(self) -> bool:
        """Whether a round is ready to be submitted."""
        return self.rounds.stage is Stage.READY

    @property
    def begins_update(self) -> bool:
        """Whether the next micro-batch is the first of an update on this rank."""
        if self.has_round_ready:
            return self.rounds.is_in_last_round
        return self.rounds.place == 0 and self.accumulation.contribution.count == 0

    @property
    def ends_with_next(self) -> bool:
        """Whether the next micro-batch is certainly an update's last; called only if no round is ready."""
        count = self.accumulation.contribution.count + 1
        return self.rounds.is_in_last_round and count >= self.quota.maxima[-1]

    def num_lacking(self, last: int) -> int:
        """Return how many micro-batches this rank lacks until the update `last` is closed, if all rounds step."""
        before = self.rounds.steps + (self.rounds.is_under_way and self.rounds.place == 0)
        done = sum(self.quota.minima[: self.rounds.place]) + self.accumulation.contribution.count
        return (last - before) * sum(self.quota.minima) - done

    # Micro-batches

    def before_micro_batch(self) -> None:
        """Submit a ready round; called before every training forward and backward pass."""
        # Once per micro-batch: the forward pass asks first, and a backward pass without one asks here.
        if not self._is_checked:
            self.model.check_unwritten(self.where)
            if self.model.lacks_values:
                self.model.check_values(self.where)
            self._is_checked = True
        self.submit_if_ready()
        # An average ahead of the gradients: the lane works on masters, and the model shows what they were.
        if self.comm.asks_ahead and self._opening is None:
            self._opening = self.runtime.spawn(self.comm.open)

    def backward(self, loss: Tensor, weight: float) -> None:
        """Run a micro-batch's backward pass.

        Raises:
            LossNotScalar: The loss is not a floating-point tensor with one element.
            UsageError: It depends on no parameter.
        """
        is_loss = isinstance(loss, Tensor) and loss.is_floating_point() and loss.numel() == 1
        if not (is_loss and loss.requires_grad):
            raise misuse.no_loss(loss, self.where)
        # Before the checks of gradients: a round that is submitted gives the parameters another buffer for them.
        self.before_micro_batch()
        if self.accumulation.apart:
            self.accumulation.check_own(self.where)
        self.accumulation.check_untouched(self.where)  # zero_grad() often stands right before
        if not self.num_counted:
            check_first_loss(loss, self.where)
        try:
            self.accumulation.backward(loss, weight)
        except RuntimeError as error:
            misuse.check_graph(error, self.where)
            raise

    def check_untouched(self) -> None:
        """Raise `GradientsTouched` or `ParametersTouched` if user code has written them since the last micro-batch."""
        self.accumulation.check_untouched(self.where)
        self.model.check_unwritten(self.where)

    def count(
        self, weight: float, loss: Tensor | None, samples: int, fresh_samples: int, lacks: bool = False
    ) -> Update | None:
        """Count one micro-batch with its gradients, which `lacks` says may be incomplete; close and install full
        rounds.
        """
        # A micro-batch that the caller has run may come without a forward pass that would have submitted the round.
        self.submit_if_ready()
        if weight > 0 and not (self.accumulation.has_arrived or lacks):
            self.model.check_complete(self.where)
            raise misuse.no_gradient(self.where)
        self.accumulation.count(weight, loss, samples, fresh_samples)
        if self.runtime.virtual_time is not None:
            self.runtime.virtual_time.charge("micro-batch", 0)
        self.num_counted += 1
        self._is_checked = False
        for listener in self.model.listeners:
            listener.micro_batch_counted(weight, samples, fresh_samples)
        if self._keeps_pace:
            self.runtime.keep_pace()  # a clock counts what has been computed, not what has been called for
        # A rank whose lane is still busy accumulates more rather than wait for it, up to the quota's maximum.
        is_free = self._in_flight is None or self._in_flight.done()
        enough = self.quota.minima if is_free else self.quota.maxima
        if self.accumulation.contribution.count < enough[self.rounds.place]:
            return None
        # Overlapping: the round before is installed, and this one leaves with the next forward pass, so that the user's
        # code between both sees parameters at rest.
        update = self.end_round()
        return update if self.overlaps else self.finish_round()

    def finish_round(self) -> Update | None:
        """Submit the ready round, if there is one, and install the round in flight."""
        self.submit_if_ready()
        return self._install_round()

    def submit_if_ready(self) -> None:
        """Submit the ready round, if there is one, and begin the next; training continues, or ends."""
        # After `feed` the committed parameters are shown until training continues, which is now.
        if self.model.saved_view is not None:
            self.model.train_on(self.where)
        ready, self._ready = self._ready, None
        if ready is None:
            return
        self.rounds.enter(Stage.IN_FLIGHT)
        if self.overlaps:
            # The user had the gradients since the round was closed, and the lane is about to write their buffer.
            self.accumulation.check_untouched(self.where)
            if not self._is_checked:
                self.model.check_unwritten(self.where)
            if self.buffer_sync.names:
                self.buffer_sync.submitted(ready.buffers)
        # The scheduler turns where an update ends, so all rounds of the next one read the same rates.
        if self.rounds.at_boundary:
            self._hyperparameters = read_hyperparameters(self.model.optimizer)
            self._trains = bytes(map(trains, self.model.registered))
        ready.vote, ready.asks = self.rounds.vote, self.rounds.asks
        ready.hyperparameters, ready.trains = self._hyperparameters, self._trains
        # The lane owns the round's buffer now. It finishes what it began ahead of the gradients first.
        opening, self._opening = self._opening, None
        self._in_flight = self.runtime.spawn(functools.partial(self.comm.advance, ready, opening))
        if self._idle is not None:
            buffer, self._idle = self._idle, None
            self.accumulation.begin(buffer)
        else:
            # One buffer: the lane has it until the round is installed, and no gradient may be added before.
            self.accumulation.begin(ready.buffer, attached=False)

    def close_round(self) -> Round:
        """Close the accumulating round, unless it is, and return it; it is submitted next."""
        if self._ready is None:
            self.rounds.enter(Stage.READY)
            self._is_checked = False  # the user's code may run before the round is submitted
            # The snapshot is taken with the gradients, because the next forward pass writes the model's buffers.
            nothing: Carried = ([], None, [], [], [])
            self._ready = Round(
                self.accumulation.buffer,
                self.accumulation.contribution,
                *(self.buffer_sync.carried() if self.buffer_sync.names else nothing),
                incidents=self._incidents,
                early_reduction=self.accumulation.early_reduction,
            )
            self._incidents = []
            for listener in self.model.listeners:
                listener.round_closed()
        return self._ready

    def end_round(self) -> Update | None:
        """Let guards check the accumulating round a last time, install the previous round, and close this one
        unchanged.
        """
        # Before the installation, which takes the present versions for its own.
        self.accumulation.check_untouched(self.where)
        self.model.check_unwritten(self.where)
        self.model.check_complete(self.where)
        # Guards may run the round again, which needs the parameters at which its gradients were taken.
        for listener in self.model.listeners:
            self._incidents += listener.round_ends()
        update = self._install_round() if self.rounds.stage in SUBMITTED else None
        self.close_round()
        return update

    def _install_round(self) -> Update | None:
        """Wait for the round in flight, install its values, and return the update it committed."""
        round, self._arrived = self.wait_for_lane(), None
        if round is None:
            raise OutOfTurn(f"{self.where}: a round ends that has not begun; please report it")
        # Guards see the values before the model does, and may mend them: the lane is at rest.
        for listener in self.model.listeners:
            listener.install_begins()
        values = round.buffer.views if round.values is None else round.values
        self.model.show(values, round.shown)
        if self.buffer_sync.names:
            self.buffer_sync.install(round)
        # The values are copied into the model: the buffer is free for gradients again.
        if self.overlaps:
            self._idle = round.buffer
        else:
            self.accumulation.attach()
        # Safe to read: nothing runs on the lane until the next round is submitted.
        before, steps = self.rounds.steps, self.comm.progress.step
        met = round.report if round.met else None
        self.rounds.install(at_boundary=round.ends_update, steps=steps, met=met)
        if round.update is not None and not self._use_is_known and any(round.used):
            # Checked once; an update of which all micro-batches were left out says nothing.
            self._use_is_known = True
            if unused := [slot.name for slot in self.layout.slots if not round.used[slot.index]]:
                raise misuse.without_gradient(unused, self.where)
        # A rank that waited for others may have taken over several of their steps at once.
        if steps > before:
            self.model.stepped(self._schedule, steps - before, self.where)
        if round.update is None:
            return None
        for listener in self.model.listeners:
            listener.update_committed()
        now = self.runtime.now()
        seconds, self._updated_at = now - self._updated_at, now
        exposed_seconds, self._exposed_seconds = self._exposed_seconds, 0.0
        return dataclasses.replace(round.update, seconds=seconds, exposed_seconds=exposed_seconds)

    def wait_for_lane(self) -> Round | None:
        """Wait until the round in flight can be installed; return its result, or None without one."""
        if self._in_flight is not None:
            started = self._timer.mark()
            # Set before the wait: an error that comes out of it leaves masters that belong to no update.
            in_flight, self._in_flight, self._has_failed = self._in_flight, None, True
            self._arrived = in_flight.result()
            self._has_failed = False
            self.rounds.enter(Stage.ARRIVED)
            self._exposed_seconds += self._timer.since(started)
        return self._arrived

    def _leave(self, *, waits: bool) -> None:
        """Stop the communication lane, once its work is done or at once, and remove all hooks."""
        if not waits:
            self.show_what_is_left()
        (self.runtime.join if waits else self.runtime.leave)()
        self.hooks.remove()

    def show_what_is_left(self) -> None:
        """After an error that ended the job, show the last complete update, if it is shown already or this rank
        holds all of it.

        Masters belong to the next update if its last round has been submitted.
        """
        self.model.drop_saved_view()
        if self.model.shown == "committed" or self._has_failed or self.lifetime.failures.world_size > 1:
            return
        try:
            arrived = self.wait_for_lane()
            if arrived is not None and arrived.ends_update:
                return
            if self._opening is not None:
                self._opening.result()
            values = GradientBuffer(self.layout)
            self.replica.gather_committed(values.flats, self.buffer_sync)
            self.model.show(values.views, "committed")
        except BaseException:  # whatever it is, the job ends because of what came before
            return

    def _before_forward(self, module: nn.Module, _: object) -> None:
        # Traced code submits no round: the backward pass does.
        if torch.compiler.is_compiling() or module is not self.model.model:  # a copy
            return
        if not module.training:
            self.model.evaluated(self.where)
        if not (module.training and torch.is_grad_enabled()):
            return
        if self.lifetime.ended_because is not None:
            raise self.lifetime.refusal()
        try:
            kind = self.model.parameters[0].device.type
            if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16:
                raise misuse.autocast_to_float16(self.where)
            # Submitting a round checks the parameters: where others stand in for them, the backward pass does.
            if self._ready is None or not self.model.is_replaced:
                self.before_micro_batch()
        except BaseException as error:
            self.lifetime.end_with(error)
            raise

    # At rest

    @property
    def is_between_updates(self) -> bool:
        """Whether the last update has ended and this rank has counted no micro-batch since."""
        is_all_installed = self.rounds.stage is Stage.ACCUMULATING
        return self.rounds.at_boundary and is_all_installed and self.accumulation.contribution.count == 0

    @property
    def is_lane_idle(self) -> bool:
        """Whether the communication lane has no work, so that no code writes the masters."""
        return not self.rounds.is_under_way and self._opening is None

    def drop(self) -> bool:
        """Drop the counted micro-batches of the next update, and return True; return False if some are already
        submitted.
        """
        if self.rounds.place or self.has_round_ready:
            return False
        self.accumulation.restart()
        for listener in self.model.listeners:
            listener.round_closed()
        return True

    def let_go(self) -> None:
        """Release the model; see Note [Dropped jobs] in `engine/holding.py`."""
        self.hooks.unhook()
        self.lifetime.retire()

    def check_alike(self, what: str) -> None:
        """Raise `OutOfTurn` under a `Clock`, if a round is in flight that other ranks may not have submitted."""
        if self.rounds.is_under_way and not self.quota.is_fixed:
            raise OutOfTurn(
                f"{self.where}: {what} while a round is in flight, under a Clock: other ranks may have counted fewer "
                "rounds; call it right after an Update was returned, before the next forward pass"
            )

    def check_between_updates(self, what: str) -> None:
        """Raise `OutOfTurn` in the middle of an update, whose contributions the call `what` would lose."""
        self._finish_opening()
        accumulation = self.accumulation
        started = accumulation.has_arrived or (
            not self.has_round_ready and accumulation.contribution.count > 0
        )
        if started or not self.is_lane_idle or not self.rounds.at_boundary:
            raise OutOfTurn(
                f"{self.where}: {what} in the middle of an update: call it right after an Update was "
                "returned, before training, or after finish()"
            )

    @contextmanager
    def settled(self, *, meets: bool = False) -> Iterator[None]:
        """Show the committed parameters and the agreed buffers inside the block; see `show_committed`."""
        if self.model.saved_view is not None:
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
        """Put the committed parameters and the agreed buffers into the model; all ranks must call it, with equal
        arguments.

        Args:
            meets: Let ranks agree on writes to buffers: see Note [Buffers that are written at rest].
        """
        self.check_alike("settling")
        self._finish_opening()
        arrived = self.wait_for_lane()
        for listener in self.model.listeners:
            listener.committed_is_read()  # the communication lane is at rest, so this thread may do it
        agreement = self.replica.sync
        is_mean = agreement.steps_alone and not agreement.is_synced and arrived is None
        buffers = [] if is_mean else self._buffers(arrived, meets=meets)
        if self.model.shown == "committed" and agreement.state is SyncState.SYNCED and arrived is None:
            self.model.settle(None, buffers)
            return
        # The idle buffer may hold gathered values: it is zeroed when the next round is submitted.
        buffer = self._idle if self._idle is not None else GradientBuffer(self.layout)
        gathered = self.runtime.spawn(
            lambda: self.replica.gather_committed(buffer.flats, self.buffer_sync)
        ).result()
        self.model.settle(buffer.views, gathered if is_mean else buffers)

    def _buffers(self, arrived: Round | None, *, meets: bool) -> list[Buffer]:
        """Return the agreed buffers once `arrived` is installed, with writes between updates."""
        buffer_sync, round_index = self.buffer_sync, self.comm.progress.round_index
        if not buffer_sync.names:
            return []
        own, snapshot = self.model.trained_buffers, None if self._ready is None else self._ready.buffers
        buffers = buffer_sync.with_late_writes(buffer_sync.agreed_after(arrived))
        if arrived is None and (self.has_round_ready or not self.accumulation.contribution.count):
            buffers = as_written(buffer_sync.left_by(snapshot, round_index), own, buffers)
        if not meets:
            return buffers
        agreed = self.runtime.spawn(
            lambda: average_at_rest(self.replica.exchange, buffer_sync, buffers)
        ).result()
        buffer_sync.agree_on(agreed, round_index, own)
        return agreed

    def _finish_opening(self) -> None:
        if self._opening is not None:
            self._opening = Arrived(self._opening.result())

    def reduce_early(self) -> Round:
        """Exchange the gradients of the next round now, for a checkpoint and for that round; all ranks must call it."""
        ready = self.close_round()
        if not ready.is_reduced:
            ready.vote, ready.asks = self.rounds.vote, self.rounds.asks
            ready.hyperparameters = read_hyperparameters(self.model.optimizer)
            ready.trains = bytes(map(trains, self.model.registered))
            self.runtime.spawn(lambda: self.replica.reduce(ready)).result()
            self.accumulation.remember()  # an exchange may leave anything in the buffer
        return ready

    def written_since_closed(self) -> dict[str, Buffer]:
        """Return, by name, buffers that have changed since the ready round was closed, with their values at that
        time.
        """
        if self._ready is None:
            return {}
        return self.buffer_sync.written_since(self._ready.buffers, self.model.trained_buffers)

    def closed_with(self, closed: Mapping[str, Buffer]) -> None:
        """Replace the ready round's buffers by these, by name."""
        device = self.layout.sets[0].device
        pairs = zip(self.buffer_sync.names, self.close_round().buffers, strict=True)
        buffers = [at(closed[name], device) if name in closed else value for name, value in pairs]
        self.close_round().buffers = buffers

    def begin_again(self, steps: int, round_index: int) -> None:
        """Continue after so many updates and rounds, whose state is loaded; drop accumulated gradients.

        Args:
            steps: Number of committed updates.
            round_index: Index of the next round.
        """
        self._ready = None
        self.accumulation.begin(self.accumulation.buffer)
        self._updated_at = self.runtime.now()
        self._use_is_known = self._use_is_known or steps > 0
        self.model.begin_again()
        if self._schedule is not None:
            self._schedule.forget()
        self.rounds.begin_again(steps)
        self.num_counted, self._exposed_seconds = 0, 0.0
        self.comm.progress.begin_again(steps, round_index)
        self.replica.begin_again()
        for listener in self.model.listeners:
            listener.round_closed()

    def began_again(self) -> None:
        """Begin with the current state of the job, once a checkpoint's state is completely loaded; all ranks must
        call it.

        Until training continues, the committed parameters are shown.
        """
        self.replica.models_show(self.model.parameters)
        buffer_sync = self.buffer_sync
        buffer_sync.agree_on(buffer_sync.agreed, self.comm.progress.round_index, buffer_sync.copies)
        for listener in self.model.listeners:
            listener.began_again()
        if self.model.shown == "estimate":
            self.show_committed()
            self.model.until_training()

    @contextmanager
    def aside(self, accumulation: Accumulation) -> Iterator[None]:
        """During the block, accumulate gradients in another round."""
        own, self.accumulation = self.accumulation, accumulation
        own.stand_in = accumulation  # autograd's hooks hold `own`, and hooks cannot change places
        accumulation.attach()
        try:
            yield
        finally:
            self.accumulation, own.stand_in = own, None
            own.attach(zero=False)
