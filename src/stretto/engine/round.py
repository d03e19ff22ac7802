"""The objects that pass between the two lanes, and their listeners.

Listener        receives the events of the compute lane
Round           a closed round; the communication lane owns all of it until it is installed
Progress        the position of the job on the communication lane, and its update in progress
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from torch import Tensor

from stretto.engine import misuse
from stretto.engine.accumulation import Contribution, GradientBuffer
from stretto.engine.buffers import remain_finite
from stretto.engine.early_reduction import EarlyReduction
from stretto.engine.report import Asks, Measured, RankReport, RoundReport, Vote, settings_text
from stretto.flat import Layout
from stretto.optimizer import Hyperparameters, ReducedGradient
from stretto.records import Incident, Update
from stretto.strategies.contract import Divergence

Shown = Literal["committed", "estimate"]
"""Which parameters the model holds."""


Weighed = tuple[Tensor, float, int]
"""A loss, its weight and its number of samples."""
LossFunction = Callable[[Any], "Tensor | Weighed"]
"""Runs the forward pass on a batch, which it must not change."""


def weighed(outcome: "Tensor | Weighed", weight: float, samples: int) -> Weighed:
    """Return a loss function's result; a loss alone is completed with `weight` and `samples`."""
    return misuse.read_weighed(outcome) if isinstance(outcome, tuple) else (outcome, weight, samples)


class Listener:
    """Receives the events of one rank's compute lane, for guards and saves; methods do nothing unless overridden."""

    def micro_batch_begins(self, loss_function: LossFunction, batch: object) -> None:
        """A micro-batch begins that can be run again; not called for micro-batches from `backward`."""

    def micro_batch_counted(self, weight: float, samples: int, fresh_samples: int) -> None:
        """A micro-batch has been counted, whether it can be run again or not."""

    def round_ends(self) -> Sequence[Incident]:
        """All micro-batches of a round are counted, and no parameters have been installed since the round began.

        Called once per round, on all ranks. The returned incidents are sent with the round.
        """
        return ()

    def round_closed(self) -> None:
        """The round can no longer change."""

    def install_begins(self) -> None:
        """A round's values are about to be installed; the lane is idle. Ranks call this at different times."""

    def installed(self, values: Sequence[Tensor]) -> None:
        """The model's parameters have been given `values`, in the layout's order."""

    def update_committed(self) -> None:
        """An update has been committed and is shown; both lanes are idle. All ranks call this, at the same update."""

    def committed_is_read(self) -> None:
        """Masters and optimizer state are about to be shown or saved; the lane is idle, and all ranks call this."""

    def began_again(self) -> None:
        """The job begins, continues from a checkpoint, or continues under another strategy."""

    def ended(self) -> Sequence[Incident]:
        """The job has ended without an error and is idle; all ranks call this. Return incidents that were not
        reported yet.
        """
        return ()


@dataclasses.dataclass(slots=True)
class Round:
    """One closed round, which the compute lane passes to the communication lane."""

    buffer: GradientBuffer
    """Holds the gradients to send, then the received values."""
    contribution: Contribution
    buffers: list[Tensor | None]
    """Snapshot of the model's floating-point buffers, taken with the gradient; None for a removed buffer."""
    changed: Tensor | None
    """How each entry of `buffers` differs on this rank from the agreed value; None without entries."""
    agreed: list[Tensor | None]
    """The agreed values of these buffers; no code may write them."""
    sound: list[Tensor | None]
    """The values of these buffers after the last round that counted; see `BufferSync.sound`."""
    first: Sequence[int]
    """Indices of buffers that follow rank 0."""
    vote: Vote = Vote.GO_ON
    hyperparameters: Hyperparameters = dataclasses.field(default_factory=list)
    asks: Asks = Asks.NOTHING
    trains: bytes = b""
    """By parameter: whether it required gradients when the hyperparameters were read; equal on all ranks."""
    incidents: Sequence[Incident] = ()
    """Incidents on the compute lane since the last round was closed."""
    early_reduction: EarlyReduction | None = None
    """The sum of its gradients, if it began during the last backward pass."""

    # Results, which the communication lane fills in; the compute lane reads them once it has waited for that lane.
    gradient: ReducedGradient = dataclasses.field(init=False)
    """Its sum over ranks."""
    report: RoundReport = dataclasses.field(init=False)
    buffer_means: dict[int, Tensor | None] = dataclasses.field(default_factory=dict)
    """Averages over ranks of the buffers that changed on any rank, by index; None for what ranks cannot average."""
    is_reduced: bool = False
    """Whether these three are there: a checkpoint has the gradients exchanged before the round is submitted."""
    skipped: bool = False
    """Whether the round is skipped of the update because a loss or gradient was not finite."""
    alone: bool = False
    """Whether this rank used only its own gradients; if its round was skipped, the report does not count it."""
    met: bool = True
    """Whether all ranks took part; otherwise the report holds this rank's record alone."""
    averaged: list[Tensor | None] | None = None
    """The buffers that `buffer_means` belong to, where they are not this round's: averages of an earlier round have
    come only now."""
    values: Sequence[Tensor] | None = None
    """The values for the model, one per parameter; None for the values in `buffer`."""
    shown: Shown = "committed"
    ends_update: bool = False
    update: Update | None = None
    """The committed update, if this round ended one; None also if the update had no weight and did not step."""
    used: bytes = b""
    """By parameter, whether any rank used it in the update that this round ended; empty where ranks have not met."""

    @property
    def snapshot(self) -> list[Tensor | None]:
        """The model's buffers that `buffer_means` were taken of on this rank."""
        return self.buffers if self.averaged is None else self.averaged

    def settings(self, layout: Layout) -> str:
        """Settings that must be equal on all ranks, as text."""
        slots = zip(layout.slots, self.trains, strict=True)
        frozen = [f"frozen: {slot.name}" for slot, trains in slots if not trains]
        return "\n".join([settings_text(self.hyperparameters), *frozen])

    def settings_digest(self) -> int:
        """Return a number that is equal on two ranks if `settings` are."""
        return zlib.crc32(settings_text(self.hyperparameters).encode() + self.trains)

    def own_report(self, finite: Tensor, norm_squared: Tensor, *, stale: bool = False) -> RankReport:
        """Return this rank's part of the round report; what only the device knows stays there.

        Args:
            finite: Whether the gradients were finite when the round was submitted, `()` bool.
            norm_squared: Squared 2-norm of the gradients' sum, on the slices that this rank owns.
            stale: Whether some gradients changed after they were sent.
        """
        changed = self.changed
        return RankReport(
            totals=self.contribution.totals,
            vote=self.vote,
            asks=self.asks,
            settings=self.settings_digest(),
            used=bytes(self.contribution.used),
            changed=bytes(len(self.buffers)),
            stale=stale,
            measured=Measured(
                loss_sum=self.contribution.loss_sum,
                gradient_is_finite=finite,
                norm_squared=norm_squared,
                changed=changed,
                # Since the last round that counted; some begin with an infinity.
                buffers_are_finite=None
                if changed is None
                else remain_finite(self.buffers, self.sound, changed),
            ),
        )


@dataclasses.dataclass(slots=True)
class Progress:
    """Counts on the communication lane, and the record of its update in progress."""

    round_index: int = 0
    """Number of rounds before the current one, including skipped rounds."""
    step: int = 0
    """Number of committed updates."""
    incidents: list[Incident] = dataclasses.field(default_factory=list)
    """Incidents of all ranks that were not reported yet: an update that does not step reports nothing."""
    versions: dict[str, int] = dataclasses.field(default_factory=dict)
    """Versions, at the start of the job, of the tensors that guards compare although no step writes them. A tensor
    with another version was written since, and may differ between ranks: for example the counts of `BatchNorm`, if
    ranks have unequal data."""

    rounds: list[Round] = dataclasses.field(default_factory=list)
    """Those of the update in progress, reduced; the fields below are of this update too."""
    hyperparameters: Hyperparameters = dataclasses.field(default_factory=list)
    gradient_norm: float = math.nan
    """2-norm of the mean gradient, before clipping."""
    stepped: bool = False
    divergence: Divergence | None = None
    """Result of its average, if that compared replicas."""
    lane_seconds: float = 0.0
    bytes_before: int = 0
    """Bytes that the exchange had sent when the update began."""

    skipped_rounds: int = 0
    """Number of rounds skipped since the last committed update."""

    def catch_up(self, round_index: int, step: int, *, stepped: bool) -> None:
        """Continue from the position of ranks that are ahead.

        Args:
            round_index: Their round.
            step: Their committed updates.
            stepped: Whether some rank steps in this round.
        """
        before, self.round_index = self.step, round_index
        # Where no rank steps now, the last of the steps that were missed tells of them.
        self.step = step if stepped or step <= before else step - 1
        self.stepped = stepped or step > before

    def begin_again(self, step: int, round_index: int) -> None:
        """Continue after so many updates and rounds."""
        self.step, self.round_index, self.skipped_rounds = step, round_index, 0

    # For guards

    def take_incidents(self) -> tuple[Incident, ...]:
        """Return the incidents that were not reported yet, and clear them."""
        incidents, self.incidents = tuple(self.incidents), []
        return incidents

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Record the versions of named tensors that no step writes."""
        self.versions = {name: tensor._version for name, tensor in tensors}

    def accept(self, name: str, tensor: Tensor) -> None:
        """Accept the current value of one of them, which is equal on all ranks, as its correct value."""
        if name in self.versions:
            self.versions[name] = tensor._version
