"""The communication lane: runs the strategy's coroutine and performs what it asks for."""

import dataclasses
import math
from typing import Any

import torch

from stretto.engine.agreement import agree
from stretto.engine.clipping import clip_factor, mean_norm
from stretto.engine.copies import Copies
from stretto.engine.job import Commit, Job, Landing, Reduction, Shown
from stretto.engine.options import Options
from stretto.engine.replicas import Replicas
from stretto.engine.roll_call import RollCall, Vote, nothing, settings_text
from stretto.engine.runtime import Pending, Runtime
from stretto.engine.script import reduced, updates
from stretto.engine.sentry import Sentry
from stretto.engine.statistics import Statistics, average_statistics
from stretto.engine.watch import Watch
from stretto.errors import NonFinite, ReplicaNonFinite
from stretto.exchange import Exchange
from stretto.optimizer import Hyperparameters, ReducedGradient, ShardedOptimizer
from stretto.records import Incident
from stretto.strategies import Strategy
from stretto.strategies.contract import (
    AllReduce,
    Average,
    Boundary,
    Divergence,
    Gather,
    Local,
    Look,
    Moment,
    Postpone,
    Preview,
    Reduce,
    Step,
)
from stretto.strategies.ledger import ledger_of


class Lane:
    """Performs one job per `advance`: from the `Reduce` that waits for it to the next one.

    The lane is alone on its group and performs one thing after the other, so every rank issues the same
    collectives in the same order.
    """

    def __init__(
        self,
        strategy: Strategy,
        exchange: Exchange,
        owner: ShardedOptimizer,
        watch: Watch,
        sentry: Sentry,
        *,
        options: Options,
        runtime: Runtime,
    ) -> None:
        self.exchange = exchange
        self.owner = owner
        self.watch = watch
        self._stepped = False
        self.sentry = sentry
        self.round_index = 0
        ledger = ledger_of(strategy)
        self.replicated = ledger.replicated
        self._options = options
        self._runtime = runtime
        self.asks_ahead = ledger.asks_ahead
        """Whether an update may begin with something else than gradients."""
        self._script = updates(strategy, sentry)
        self._next = next(self._script)
        """What the script waits for."""
        self._is_ahead = False
        """Whether masters have been averaged that the model does not show yet."""
        self.replicas = Replicas(exchange, owner) if ledger.local else None
        """What this rank does alone, for strategies with `Local`."""
        self.copies = Copies(exchange, owner) if ledger.averages and not ledger.local else None
        """What should be the same on all ranks, for strategies that average after `AllReduce`."""
        sentry.company = self._company
        sentry.start(step=0)
        # Sums of finished updates, for the next ones: fresh pages would cost more than the arithmetic.
        self._spare_sums: list[list[torch.Tensor]] = []
        self._incidents: tuple[Incident, ...] = ()
        """Found, and not yet reported: an update that does not step reports nothing."""
        self._begin_update([])

    def advance(self, job: Job, opening: Pending[None]) -> Landing:
        """Hand `job` to the waiting `Reduce` and perform effects until the update ends, or the next one waits.

        Args:
            job: The round.
            opening: A call of `open` that was spawned before; what it raised is raised here.
        """
        opening.result()
        self.open()
        started = self._runtime.now()
        self.sentry.check_strikes(self.watch.step)
        reduction = job.reduction or self.reduce(job)
        if self.copies is not None:
            self.copies.rounds += 1
        self._reductions.append(reduction)
        self._hyperparameters = job.hyperparameters
        self.sentry.note(job.incidents)
        self.sentry.reduced(reduction.gradient, job, self.watch.step + 1)
        reply: Any = reduction.gradient
        shown: Shown = "committed"
        at_boundary = False
        while True:
            effect = self._script.send(reply)
            reply = None
            match effect:
                case Reduce() | AllReduce() | Local():
                    break
                case Look() | Average() if at_boundary:
                    break  # ahead of the next gradients, and beside them: see `open`
                case Step(gradient):
                    self._step(reduced(gradient), job)
                    shown = "committed"
                case Preview(gradient):
                    shown = self._preview(reduced(gradient), job)
                case Gather():
                    self.exchange.all_gather(job.buffer.flats)
                case Look() | Average() | Postpone():
                    reply = self._answer(effect, (job, reduction))
                case Boundary():
                    at_boundary = True
                case _:
                    reply = self.sentry.perform(effect, job)
        self._next = effect
        self.round_index += 1
        self._lane_seconds += self._runtime.now() - started
        commit = self._commit() if at_boundary else None
        return Landing(job.buffer, job.statistics, shown, reduction, at_boundary, commit)

    def open(self) -> None:
        """Perform what the script asks for ahead of the next gradients, unless that has been done.

        It may run beside them: the model goes on showing what it shows.
        """
        started = self._runtime.now()
        while isinstance(self._next, Look | Average | Postpone):
            self._next = self._script.send(self._answer(self._next))
        self._lane_seconds += self._runtime.now() - started

    def reduce(self, job: Job) -> Reduction:
        """Exchange the gradients of `job` and hold the roll call."""
        if self.replicas is not None:
            return self._keep(job, self.replicas)
        finite = job.is_finite
        sums = self._spare_sums.pop() if self._spare_sums else self.owner.new_sums()
        if self.replicated:
            self.exchange.all_reduce(job.buffer.flats, sums)
        else:
            self.exchange.reduce_scatter(job.buffer.flats, sums)
        gradient = ReducedGradient(sums, 0.0, 0.0, b"")
        attendance = job.attendance(finite, gradient.measure())
        records = self.exchange.gather_bytes(RollCall.pack(attendance))
        call = RollCall.unpack(records, len(attendance.used), len(attendance.changed))
        self._check_settings(job, call)
        skipped = self._leave_out(call, call.norm_squared(replicated=self.replicated), NonFinite)
        statistics = {} if skipped else self._average_statistics(job, call)
        return self.reduction(sums, call, statistics, skipped=skipped)

    def reduction(
        self,
        sums: list[torch.Tensor],
        call: RollCall,
        statistics: dict[int, torch.Tensor],
        *,
        skipped: bool,
    ) -> Reduction:
        """Return what an exchange gave, or what a checkpoint says that it gave; `sums` are taken over."""
        norm_squared = call.norm_squared(replicated=self.replicated)
        gradient = ReducedGradient(sums, call.weight, norm_squared, call.used)
        if skipped:
            gradient.weight = gradient.norm_squared = 0.0
            gradient.used = bytes(len(call.used))
            for total in sums:
                total.zero_()
        return Reduction(gradient, call, statistics, skipped)

    def inspect(self) -> None:
        """Let guards look at masters and optimizer state before they are shown or saved; all ranks must call."""
        self.sentry.run("before_step", None, self.watch.step + 1)

    def conclude(self) -> tuple[Incident, ...]:
        """Return what was found on any rank behind the last update; all ranks must call, at rest."""
        found, self._incidents = self._incidents, ()
        return found + self.sentry.conclude_job(self.watch.step + 1)

    def gather_committed(self, flats: list[torch.Tensor], statistics: Statistics) -> list[torch.Tensor]:
        """Fill `flats`, one tensor per flat set, with the committed parameters; all ranks must call.

        Where replicas have drifted apart, these are the mean of all, and the replicas stay as they are.

        Returns:
            The model's floating-point buffers that go with them.
        """
        if self.copies is not None:
            self.copies.show(flats)
            return statistics.agreed
        if self.replicas is None or not self.has_drifted:
            self.owner.publish(flats)
            if not self.replicated:
                self.exchange.all_gather(flats)
            return statistics.agreed
        own, changed = statistics.snapshot()
        call = self._consult(self.replicas, changed)
        self.replicas.show_mean(call.share(self.exchange.rank), flats)
        means = average_statistics(self.exchange, own, call.changed, call.micro_batches)
        return [means.get(index, value) for index, value in enumerate(statistics.agreed)]

    def _consult(self, replicas: Replicas, changed: bytes) -> RollCall:
        """Hold the roll call of an average that leaves no trace; all ranks must call."""
        # Below zero: it must not be taken for the average of a rank that is somewhere else.
        absent = nothing(len(self.owner.layout.slots), changed, self.watch.step)
        return replicas.meet(dataclasses.replace(absent, round_index=~self.round_index))

    def agreed_owner(self, changed: bytes) -> ShardedOptimizer:
        """Return the owner, or where replicas differ a copy that holds their mean; all ranks must call."""
        if self.copies is not None:
            return self.copies.consensus()
        if self.replicas is None or self.replicas.are_equal:
            return self.owner
        return self.replicas.consensus(self._consult(self.replicas, changed).share(self.exchange.rank))

    @property
    def apart(self) -> Replicas | Copies | None:
        """This rank's replica, where others hold another: as of `agreed_owner`."""
        return None if self._company is None or self._company.are_equal else self._company

    def begin_again(self, round_index: int) -> None:
        """Go on at `round_index` from what a checkpoint has put into the owner."""
        self.round_index = round_index
        if self._company is not None:
            self._company.begin_again()

    @property
    def has_drifted(self) -> bool:
        """Whether the model may show something else than other ranks' models."""
        return self._gap > 0 or self._is_ahead

    def _keep(self, job: Job, replicas: Replicas) -> Reduction:
        """Take this rank's own gradients; nobody is asked."""
        sums = replicas.own_gradient(job.buffer.flats)
        gradient = ReducedGradient(sums, job.contribution.weight, 0.0, bytes(job.contribution.used))
        gradient.norm_squared = norm_squared = gradient.measure()
        attendance = job.attendance(job.is_finite, norm_squared)
        call = RollCall.alone(attendance, self.exchange.rank, self.exchange.world_size)
        skipped = self._leave_out(call, norm_squared, ReplicaNonFinite)
        if skipped:
            gradient.weight, gradient.used = 0.0, bytes(len(gradient.used))
            job.statistics = [buffer.clone() for buffer in job.agreed]
            absent = nothing(len(gradient.used), job.changed, self.watch.step)
            call = RollCall.alone(absent, self.exchange.rank, self.exchange.world_size)
        else:
            replicas.window.add(job.contribution)
        replicas.window.rounds += 1
        return Reduction(gradient, call, {}, skipped, alone=True, met=False)

    def _answer(self, effect: Look | Average | Postpone, flight: tuple[Job, Reduction] | None = None) -> Any:
        """Answer what only strategies ask for that average replicas; without a flight, ahead of it."""
        match effect:
            case Look():
                drains = flight is not None and flight[1].drains(flight[0].vote)
                interval = None if self.copies is None else self.copies.interval
                return Moment(self.round_index, self._gap, drains, interval)
            case Average():
                return self._average_ahead(effect) if flight is None else self._average(*flight, effect)
            case Postpone(updates) if self.copies is not None:
                self.copies.interval = updates
        return None

    def _average(self, job: Job, reduction: Reduction, effect: Average) -> Divergence | None:
        """Bring the replicas together; a round of `Local` ends as if all ranks had taken part in it."""
        self.sentry.forget()  # what a step was to leave
        if self.copies is not None:
            step = self.watch.step + self._stepped
            return self.copies.reunite(effect, job.buffer.flats, step)
        if self.replicas is None:
            raise TypeError("a strategy must step with Local or AllReduce before it averages")
        attendance = job.attendance(True, 0.0)
        attendance = dataclasses.replace(
            attendance, round_index=self.round_index, step=self.watch.step, stepped=self._stepped
        )
        call = self.replicas.meet(attendance)
        self._check_settings(job, call)
        reduction.statistics = self._average_statistics(job, call)
        self.replicas.average(call, job.buffer.flats, state=effect.state)
        self.owner.publish(job.buffer.flats)
        reduction.call, reduction.met = call.learned(reduction.call, self.exchange.rank), True
        # A rank that came early to drain takes over where the others are.
        self.round_index = int(call.records["round_index"].max())
        self.watch.step = int(call.records["step"].max())
        # What the others have done is news, and reported; at the very end a step that nobody took is none.
        is_over = all(vote == Vote.DRAIN for vote in call.votes)
        self._stepped = call.stepped or (call.weight > 0 and not is_over)
        return None

    def _average_ahead(self, effect: Average) -> Divergence | None:
        """Average masters while the model shows what they were; the next step is one on the average."""
        if self.copies is None:
            raise TypeError("a strategy must step with AllReduce to average ahead of its gradients")
        self.sentry.run("before_step", None, self.watch.step + 1)
        self.sentry.forget()  # what is sealed is about to change
        divergence = self.copies.reunite(effect, None, self.watch.step)
        self._is_ahead = True
        self.sentry.run("after_update", None, self.watch.step + 1)
        return divergence

    @property
    def _gap(self) -> int:
        """Rounds since replicas were last averaged."""
        return 0 if self._company is None else self._company.rounds

    @property
    def _company(self) -> Replicas | Copies | None:
        return self.copies or self.replicas

    def _check_settings(self, job: Job, call: RollCall) -> None:
        if not call.settings_agree:
            where = f"rank {self.exchange.rank}, after step {self.watch.step}"
            agree(self.exchange, {"optimizer settings": settings_text(job.hyperparameters)}, where)

    def _leave_out(self, call: RollCall, norm_squared: float, kind: type[NonFinite]) -> bool:
        """Return whether this round is to be left out; the same answer on every rank that took part."""
        found = call.not_finite(norm_squared)
        if found is not None and self._options.nonfinite == "raise":
            raise kind(
                f"rank {self.exchange.rank}, step {self.watch.step + 1}, round {self.round_index}: {found}; "
                "lower the learning rate, or leave such rounds out with Options(nonfinite='skip')"
            )
        return found is not None

    def _average_statistics(self, job: Job, call: RollCall) -> dict[int, torch.Tensor]:
        return average_statistics(self.exchange, job.statistics, call.changed, call.micro_batches)

    def _step(self, gradient: ReducedGradient, job: Job) -> None:
        self.sentry.run("before_step", job, self.watch.step + 1)
        self.sentry.forget()  # what is sealed is about to change
        gradient.merge()
        if gradient.weight > 0:
            self._gradient_norm = mean_norm(gradient, self.exchange, replicated=self.replicated)
            how = self._hyperparameters, clip_factor(self._gradient_norm, self._options.clip_norm)
            self.sentry.rehearse(gradient, *how)
            self.owner.step(gradient, *how)
            self._runtime.charge("step", self.owner.numel)
            self._stepped = True
            if self.copies is not None:
                self.copies.stepped(gradient, self._hyperparameters)
        self.owner.publish(job.buffer.flats)
        self._is_ahead = False

    def _preview(self, gradient: ReducedGradient, job: Job) -> Shown:
        self.sentry.run("before_step", job, self.watch.step + 1)
        gradient.merge()
        if gradient.weight == 0:
            self.owner.publish(job.buffer.flats)
            return "committed"
        norm = mean_norm(gradient, self.exchange, replicated=self.replicated)
        clip = clip_factor(norm, self._options.clip_norm)
        self.owner.preview(gradient, self._hyperparameters, clip, job.buffer.flats)
        self._runtime.charge("preview", self.owner.numel)
        return "estimate"

    def _begin_update(self, hyperparameters: Hyperparameters) -> None:
        self._reductions: list[Reduction] = []
        self._hyperparameters = hyperparameters
        self._gradient_norm = math.nan
        self._stepped = False
        self._lane_seconds = 0.0
        self._bytes_before = self.exchange.sent_bytes

    def _commit(self) -> Commit | None:
        """Close the update: return what is known of it, and reuse the storage of its gradients."""
        commit = None
        if self._reductions[-1].met:
            self._incidents += self.sentry.conclude(self.watch.step + 1)
        # Nobody asks the others after a step alone: it counts on every rank, whatever this one contributed.
        if self._stepped or not self._reductions[-1].met:
            self.watch.step += 1
            commit = Commit(
                reductions=tuple(self._reductions),
                gradient_norm=self._gradient_norm,
                learning_rates=tuple(float(group["lr"]) for group in self._hyperparameters),
                round_index=self.round_index - 1,
                lane_seconds=self._lane_seconds,
                sent_bytes=self.exchange.sent_bytes - self._bytes_before,
                incidents=self._incidents,
                gap=self._gap,
                interval=None if self.copies is None else self.copies.interval,
            )
            self._incidents = ()
        if self.replicas is None:
            self._spare_sums.extend([list(reduction.gradient.sums) for reduction in self._reductions])
        self._begin_update(self._hyperparameters)
        return commit
