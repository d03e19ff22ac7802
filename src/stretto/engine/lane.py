"""The communication lane: runs the strategy's coroutine and performs what it asks for."""

import math
import zlib
from collections.abc import Generator
from typing import Any

import numpy as np
import torch

from stretto.effects import AllReduce, Boundary, Effect, Gather, Preview, Reduce, Step
from stretto.engine.agreement import agree
from stretto.engine.job import Commit, Job, Landing, Reduction, Shown
from stretto.engine.ledger import ledger_of
from stretto.engine.options import Options
from stretto.engine.roll_call import Attendance, RollCall, settings_text
from stretto.engine.runtime import Runtime
from stretto.engine.sentry import Sentry
from stretto.engine.watch import Watch
from stretto.errors import NonFinite
from stretto.exchange import Exchange
from stretto.guards.effects import GuardEffect
from stretto.owner import Hyperparameters, Owner, ReducedGradient
from stretto.records import Verdict
from stretto.strategies import Strategy

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing, as in `torch.nn.utils.clip_grad_norm_`."""


class Lane:
    """Performs one job per `advance`: from the `Reduce` that waits for it to the next one.

    The lane is alone on its group and performs one thing after the other, so every rank issues the same
    collectives in the same order.
    """

    def __init__(
        self,
        strategy: Strategy,
        exchange: Exchange,
        owner: Owner,
        watch: Watch,
        sentry: Sentry,
        *,
        options: Options,
        runtime: Runtime,
    ) -> None:
        self.exchange = exchange
        self.owner = owner
        self.watch = watch
        self.sentry = sentry
        self.round_index = 0
        self.replicated = ledger_of(strategy).replicated
        self._options = options
        self._runtime = runtime
        self._script = _updates(strategy, sentry)
        self._waiting = next(self._script)
        # Sums of finished updates, for the next ones: fresh pages would cost more than the arithmetic.
        self._spare_sums: list[list[torch.Tensor]] = []
        self._verdicts: tuple[Verdict, ...] = ()
        """Found, and not yet reported: an update that does not step reports nothing."""
        self._begin_update([])

    def advance(self, job: Job) -> Landing:
        """Hand `job` to the waiting `Reduce` and perform effects until the next one waits."""
        started = self._runtime.now()
        reduction = job.reduction or self.reduce(job)
        self._reductions.append(reduction)
        self._hyperparameters = job.hyperparameters
        self.sentry.note(job.verdicts)
        self.sentry.reduced(reduction.gradient, job, self.watch.step + 1)
        reply: Any = reduction.gradient
        shown: Shown = "committed"
        at_boundary = False
        while True:
            effect = self._script.send(reply)
            reply = None
            match effect:
                case Reduce() | AllReduce():
                    self.round_index += 1
                    break
                case Step(gradient):
                    self._step(_reduced(gradient), job)
                    shown = "committed"
                case Preview(gradient):
                    shown = self._preview(_reduced(gradient), job)
                case Gather():
                    self.exchange.all_gather(job.buffer.flats)
                case Boundary():
                    at_boundary = True
                case _:
                    reply = self.sentry.perform(effect, job)
        self._lane_seconds += self._runtime.now() - started
        commit = self._commit() if at_boundary else None
        return Landing(job.buffer, job.statistics, shown, reduction, at_boundary, commit)

    def reduce(self, job: Job) -> Reduction:
        """Exchange the gradients of `job` and hold the roll call."""
        finite = all(bool(torch.isfinite(flat.sum())) for flat in job.buffer.flats)
        sums = self._spare_sums.pop() if self._spare_sums else self.owner.new_sums()
        if isinstance(self._waiting, AllReduce):
            self.exchange.all_reduce(job.buffer.flats, sums)
        else:
            self.exchange.reduce_scatter(job.buffer.flats, sums)
        gradient = ReducedGradient(sums, 0.0, 0.0, b"")
        call = self._hold_roll_call(job, finite, gradient.measure())
        self._check_settings(job, call)
        skipped = self._leave_out(call)
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

    def gather_committed(self, job_buffer: list[torch.Tensor]) -> None:
        """Fill `job_buffer`, one tensor per flat set, with the committed parameters; all ranks must call."""
        self.owner.publish(job_buffer)
        if not self.replicated:
            self.exchange.all_gather(job_buffer)

    def _hold_roll_call(self, job: Job, finite: bool, norm_squared: float) -> RollCall:
        contribution = job.contribution
        attendance = Attendance(
            weight=contribution.weight,
            samples=contribution.samples,
            micro_batches=contribution.micro_batches,
            loss_sum=float(contribution.loss_sum),
            loss_weight=contribution.loss_weight,
            gradient_is_finite=finite,
            norm_squared=norm_squared,
            vote=job.vote,
            settings=zlib.crc32(settings_text(job.hyperparameters).encode()),
            used=bytes(contribution.used),
            changed=job.changed,
        )
        records = self.exchange.gather_bytes(RollCall.pack(attendance))
        return RollCall.unpack(records, len(contribution.used), len(job.changed))

    def _check_settings(self, job: Job, call: RollCall) -> None:
        if not call.settings_agree:
            where = f"rank {self.exchange.rank}, after step {self.watch.step}"
            agree(self.exchange, {"optimizer settings": settings_text(job.hyperparameters)}, where)

    def _leave_out(self, call: RollCall) -> bool:
        """Return whether this round is to be left out; the same answer on every rank."""
        losses, gradients = call.ranks_with_bad_loss(), call.ranks_with_bad_gradient()
        if not losses and not gradients and math.isfinite(call.norm_squared(replicated=self.replicated)):
            return False
        if self._options.nonfinite == "raise":
            found = (
                f"the loss is not finite on ranks {losses}" if losses else
                f"the gradient is not finite on ranks {gradients}" if gradients else
                "the sum of the ranks' gradients overflows"
            )  # fmt: skip
            raise NonFinite(
                f"rank {self.exchange.rank}, step {self.watch.step + 1}, round {self.round_index}: {found}; "
                "lower the learning rate, or leave such rounds out with Options(nonfinite='skip')"
            )
        return True

    def _average_statistics(self, job: Job, call: RollCall) -> dict[int, torch.Tensor]:
        """Average over ranks, weighted by micro-batches, the buffers that changed on any rank."""
        counts = call.micro_batches
        indices = [index for index, changed in enumerate(call.changed) if changed]
        if not indices or sum(counts) == 0:
            return {}
        own = torch.cat([job.statistics[index].flatten().float() for index in indices])
        whole = torch.empty(len(counts) * own.numel(), dtype=own.dtype, device=own.device)
        self.exchange.gather_values(own, whole, "average of the model's buffers")
        mean = torch.zeros_like(own)
        for count, part in zip(counts, whole.view(len(counts), -1), strict=True):
            if count:
                mean.add_(part, alpha=count / sum(counts))
        parts = torch.split(mean, [job.statistics[index].numel() for index in indices])
        return {
            index: part.view_as(job.statistics[index]).to(job.statistics[index].dtype)
            for index, part in zip(indices, parts, strict=True)
        }

    def _step(self, gradient: ReducedGradient, job: Job) -> None:
        self.sentry.run("before_step", job, self.watch.step + 1)
        self.sentry.forget()  # what is sealed is about to change
        gradient.merge()
        if gradient.weight > 0:
            self._gradient_norm = self._norm(gradient)
            self.owner.step(gradient, self._hyperparameters, self._clip(self._gradient_norm))
            self._runtime.charge("step", self.owner.numel)
            self._stepped = True
        self.owner.publish(job.buffer.flats)

    def _preview(self, gradient: ReducedGradient, job: Job) -> Shown:
        self.sentry.run("before_step", job, self.watch.step + 1)
        gradient.merge()
        if gradient.weight == 0:
            self.owner.publish(job.buffer.flats)
            return "committed"
        clip = self._clip(self._norm(gradient))
        self.owner.preview(gradient, self._hyperparameters, clip, job.buffer.flats)
        self._runtime.charge("preview", self.owner.numel)
        return "estimate"

    def _norm(self, gradient: ReducedGradient) -> float:
        """Return the 2-norm of the mean gradient; a sum of two reductions has to be measured over ranks."""
        if gradient.norm_squared is None:
            norms = np.array([gradient.measure()])
            if not self.replicated:
                norms = np.frombuffer(b"".join(self.exchange.gather_bytes(norms.tobytes())))
            gradient.norm_squared = sum(norms.tolist())
        return math.sqrt(gradient.norm_squared) / gradient.weight

    def _clip(self, norm: float) -> float:
        """Return the factor that brings a gradient of this norm under the limit."""
        limit = self._options.clip_norm
        return 1.0 if limit is None else min(1.0, limit / (norm + CLIP_EPSILON))

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
        self._verdicts += self.sentry.conclude(self.watch.step + 1)
        if self._stepped:
            self.watch.step += 1
            commit = Commit(
                reductions=tuple(self._reductions),
                gradient_norm=self._gradient_norm,
                learning_rates=tuple(float(group["lr"]) for group in self._hyperparameters),
                round_index=self.round_index - 1,
                lane_seconds=self._lane_seconds,
                sent_bytes=self.exchange.sent_bytes - self._bytes_before,
                verdicts=self._verdicts,
            )
            self._verdicts = ()
        self._spare_sums.extend([list(reduction.gradient.sums) for reduction in self._reductions])
        self._begin_update(self._hyperparameters)
        return commit


def _updates(strategy: Strategy, sentry: Sentry) -> Generator[Effect | GuardEffect, Any, None]:
    while True:
        yield from strategy.update()
        yield Boundary()
        yield from sentry.ask("after_update")


def _reduced(gradient: object) -> ReducedGradient:
    if not isinstance(gradient, ReducedGradient):
        raise TypeError(f"a strategy must pass on the gradient it was given, not {type(gradient).__name__}")
    return gradient
