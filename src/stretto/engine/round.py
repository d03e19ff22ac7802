"""The objects that pass between the two lanes, and their listeners.

Listener        receives the events of the compute lane
Round           a closed round; the communication lane owns all of it until it is installed
Reduction       the summed gradients
Progress        the position of the job on the communication lane, and its update in progress
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    vote: Vote = Vote.GO_ON
    hyperparameters: Hyperparameters = dataclasses.field(default_factory=list)
    asks: Asks = Asks.NOTHING
    trains: bytes = b""
    """By parameter, whether it asked for gradients when the hyperparameters were read; the same on all ranks."""
    incidents: Sequence[Incident] = ()
    """Incidents on the compute lane since the last round was closed."""
    early_reduction: EarlyReduction | None = None
    """The sum of its gradients, if it began during the last backward pass."""

    # Results, which the communication lane fills in; the compute lane reads them once it has waited for that lane.
    reduction: "Reduction" = dataclasses.field(init=False)
    is_reduced: bool = False
    """Whether `reduction` is there: a checkpoint has the gradients exchanged before the round is submitted."""
    averaged: list[Tensor | None] | None = None
    """The buffers that the averages of `reduction` belong to, where they are not this round's: averages of an earlier
    round have come only now."""
    values: Sequence[Tensor] | None = None
    """What the model is to show, one per parameter; None for what `buffer` holds."""
    shown: Shown = "committed"
    ends_update: bool = False
    update: Update | None = None
    """The committed update, if this round ended one; None too where an update had no weight and did not step."""
    reductions: Sequence["Reduction"] = ()
    """Of all rounds of the update that this round ended."""

    def submit(self, vote: Vote, asks: Asks, hyperparameters: Hyperparameters, trains: bytes) -> None:
        """Take what this rank says in the report of the round, and the settings of its step."""
        self.vote, self.asks, self.hyperparameters, self.trains = vote, asks, hyperparameters, trains

    def reduced(self, reduction: "Reduction") -> None:
        """Take the result of the exchange of the gradients."""
        self.reduction, self.is_reduced, self.early_reduction = reduction, True, None

    @property
    def snapshot(self) -> list[Tensor | None]:
        """The model's buffers that the averages of `reduction` were taken of on this rank."""
        return self.buffers if self.averaged is None else self.averaged

    def take_snapshot(self, taken: Mapping[int, Tensor | None]) -> None:
        """Take buffers, by index, of which averages have come, instead of this round's."""
        self.averaged = [taken.get(index, value) for index, value in enumerate(self.snapshot)]

    def close_with(self, buffers: list[Tensor | None]) -> None:
        """Let the round be as if it had been closed with these buffers."""
        self.buffers = buffers

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
        # A sum is not finite where any value is not. One of finite values may overflow: extremes, of which one is not
        # finite where any value is not, take no memory either, and twice the time.
        extremes: list[Tensor] = []
        for flat in self.buffer.flats:
            if flat.device.type != "cpu" or not flat.sum().isfinite():
                extremes += [
                    extreme.to(self.buffer.flats[0].device, torch.float64) for extreme in flat.aminmax()
                ]
        return torch.stack(extremes).isfinite().all() if extremes else torch.tensor(True)

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
            stale: Whether some gradients changed after they were sent.
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

    skipped_rounds: int = 0
    """Since the last committed update."""

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
        self.skipped_rounds += reduction.skipped
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

    def commit(self, sent_bytes: int, *, gap: int, interval: int | None, staleness: int) -> Update | None:
        """Close the update and return its record, without the compute lane's seconds; None if it did not step.

        Args:
            sent_bytes: That the exchange has sent so far.
            gap: Updates since replicas were last averaged.
            interval: Updates from one average to the next, where the strategy chooses.
            staleness: Of the strategy.
        """
        update = None
        # A rank that steps alone does not ask the others: the step counts, whatever this rank contributed.
        if self.stepped or not self.reductions[-1].met:
            self.step += 1
            reports = [one.report for one in self.reductions if one.alone or not one.skipped]
            rounds = tuple(report.micro_batches for report in reports)
            loss_weight = sum(report.loss_weight for report in reports)
            update = Update(
                step=self.step,
                round_index=self.round_index - 1,
                samples=sum(report.samples for report in reports),
                fresh_samples=sum(report.fresh_samples for report in reports),
                weight=sum(report.weight for report in reports),
                loss=sum(report.loss_sum for report in reports) / loss_weight if loss_weight else math.nan,
                gradient_norm=self.gradient_norm,
                staleness=min(staleness, self.step - 1),
                micro_batches=tuple(map(sum, zip(*rounds, strict=True))),
                rounds=rounds,
                seconds=0.0,
                lane_seconds=self.lane_seconds,
                exposed_seconds=0.0,
                sent_bytes=sent_bytes - self.bytes_before,
                learning_rates=tuple(map(learning_rate, self.hyperparameters)),
                skipped_rounds=self.skipped_rounds,
                incidents=tuple(self.incidents),
                gap=gap,
                interval=interval,
                noise=None if self.divergence is None else self.divergence.noise,
                divergence=None if self.divergence is None else self.divergence.mean_distance,
            )
            self.incidents, self.skipped_rounds = [], 0
        self.begin_update(sent_bytes)
        return update

    def begin_again(self, step: int, round_index: int) -> None:
        """Continue after so many updates and rounds."""
        self.step, self.round_index, self.skipped_rounds = step, round_index, 0

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
