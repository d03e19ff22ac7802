"""One round: what a rank accumulates, what crosses to the communication lane, and what comes back.

    Accumulation    the round that accumulates, on the compute lane
    Round           a closed round; the communication lane owns all of it until the landing
    Reduction       the result of the exchange of its gradients
    Progress        where the job stands on the communication lane, and its update under way
    Landing         what comes back: values to show, and the update if one was committed

Note [Gradients of others]
    The gradients that count arrive during this job's own backward pass, in views of the buffer. The backward pass of
    another job (a generator's through its discriminator), or one that the user runs, reaches the same parameters. In
    that case a hook, which runs before a gradient is added, takes the view away, and PyTorch puts the gradient into a
    new tensor. That gradient is added (`collect`) or dropped (`discard`); otherwise the next backward pass of this job
    is an error.
"""

import dataclasses
import math
import zlib
from collections.abc import Sequence
from typing import Literal, Self

import torch
from torch import Tensor, nn

from stretto.engine.report import RankReport, RoundReport, Totals, Vote, settings_text
from stretto.errors import GradientsTouched, StepWithoutBackward, UnusedParameters
from stretto.flat import GradientBuffer, Layout
from stretto.optimizer import Hyperparameters, ReducedGradient
from stretto.records import Incident, Update

Shown = Literal["committed", "estimate"]
"""Which parameters the model holds."""


@dataclasses.dataclass(slots=True)
class Contribution:
    """What one rank has accumulated for one round, apart from the gradient itself."""

    used: bytearray
    """One byte per parameter slot, set by the backward hooks."""
    loss_sum: Tensor
    """Σ w·loss, a float64 scalar on the device; the lane reads it, so that no micro-batch waits for the host."""
    totals: Totals
    """The other totals."""
    count: int = 0
    """Micro-batches of any weight; quotas count these."""

    def with_loss(self) -> Totals:
        """Return the totals with the loss; waits for the device."""
        return dataclasses.replace(self.totals, loss_sum=float(self.loss_sum))


class Accumulation:
    """Accumulates the gradients of one rank, round after round.

    Args:
        parameters: In the layout's order.
        buffer: The buffer of the first round; gradients accumulate in it after `attach`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], buffer: GradientBuffer) -> None:
        self.parameters = parameters
        self._apart: set[int] = set()
        """Slots whose view was taken away; see Note [Gradients of others]."""
        self._is_own_backward = False
        self._factor = 1.0
        """What a gradient of this job's backward pass is multiplied by when it arrives."""
        self.begin(buffer)

    def begin(self, buffer: GradientBuffer) -> Self:
        """Begin a round in `buffer`; gradients accumulate in it after `attach`."""
        self.buffer = buffer
        self.contribution = Contribution(
            bytearray(len(buffer.layout.slots)),
            torch.zeros((), dtype=torch.float64, device=buffer.layout.sets[0].device),
            Totals(),
        )
        self.has_arrived = False
        """Whether gradients of a micro-batch have arrived that has not been counted yet."""
        self.is_left_out = False
        """Whether the round's gradients were dropped because the parameters were damaged."""
        return self

    def attach(self) -> None:
        """Zero the buffer and let gradients accumulate in it."""
        self.buffer.zero()
        self.attach_again()

    def attach_again(self) -> None:
        """Let gradients accumulate in the buffer without zeroing it."""
        self.buffer.attach(self.parameters, but=self._apart)

    def before_gradient(self, index: int, gradient: Tensor) -> Tensor | None:
        """Handle a gradient that is about to be added to a slot's `.grad`; see Note [Gradients of others].

        Returns:
            What is to be added instead; None to leave it as it is.
        """
        if self._is_own_backward:
            self.has_arrived = True
            self.contribution.used[index] = 1
            return None if self._factor == 1.0 else gradient * self._factor
        if self.parameters[index].grad is self.buffer.views[index]:
            self.parameters[index].grad = None
            self._apart.add(index)
        return None

    def backward(self, loss: Tensor, weight: float) -> None:
        """Add the gradient of `weight` times the loss; do nothing for a weight of zero."""
        if weight > 0:
            # A 16-bit loss or model would round the weight, which the division by Σ w does not: gradients take it
            # instead, as they arrive in the buffer's dtype.
            dtypes = (loss.dtype, *(flat.dtype for flat in self.buffer.layout.sets))
            is_narrow = weight != 1.0 and min(dtype.itemsize for dtype in dtypes) < torch.float32.itemsize
            self._is_own_backward, self._factor = True, weight if is_narrow else 1.0
            try:
                (loss if weight == 1.0 or is_narrow else loss * weight).backward()
            finally:
                self._is_own_backward = False
            self.buffer.remember()

    def count(self, weight: float, loss: Tensor | None, samples: int) -> None:
        """Count a micro-batch whose gradient has been added."""
        self.has_arrived = False
        self.contribution.count += 1
        if weight > 0:
            totals = self.contribution.totals
            totals.micro_batches += 1
            totals.weight += weight
            totals.samples += samples
            if loss is not None:
                self.contribution.loss_sum += loss.detach().to(torch.float64) * weight
                totals.loss_weight += weight

    def collect(self) -> None:
        """Add the gradients of backward passes that the caller has run."""
        for index in self._of_others():
            gradient = self.parameters[index].grad
            if gradient is not None:
                self.buffer.views[index].add_(gradient.detach())
                self.contribution.used[index] = 1
                self.has_arrived = True
        self.discard()
        self.buffer.remember()

    def discard(self) -> None:
        """Drop the gradients of backward passes that were not this job's."""
        for index in self._apart:
            self.parameters[index].grad = self.buffer.views[index]
        self._apart.clear()

    def check_arrived(self, weight: float, where: str) -> None:
        """Raise if no gradient has arrived for a micro-batch with a weight above zero.

        Raises:
            StepWithoutBackward: No gradient has arrived.
        """
        if weight > 0 and not self.has_arrived:
            raise StepWithoutBackward(
                f"{where}: no gradient has arrived since the last micro-batch was counted: run its backward pass "
                "first, or count it with weight=0 to contribute nothing"
            )

    def check_own(self, where: str) -> None:
        """Raise if `.grad` holds gradients of other backward passes, neither counted nor dropped.

        Raises:
            GradientsTouched: Names a parameter, and says what to call.
        """
        if found := self._of_others():
            name = self.buffer.layout.slots[found[0]].name
            raise GradientsTouched(
                f"{where}: {len(found)} parameters, {name!r} among them, hold gradients of a backward pass that was "
                "not this job's (another job's, or loss.backward()): drop them with parallel.discard(), or count "
                "them with parallel.count_micro_batch()"
            )
        self.discard()
        self.check_untouched(where)

    def check_untouched(self, where: str) -> None:
        """Raise if gradients were written outside backward passes, or replaced.

        Raises:
            GradientsTouched: Somebody wrote to the buffer, or a gradient is no longer the view it was given.
        """
        self.buffer.check_unwritten(where)
        self.buffer.check_attached(self.parameters, where, but=self._apart)

    def _of_others(self) -> list[int]:
        """Return the slots that hold a gradient of another backward pass, not those whose view was only taken away."""
        return [index for index in sorted(self._apart) if self.parameters[index].grad is not None]


@dataclasses.dataclass(slots=True)
class Round:
    """One closed round, which the compute lane hands to the communication lane."""

    buffer: GradientBuffer
    """Holds the gradients to send, then the values that come back."""
    contribution: Contribution
    statistics: list[Tensor]
    """Snapshot of the model's floating-point buffers, taken with the gradient."""
    changed: bytes
    """One byte per entry of `statistics`: changed on this rank since ranks last agreed on it?"""
    agreed: list[Tensor]
    """The values of these buffers that ranks last agreed on; nobody may write them."""
    vote: Vote
    hyperparameters: Hyperparameters
    reduction: "Reduction | None" = None
    """The result, if a checkpoint had the gradients exchanged before take-off."""
    incidents: Sequence[Incident] = ()
    """What was found on the compute lane since the last round was closed."""

    @property
    def is_finite(self) -> bool:
        """Whether all accumulated gradients are finite."""
        # A sum takes one pass and no memory; finite values may have one that is not.
        return all(bool(flat.sum().isfinite()) or bool(flat.isfinite().all()) for flat in self.buffer.flats)

    def report(self, *, finite: bool, norm_squared: float) -> RankReport:
        """Return this rank's part of the round report.

        Args:
            finite: Whether the gradients were finite when the round was handed over.
            norm_squared: Squared 2-norm of their sum, on the slices that this rank owns.
        """
        return RankReport(
            totals=self.contribution.with_loss(),
            gradient_is_finite=finite,
            norm_squared=norm_squared,
            vote=self.vote,
            settings=zlib.crc32(settings_text(self.hyperparameters).encode()),
            used=bytes(self.contribution.used),
            changed=self.changed,
        )


@dataclasses.dataclass(slots=True)
class Reduction:
    """The result of a round's exchange of gradients."""

    gradient: ReducedGradient
    report: RoundReport
    statistics: dict[int, Tensor]
    """Averages over ranks of the buffers that changed on any rank, by index."""
    skipped: bool
    """Whether the round is left out of the update because a loss or gradient was not finite."""
    alone: bool = False
    """Whether this rank used only its own gradients; if its round was left out, the report does not count it."""
    met: bool = True
    """Whether all ranks took part; otherwise the report holds this rank's record alone."""


@dataclasses.dataclass(slots=True)
class Progress:
    """Where the job stands on the communication lane, and the record of its update under way."""

    round_index: int = 0
    """Rounds before the present one; rounds that are left out count too."""
    step: int = 0
    """Committed updates."""
    incidents: list[Incident] = dataclasses.field(default_factory=list)
    """Incidents of all ranks that are not reported yet: an update that does not step reports nothing."""

    reductions: list[Reduction] = dataclasses.field(default_factory=list)
    """Results of the rounds of the update under way; the fields below are of this update too."""
    hyperparameters: Hyperparameters = dataclasses.field(default_factory=list)
    gradient_norm: float = math.nan
    """2-norm of the mean gradient, before clipping."""
    stepped: bool = False
    lane_seconds: float = 0.0
    bytes_before: int = 0
    """Bytes that the exchange had sent when the update began."""

    def begin_update(self, sent_bytes: int) -> None:
        """Forget the last update and begin the record of the next."""
        self.reductions = []
        self.gradient_norm = math.nan
        self.stepped = False
        self.lane_seconds = 0.0
        self.bytes_before = sent_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
    """What is known about a committed update when its last round ends."""

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


@dataclasses.dataclass(frozen=True, slots=True)
class Landing:
    """What one round brings back."""

    buffer: GradientBuffer
    """Holds the values to install."""
    statistics: list[Tensor]
    """The round's snapshot of the model's buffers."""
    shown: Shown
    reduction: Reduction
    at_boundary: bool
    """Whether this round ended an update."""
    commit: Commit | None
    """The committed update, if this round ended one; None too where an update had no weight and did not step."""


class Accounts:
    """What one rank's compute lane adds up from one update to the next, for the record of the later one.

    Args:
        staleness: Of the strategy, in committed updates.
        now: Seconds on the runtime's clock.
        use_is_known: Whether to skip the check for parameters that no rank uses.
    """

    def __init__(self, staleness: int, now: float, *, use_is_known: bool) -> None:
        self.exposed_seconds = 0.0
        """Seconds in which the compute lane waited for the communication lane."""
        self.skipped_rounds = 0
        """Rounds left out because something was not finite."""
        self._staleness = staleness
        self._opened = now
        self._use_is_known = use_is_known

    def begin_again(self, steps: int, now: float) -> None:
        """Reset all counts after a checkpoint of `steps` committed updates was loaded."""
        self.exposed_seconds, self.skipped_rounds, self._opened = 0.0, 0, now
        self._use_is_known = self._use_is_known or steps > 0

    def check_used(self, commit: Commit, layout: Layout, where: str) -> None:
        """Check once, at the first update that all ranks report, that each parameter was used by some rank.

        Raises:
            UnusedParameters: A parameter received no gradient on any rank.
        """
        if self._use_is_known or not commit.reductions[-1].met:
            return
        self._use_is_known = True
        used = [any(flags) for flags in zip(*(r.report.used for r in commit.reductions), strict=True)]
        unused = [slot.name for slot in layout.slots if not used[slot.index]]
        if unused:
            raise UnusedParameters(
                f"{where}: {len(unused)} parameters received no gradient on any rank, among them {unused[:3]}: "
                "freeze them, or accept that they are skipped as PyTorch skips them with Options(allow_unused=True)"
            )

    def close(self, commit: Commit, step: int, now: float) -> Update:
        """Return the record of the `step`-th update, from its `commit`, and begin to count for the next."""
        reports = [r.report for r in commit.reductions if r.alone or not r.skipped]
        rounds = tuple(report.micro_batches for report in reports)
        loss_weight = sum(report.loss_weight for report in reports)
        update = Update(
            step=step,
            round_index=commit.round_index,
            samples=sum(report.samples for report in reports),
            weight=sum(report.weight for report in reports),
            loss=sum(report.loss_sum for report in reports) / loss_weight if loss_weight else math.nan,
            gradient_norm=commit.gradient_norm,
            staleness=min(self._staleness, step - 1),
            micro_batches=tuple(map(sum, zip(*rounds, strict=True))),
            rounds=rounds,
            seconds=now - self._opened,
            lane_seconds=commit.lane_seconds,
            exposed_seconds=self.exposed_seconds,
            sent_bytes=commit.sent_bytes,
            learning_rates=commit.learning_rates,
            skipped_rounds=self.skipped_rounds,
            incidents=commit.incidents,
            gap=commit.gap,
            interval=commit.interval,
        )
        self._opened, self.exposed_seconds, self.skipped_rounds = now, 0.0, 0
        return update
