"""One rank's replica: it performs the effects that every strategy uses, and knows which values are equal on all ranks.

A performer is a function of an effect and the `Round` it belongs to. Its result is the answer to the effect. Replicas
that may differ (`stretto.averaging`) and guards (`stretto.guards`) add performers.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stretto.engine.accumulation import Contribution, GradientBuffer
from stretto.engine.agreement import agree
from stretto.engine.buffer_sync import BufferSync, average_buffers
from stretto.engine.buffers import Buffer
from stretto.engine.duplicate_data import DuplicateDataCheck
from stretto.engine.early_reduction import EarlyReduction
from stretto.engine.node_group import NodeGroup
from stretto.engine.options import Options
from stretto.engine.replica_sync import ReplicaSync
from stretto.engine.report import RoundReport
from stretto.engine.round import Progress, Round
from stretto.engine.runtime import Runtime
from stretto.engine.streams import SideStream
from stretto.errors import NonFinite
from stretto.exchange import FP32, Exchange, PlainWire, Publication
from stretto.exchange.transfer import Prepare, Transfers
from stretto.flat import Slices
from stretto.optimizer import ReducedGradient, ShardedOptimizer, squared_norm
from stretto.strategies.contract import (
    ACCUMULATIONS,
    Begin,
    Boundary,
    Effect,
    Gather,
    Land,
    Launch,
    Preview,
    Step,
)

_log = logging.getLogger("stretto")

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing, as in `torch.nn.utils.clip_grad_norm_`."""


Performer: TypeAlias = Callable[[Any, Any], Any]
"""Performs an effect of a `Round`; without one (None), it comes before the next gradients and may run while they
accumulate."""
NEED_ROUND = (*ACCUMULATIONS, Step, Preview, Gather, Boundary, Launch, Land)
"""Effects that cannot come before the first gradient of an update."""


class Replica:
    """One rank's replica, in a job whose ranks hold the same values, or shards of the same values.

    Args:
        exchange: The job's exchange.
        sharded: This rank's masters and optimizer.
        replicated: Whether every rank holds the whole optimizer.
        options: Say how to clip, and what to do with rounds that are not finite.
        runtime: Charged for the time of steps and previews.
        progress: Shared with the communication lane.
        overlaps_backward: Whether gradients may be sent before their round is closed.
        in_place: Whether no other code reads a round's gradients and values in flight, so they need no copy if this
            rank holds all of them.
        steps_alone: Whether ranks step without asking the others, and may be at different rounds.
        node_group: The ranks of this node, where each holds a shard of the replica.
    """

    interval: int | None = None
    """Updates between two averages, if the strategy chooses the number."""
    has_anchor = False
    """Whether ranks take outer steps from an anchor that does not depend on their replicas."""

    def __init__(
        self,
        exchange: Exchange,
        sharded: ShardedOptimizer,
        *,
        replicated: bool,
        options: Options,
        runtime: Runtime,
        progress: Progress,
        overlaps_backward: bool,
        in_place: bool,
        steps_alone: bool = False,
        node_group: NodeGroup | None = None,
    ) -> None:
        self.exchange = exchange
        self.node_group = node_group
        self.rank = exchange.rank if node_group is None else node_group.rank  # by which messages call it
        self.sync = ReplicaSync(steps_alone=steps_alone)
        self.sharded = sharded
        self.replicated = replicated
        self.progress = progress
        self.runtime = runtime
        self.overlaps_backward = overlaps_backward
        """Whether gradients may be sent before their round is closed (`stretto.engine.early_accumulation`)."""
        device = exchange.layout.sets[0].device
        self._side = SideStream(device) if exchange.orders_streams and device.type == "cuda" else None
        """The stream of an early reduction during the backward pass."""
        self._options = options
        looks = self.rank == 0 and exchange.world_size > 1
        # Looks at the first rounds.
        self._duplicate_data = DuplicateDataCheck(exchange.world_size) if looks else None
        changes = options.wire_of_changes
        self._draws = exchange.wire.is_unbiased or changes.is_unbiased
        self._publication = Publication(exchange, FP32 if replicated else changes)
        self._publish = self._publication.gathering()
        self._gather_aside = self._publication.gathering(keeps=False)
        # Sums of finished updates are used again: fresh memory pages would cost more than the arithmetic.
        self._spare_sums: list[Slices] = []
        self._lent_sums: list[Slices] = []
        holds_all = in_place and (replicated or exchange.world_size == 1)
        shows_all = holds_all and all(self.shows_masters(flat.dtype) for flat in exchange.layout.sets)
        self._whole_masters = exchange.layout.views(sharded.masters.flats) if shows_all else None
        """Views of the masters by parameter, which models copy directly; None if masters are sent or rounded."""
        self._sums_are_own = (
            holds_all
            and exchange.world_size == 1
            and all(
                isinstance(sent, PlainWire) and sent.dtype == master.dtype
                for sent, master in zip(exchange.contributed, sharded.masters, strict=True)
            )
        )
        """Whether the buffer of a round's gradients already holds their sum."""

    @property
    def performers(self) -> Mapping[type, Performer]:
        """The performer of each kind of effect."""
        return {
            **dict.fromkeys(ACCUMULATIONS, self.take_gradient),
            Step: self.step,
            Preview: self.preview,
            Gather: self.gather,
            Boundary: self.end_update,
            Begin: lambda *_: None,
        }

    @property
    def where(self) -> str:
        """Rank and step, for messages."""
        return f"rank {self.rank}, after step {self.progress.step}"

    def take_gradient(self, effect: Effect, round: Round) -> ReducedGradient:
        """Reduce the gradients of the round, unless a checkpoint has had them reduced already."""
        if not round.is_reduced:
            self.reduce(round)
        progress = self.progress
        progress.rounds.append(round)
        progress.skipped_rounds += round.skipped
        progress.hyperparameters = round.hyperparameters
        return round.gradient

    def reduce(self, round: Round) -> None:
        """Exchange the gradients of `round` and the reports on it; all ranks must call it, unless ranks step alone."""
        while True:
            finite = are_finite(round.buffer.flats)  # the exchange may leave anything in them
            sums, is_stale = self.sum_up(round)
            own = round.own_report(finite, squared_norm(sums), stale=is_stale)
            if self.node_group is not None:
                own = self.node_group.merge(own, lambda: round.settings(self.exchange.layout), self.where)
            # The host waits here, for the first time in this round, with everything on its way.
            records = self.exchange.gather_bytes(*own.pack())
            report = RoundReport.unpack(records, len(own.used), len(own.changed))
            if not report.stale:
                break
            self._stop_hiding(report.stale)  # and sum again: all gradients are there now
        # All ranks hold the same report, so they raise or continue alike, without another message.
        if not report.settings_agree:
            self.refuse_settings(round)
        if self._duplicate_data is not None and not self._duplicate_data.look(report.records, self.where):
            self._duplicate_data = None
        self.fill(round, sums, report)
        if self.is_left_out(report, round.gradient.norm_squared or 0.0, NonFinite):
            self.skip(round)
            return
        # Not after a skipped round: no owner has used what was sent, so the residuals from before are still owed.
        if self.exchange.feedback is not None:
            self.exchange.commit_residuals()
        if any(report.changed):
            round.buffer_means = average_buffers(
                self.exchange, round.buffers, report.changed, report.micro_batches, round.first
            )

    def fill(self, round: Round, sums: Slices, report: RoundReport) -> None:
        """Give a round the results of an exchange, or of one that a checkpoint has saved; it takes over `sums`."""
        norm_squared = report.norm_squared(replicated=self.replicated)
        round.gradient = ReducedGradient(sums, report.weight, norm_squared, report.used)
        round.report, round.is_reduced, round.early_reduction = report, True, None

    def skip(self, round: Round) -> None:
        """Leave the gradients of a round out of its update."""
        round.skipped = True
        round.gradient.leave_out()
        # A strategy may add this gradient to another, and an infinity would stay in the sum.
        for total in round.gradient.sums.flats:
            total.zero_()

    def sum_up(self, round: Round) -> tuple[Slices, bool]:
        """Sum the gradients of `round` over ranks; return the sums, and whether any changed after they were sent."""
        if self._sums_are_own:
            return self.sharded.owned.cut(round.buffer.flats), False
        if (early_reduction := round.early_reduction) is not None:
            round.early_reduction = None
            return early_reduction.finish(), early_reduction.is_stale
        transfers, sums, prepare = self._begin_sum(round.buffer, round.contribution)
        self.exchange.run(transfers, prepare)
        return sums, False

    def begin_early_reduction(self, buffer: GradientBuffer, contribution: Contribution) -> EarlyReduction:
        """Begin to sum a round's gradients over ranks; nothing is sent before the result continues.

        Args:
            buffer: The gradients; not changed while they may be sent early.
            contribution: Says which parameters are used, once the round is whole.
        """
        transfers, sums, prepare = self._begin_sum(buffer, contribution)
        exchange = self.exchange
        return EarlyReduction(
            transfers,
            sums,
            wait=exchange.follow,
            asks=not exchange.orders_streams,
            side=self._side,
            prepare=prepare,
        )

    def _begin_sum(
        self, buffer: GradientBuffer, contribution: Contribution
    ) -> tuple[Transfers, Slices, Prepare | None]:
        """Return the transfers, the sums that they compute, and the function that prepares a bucket."""
        # Lent until the update ends: a strategy may add a gradient to a later one and step with it then.
        sums = self._spare_sums.pop() if self._spare_sums else self.sharded.new_sums()
        self._lent_sums.append(sums)
        flats, feedback = buffer.flats, self.exchange.feedback
        # Random rounding is drawn from the round's index, so that a replay and every rank draw the same.
        if self._draws:
            self.exchange.begin_round(self.progress.round_index)
        if feedback is not None:
            flats = feedback.begin(flats, contribution.used, keeps=self.overlaps_backward)
        transfers = self.exchange.summing(flats, sums, whole=self.replicated)
        return transfers, sums, None if feedback is None else feedback.add

    def _stop_hiding(self, ranks: list[int]) -> None:
        """Send no more gradients early: some rank's gradients changed after they were sent."""
        self.overlaps_backward = False
        self._spare_sums.append(self._lent_sums.pop())
        _log.info(
            "%s: gradients changed on %s %s after Stretto had sent them (a parameter with several gradients "
            "in one backward pass, a hook that writes gradients, or a guard that repaired the model): "
            "Stretto sums the round again, and no longer overlaps reductions in this job",
            self.where,
            "ranks" if self.node_group is None else "nodes",
            ranks,
        )

    def step(self, effect: Step, round: Round) -> None:
        """Commit one optimizer step if the gradient has any weight, and publish the masters."""
        gradient, norm, clip = self._merged(effect.gradient)
        if gradient.weight > 0:
            self.sharded.step(gradient, self.progress.hyperparameters, clip)
            if self.runtime.virtual_time is not None:
                self.runtime.virtual_time.charge("step", self.sharded.numel)
            self.progress.stepped, self.progress.gradient_norm = True, norm
        self.publish_masters(round)

    def publish_masters(self, round: Round) -> None:
        """Publish the masters to the models; a rank that does not hold all of them publishes its own."""
        round.values, round.shown = self._whole_masters, "committed"
        if self._whole_masters is None:
            self.sharded.publish(round.buffer.flats)

    def preview(self, effect: Preview, round: Round) -> None:
        """Publish the parameters that one more step would give."""
        gradient, _, clip = self._merged(effect.gradient)
        if gradient.weight == 0:
            self.publish_masters(round)
            return
        self.sharded.preview(gradient, self.progress.hyperparameters, clip, round.buffer.flats)
        if self.runtime.virtual_time is not None:
            self.runtime.virtual_time.charge("preview", self.sharded.numel)
        round.values, round.shown = None, "estimate"

    def gather(self, effect: Gather, round: Round) -> None:
        """Replace every rank's buffer by the published shards of all ranks."""
        if self._draws:  # also here: the sums of this round may come from a checkpoint
            self.exchange.begin_round(self.progress.round_index)
        if round.values is None:
            self._publish(round.buffer.flats)

    def end_update(self, effect: Boundary, round: Round) -> None:
        """Mark the end of an update, and keep its sums for the next one."""
        round.ends_update = True
        # No step of a later update uses them: the next rounds may write them.
        self._spare_sums += self._lent_sums
        self._lent_sums = []

    def models_show(self, values: Sequence[Tensor]) -> None:
        """Publish from now on to models that show `values`, one per parameter, equal on all ranks."""
        self._publication.begin(values)

    def refuse_settings(self, round: Round) -> None:
        """Raise `RanksDisagree`, which shows the difference between the ranks' hyperparameters; all ranks must call
        it.
        """
        agree(self.exchange, {"optimizer settings": round.settings(self.exchange.layout)}, self.where)

    def is_left_out(self, report: RoundReport, norm_squared: float, kind: type[NonFinite]) -> bool:
        """Return whether to skip this round; the answer is equal on every rank that took part."""
        found = report.not_finite(norm_squared, "ranks" if self.node_group is None else "nodes")
        if found is not None and self._options.nonfinite == "raise":
            raise kind(
                f"rank {self.rank}, step {self.progress.step + 1}, round {self.progress.round_index}: "
                f"{found}; lower the learning rate, or skip such rounds with Options(nonfinite='skip')"
            )
        return found is not None

    def _merged(self, gradient: object) -> tuple[ReducedGradient, float, float]:
        """Return a strategy's gradient as one sum, the 2-norm of its mean, and the factor that clips that to the limit.

        The norm of a sum of two reductions is computed over ranks here.
        """
        if not isinstance(gradient, ReducedGradient):
            raise TypeError(
                f"a strategy must pass on the gradient that it received, not {type(gradient).__name__}"
            )
        gradient.merge()
        if gradient.weight == 0:
            return gradient, math.nan, 1.0
        norm_squared = gradient.norm_squared
        if norm_squared is None:
            own = squared_norm(gradient.sums)
            if self.node_group is not None:
                own = self.node_group.total(own)
            if self.replicated:
                norm_squared = float(own)
            else:
                norms = self.exchange.gather_bytes(bytes(own.nbytes), [(0, own.view(1).view(torch.int8))])
                norm_squared = sum(np.frombuffer(b"".join(norms)).tolist())
            gradient.norm_squared = norm_squared  # a preview and a step may share it
        norm, limit = math.sqrt(norm_squared) / gradient.weight, self._options.clip_norm
        return gradient, norm, 1.0 if limit is None else min(1.0, limit / (norm + CLIP_EPSILON))

    # At rest

    @property
    def name(self) -> str:
        """Name of this rank's own state in a checkpoint, for the ranks that could load it."""
        return str(self.rank)

    def anchors(self, *, waits: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield, by name, the values other than masters that are equal on all ranks.

        Values in flight are skipped, or awaited.
        """
        for index, anchor in enumerate(self._publication.anchor):
            yield f"set {index}", anchor

    def outer_state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield, with kind and name, this rank's state for steps of these values, unless it is changing now."""
        yield from ()

    def gather_committed(self, flats: list[Tensor], buffer_sync: BufferSync) -> list[Buffer]:
        """Fill `flats`, one tensor per flat set, with the committed parameters; all ranks must call it, between
        updates.

        If replicas differ, the committed parameters are their mean, and the replicas do not change.

        Returns:
            The model's floating-point buffers that belong to these parameters.
        """
        self.sharded.publish(flats)
        if not self.replicated:
            if self._draws:
                self.exchange.begin_round(self.progress.round_index)
            self._gather_aside(flats)
        return buffer_sync.agreed

    def agreed_optimizer(self, changed: bytes) -> ShardedOptimizer:
        """Return the optimizer; if replicas differ, a copy with their mean. All ranks must call it.

        Args:
            changed: One byte per floating-point buffer: changed on this rank since ranks last agreed on it?
        """
        return self.sharded

    def wait_for_transfers(self) -> None:
        """Wait for transfers outside the rounds, if any, so that the group is free for other messages."""

    def begin_again(self) -> None:
        """Declare the current masters, equal on all ranks, as agreed."""

    def shows_masters(self, storage: torch.dtype) -> bool:
        """Return whether models show committed masters exactly, if they store parameters in this dtype."""
        master, wire = torch.promote_types(storage, torch.float32), self._options.wire_of_changes
        if self.replicated:
            return storage == master
        return isinstance(wire, PlainWire) and wire.of(storage).dtype == master

    def differs(self, parameters: Sequence[Tensor]) -> str | None:
        """Return the name of a parameter that differs from this rank's masters, if models show them exactly; or
        None.
        """
        for piece in self.sharded.pieces:
            parameter = parameters[piece.slot.index]
            if not self.shows_masters(parameter.dtype):
                continue
            own = parameter.detach().reshape(-1)[piece.offset : piece.offset + piece.numel]
            if not torch.equal(own, self.sharded.values(self.sharded.masters, piece).reshape(-1)):
                return piece.slot.name
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own state for a bit-identical continuation, without what all ranks agree on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned on the same rank of the same layout."""


def are_finite(flats: Sequence[Tensor]) -> Tensor:
    """Return whether all gradients are finite, `()` bool, without waiting for the device."""
    # A sum is not finite where any value is not. One of finite values may overflow: extremes, of which one is not
    # finite where any value is not, take no memory either, and twice the time.
    extremes: list[Tensor] = []
    for flat in flats:
        if flat.device.type != "cpu" or not flat.sum().isfinite():
            extremes += [extreme.to(flats[0].device, torch.float64) for extreme in flat.aminmax()]
    return torch.stack(extremes).isfinite().all() if extremes else torch.tensor(True)
