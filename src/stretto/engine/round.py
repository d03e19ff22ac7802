"""The objects that pass between the two lanes, and their listeners.

Listener        receives the events of the compute lane
Round           a closed round; the communication lane owns all of it until it is installed
Reduction       the summed gradients
Progress        the position of the job on the communication lane, and its update in progress
`Landing`       the result: values to show, and the update if one was committed
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from stretto.engine import misuse
from stretto.engine.accumulation import Contribution, GradientBuffer
from stretto.engine.buffers import remain_finite
from stretto.engine.early_reduction import EarlyReduction
from stretto.engine.report import Asks, Measured, RankReport, RoundReport, Vote, settings_text
from stretto.flat import Layout
from stretto.optimizer import Hyperparameters, ReducedGradient, learning_rate
from stretto.records import Incident, Update
from stretto.strategies.contract import Divergence

Shown = Literal["committed", "estimate"]
"""Which parameters the model holds."""


Weighed = tuple[Tensor, float, int]
"""A loss, its weight and its samples."""
LossFunction = Callable[[Any], "Tensor | Weighed"]
"""Runs the forward pass on a batch, which it must not change."""


def weighed(outcome: "Tensor | Weighed", weight: float, samples: int) -> Weighed:
    """Return a loss function's result; a loss alone is completed with `weight` and `samples`."""
    return misuse.read_weighed(outcome) if isinstance(outcome, tuple) else (outcome, weight, samples)


class Listener:
    """Receives the events of one rank's compute lane, for guards and saves; methods do nothing unless overridden."""

    def micro_batch_begins(self, loss_function: LossFunction, batch: object) -> None:
        """A micro-batch begins that can be run again; not called for micro-batches that come through `backward`."""

    def micro_batch_counted(self, weight: float, samples: int, fresh_samples: int) -> None:
        """A micro-batch has been counted, whether it can be run again or not."""

    def round_ends(self) -> Sequence[Incident]:
        """All micro-batches of a round are counted, and no parameters have been installed since it began.

        Called once per round, on all ranks. The returned incidents are sent with the round.
        """
        return ()

    def round_closed(self) -> None:
        """The round can no longer change."""

    def install_begins(self) -> None:
        """A round's values are about to be installed; the lane is at rest. Ranks come here at different times."""

    def installed(self, values: Sequence[Tensor]) -> None:
        """The model's parameters have been given `values`, in the layout's order."""

    def update_committed(self) -> None:
        """An update has been committed and is shown; both lanes are at rest. All ranks call, at the same update."""

    def committed_is_read(self) -> None:
        """Masters and optimizer state are about to be shown or saved; the lane is at rest, all ranks call."""

    def began_again(self) -> None:
        """The job begins, continues from a checkpoint's state, or continues under another strategy."""

    def ended(self) -> Sequence[Incident]:
        """The job has ended without an error and is at rest; all ranks call. Return incidents not yet reported."""
        return ()


@dataclasses.dataclass(slots=True)
class Round:
    """One closed round, which the compute lane hands to the communication lane."""

    buffer: GradientBuffer
    """Holds the gradients to send, then the values that come back."""
    contribution: Contribution
    buffers: list[Tensor | None]
    """Snapshot of the model's floating-point buffers, taken with the gradient; None for one that is gone."""
    changed: Tensor | None
    """How each entry of `buffers` differs on this rank from what ranks last agreed on; None without entries."""
    agreed: list[Tensor | None]
    """The values of these buffers that ranks last agreed on; no code may write them."""
    sound: list[Tensor | None]
    """The values of these buffers after the last round that counted; see `BufferSync.sound`."""
    first: Sequence[int]
    """Those of which all ranks take rank 0's."""
    vote: Vote
    hyperparameters: Hyperparameters
    asks: Asks = Asks.NOTHING
    trains: bytes = b""
    """By parameter, whether it asked for gradients when the hyperparameters were read; the same on all ranks."""
    reduction: "Reduction | None" = None
    """The result, if a checkpoint had the gradients exchanged before start."""
    incidents: Sequence[Incident] = ()
    """Incidents on the compute lane since the last round was closed."""
    early_reduction: EarlyReduction | None = None
    """The sum of its gradients, if it began during the last backward pass."""

    def settings(self, layout: Layout) -> str:
        """Settings that must be equal on all ranks, as text."""
        slots = zip(layout.slots, self.trains, strict=True)
        frozen = [f"frozen: {slot.name}" for slot, trains in slots if not trains]
        return "\n".join([settings_text(self.hyperparameters), *frozen])

    def take_back(self) -> None:
        """Forget the sum that began early: it is finished."""
        self.early_reduction = None

    def leave_out_buffers(self) -> None:
        """Let the buffers be as they were after the last round that counted."""
        self.buffers = self.sound

    def look_at_gradients(self) -> Tensor:
        """Return whether all accumulated gradients are finite, `()` bool, without waiting for the device."""
        # Extremes take one pass and no memory; one is not finite where any value is not.
        extremes: list[Tensor] = []
        for flat in self.buffer.flats:
            for extreme in flat.aminmax():
                extremes.append(extreme.to(self.buffer.flats[0].device, torch.float64))
        return torch.stack(extremes).isfinite().all()

    def measured(self, finite: Tensor, norm_squared: Tensor) -> Measured:
        """Return this rank's measurements of the round on its device.

        Args:
            finite: Result of `look_at_gradients` when the round was submitted.
            norm_squared: Squared 2-norm of the gradients' sum, on the slices that this rank owns.
        """
        return Measured(
            loss_sum=self.contribution.loss_sum,
            gradient_is_finite=finite,
            norm_squared=norm_squared,
            changed=self.changed,
            # Since the last round that counted; some begin with an infinity.
            buffers_are_finite=None
            if self.changed is None
            else remain_finite(self.buffers, self.sound, self.changed),
        )

    def report(self, *, stale: bool = False) -> RankReport:
        """Return this rank's part of the round report, as far as the host knows it.

        Args:
            torn: Whether some gradients changed after their departure.
        """
        return RankReport(
            totals=self.contribution.totals,
            gradient_is_finite=True,
            norm_squared=0.0,
            vote=self.vote,
            asks=self.asks,
            settings=zlib.crc32(settings_text(self.hyperparameters).encode() + self.trains),
            used=bytes(self.contribution.used),
            changed=bytes(len(self.buffers)),
            stale=stale,
        )


@dataclasses.dataclass(slots=True)
class Reduction:
    """The result of a round's exchange of gradients."""

    gradient: ReducedGradient
    report: RoundReport
    buffer_means: dict[int, Tensor | None]
    """Averages over ranks of the buffers that changed on any rank, by index; None for what ranks cannot average."""
    skipped: bool
    """Whether the round is skipped of the update because a loss or gradient was not finite."""
    alone: bool = False
    """Whether this rank used only its own gradients; if its round was skipped, the report does not count it."""
    met: bool = True
    """Whether all ranks took part; otherwise the report holds this rank's record alone."""

    def meet(self, report: RoundReport, buffer_means: dict[int, Tensor | None]) -> None:
        """Count the round as one in which all ranks took part, with their report and averages."""
        self.report, self.buffer_means, self.met = report, buffer_means, True


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
    """The record of a committed update at the end of its last round."""

    reductions: tuple[Reduction, ...]
    gradient_norm: float
    learning_rates: tuple[float, ...]
    round_index: int
    lane_seconds: float
    sent_bytes: int
    incidents: tuple[Incident, ...]
    """Incidents of all ranks since the previous commit."""
    gap: int
    """Updates since replicas were last averaged; 0 where they cannot differ."""
    interval: int | None
    """Updates from one average to the next, where the strategy chooses."""
    divergence: Divergence | None
    """Of the average made in this update, if replicas were compared there."""
    staleness: int
    """Of the strategy, in committed updates."""


@dataclasses.dataclass(slots=True)
class Progress:
    """Counts on the communication lane, and the record of its update in progress."""

    round_index: int = 0
    """Rounds before the present one; rounds that are skipped count too."""
    step: int = 0
    """Committed updates."""
    incidents: list[Incident] = dataclasses.field(default_factory=list)
    """Incidents of all ranks that are not reported yet: an update that does not step reports nothing."""
    versions: dict[str, int] = dataclasses.field(default_factory=dict)
    """Of the tensors that guards compare although no step writes them, as the job began. A tensor with another
    version has been written since, and may differ between ranks: the counts of `BatchNorm`, say, where data are
    uneven.
    """

    reductions: list[Reduction] = dataclasses.field(default_factory=list)
    """Results of the rounds of the update in progress; the fields below are of this update too."""
    hyperparameters: Hyperparameters = dataclasses.field(default_factory=list)
    gradient_norm: float = math.nan
    """2-norm of the mean gradient, before clipping."""
    stepped: bool = False
    divergence: Divergence | None = None
    """Of the average made in it, if replicas were compared there."""
    lane_seconds: float = 0.0
    bytes_before: int = 0
    """Bytes that the exchange had sent when the update began."""

    def begin_update(self, sent_bytes: int) -> None:
        """Forget the last update and begin the record of the next."""
        self.reductions = []
        self.gradient_norm = math.nan
        self.stepped = False
        self.divergence = None
        self.lane_seconds = 0.0
        self.bytes_before = sent_bytes

    def begin_round(self, reduction: Reduction, hyperparameters: Hyperparameters) -> None:
        """A round's gradients are reduced; hyperparameters belong to its update."""
        self.reductions.append(reduction)
        self.hyperparameters = hyperparameters

    def end_round(self, seconds: float) -> None:
        """All that a round asked for is performed; the lane has worked so long on it."""
        self.round_index += 1
        self.lane_seconds += seconds

    def open(self, seconds: float) -> None:
        """The lane has worked so long on an update ahead of its gradients."""
        self.lane_seconds += seconds

    def take_step(self, gradient_norm: float | None = None) -> None:
        """The optimizer has stepped in this update, here or, without a norm, on some rank."""
        self.stepped = True
        if gradient_norm is not None:
            self.gradient_norm = gradient_norm

    def measure(self, divergence: Divergence | None) -> None:
        """Replicas have been averaged, and compared if there is a result."""
        self.divergence = divergence

    def catch_up(self, round_index: int, step: int, *, stepped: bool) -> None:
        """Continue where the ranks are that are ahead.

        Args:
            round_index: Theirs.
            step: Their committed updates.
            stepped: Whether some rank steps in this round.
        """
        before, self.round_index = self.step, round_index
        # Where no rank steps now, the last of the steps that were missed tells of them.
        self.step = step if stepped or step <= before else step - 1
        self.stepped = stepped or step > before

    def wait_until(self, round_index: int) -> None:
        """Continue in the round of the ranks that were waited for."""
        self.round_index = round_index

    def commit(self, sent_bytes: int, *, gap: int, interval: int | None, staleness: int) -> Commit | None:
        """Close the update and return its record; None if the update did not step.

        Args:
            sent_bytes: That the exchange has sent so far.
            gap: Updates since replicas were last averaged.
            interval: Updates from one average to the next, where the strategy chooses.
            staleness: Of the strategy.
        """
        commit = None
        # A rank that steps alone does not ask the others: the step counts, whatever this rank contributed.
        if self.stepped or not self.reductions[-1].met:
            self.step += 1
            commit = Commit(
                reductions=tuple(self.reductions),
                gradient_norm=self.gradient_norm,
                learning_rates=tuple(map(learning_rate, self.hyperparameters)),
                round_index=self.round_index - 1,
                lane_seconds=self.lane_seconds,
                sent_bytes=sent_bytes - self.bytes_before,
                incidents=tuple(self.incidents),
                gap=gap,
                interval=interval,
                divergence=self.divergence,
                staleness=staleness,
            )
            self.incidents = []
        self.begin_update(sent_bytes)
        return commit

    def begin_again(self, step: int, round_index: int) -> None:
        """Continue after so many updates and rounds."""
        self.step, self.round_index = step, round_index

    # For guards

    def note(self, incidents: Iterable[Incident]) -> None:
        """Keep incidents until an update reports them."""
        self.incidents += incidents

    def take_incidents(self) -> tuple[Incident, ...]:
        """Return the incidents that are not reported yet, and forget them."""
        incidents, self.incidents = tuple(self.incidents), []
        return incidents

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Remember the versions of named tensors that no step writes."""
        self.versions = {name: tensor._version for name, tensor in tensors}

    def accept(self, name: str, tensor: Tensor) -> None:
        """Take the present value of one of them, which is equal on all ranks, for what it should be."""
        if name in self.versions:
            self.versions[name] = tensor._version


@dataclasses.dataclass(frozen=True, slots=True)
class Landing:
    """The result of one round."""

    buffer: GradientBuffer
    """Holds the values to install."""
    buffers: list[Tensor | None]
    """The snapshot of the model's buffers that the averages belong to."""
    shown: Shown
    reduction: Reduction
    at_boundary: bool
    """Whether this round ended an update."""
    commit: Commit | None
    """The committed update, if this round ended one; None too where an update had no weight and did not step."""


class Accounts:
    """Sums of one rank's compute lane from one update to the next, for the record of the later update.

    Args:
        now: Seconds on the runtime's clock.
        use_is_known: Whether to skip the check for parameters that no rank uses.
    """

    def __init__(self, now: float, *, use_is_known: bool) -> None:
        self._opened = now
        self.use_is_known = use_is_known

    def begin_again(self, steps: int, now: float) -> None:
        """Begin after a checkpoint of `steps` committed updates."""
        self._opened = now
        self.use_is_known = self.use_is_known or steps > 0

    def check_used(self, commit: Commit, layout: Layout, where: object) -> None:
        """Check once, at the first update that all ranks report, that each parameter was used by some rank.

        Raises:
            UnusedParameters: A parameter received no gradient on any rank.
        """
        is_empty = not any(any(r.report.used) for r in commit.reductions)  # all micro-batches were left out
        if is_empty or not commit.reductions[-1].met:
            return
        self.use_is_known = True
        used = [any(flags) for flags in zip(*(r.report.used for r in commit.reductions), strict=True)]
        unused = [slot.name for slot in layout.slots if not used[slot.index]]
        if unused:
            raise misuse.without_gradient(unused, where)

    def close(
        self, commit: Commit, step: int, now: float, skipped_rounds: int, exposed_seconds: float
    ) -> Update:
        """Return the record of the `step`-th update, and begin that of the next.

        Args:
            commit: Of this update.
            step: Its number.
            now: Seconds on the runtime's clock.
            skipped_rounds: Rounds skipped because something was not finite.
            exposed_seconds: In which the compute lane waited for the communication lane.
        """
        reports = tuple(r.report for r in commit.reductions if r.alone or not r.skipped)
        rounds = tuple(report.micro_batches for report in reports)
        loss_weight = sum(report.loss_weight for report in reports)
        update = Update(
            step=step,
            round_index=commit.round_index,
            samples=sum(report.samples for report in reports),
            fresh_samples=sum(report.fresh_samples for report in reports),
            weight=sum(report.weight for report in reports),
            loss=sum(report.loss_sum for report in reports) / loss_weight if loss_weight else math.nan,
            gradient_norm=commit.gradient_norm,
            staleness=min(commit.staleness, step - 1),
            micro_batches=tuple(map(sum, zip(*rounds, strict=True))),
            rounds=rounds,
            seconds=now - self._opened,
            lane_seconds=commit.lane_seconds,
            exposed_seconds=exposed_seconds,
            sent_bytes=commit.sent_bytes,
            learning_rates=commit.learning_rates,
            skipped_rounds=skipped_rounds,
            incidents=commit.incidents,
            gap=commit.gap,
            interval=commit.interval,
            noise=None if commit.divergence is None else commit.divergence.noise,
            divergence=None if commit.divergence is None else commit.divergence.mean_distance,
        )
        self._opened = now
        return update
