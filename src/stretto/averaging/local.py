"""Replicas that step alone, and whose fragments are sent for a mean or an outer step, and arrive now or some updates
later.

A worker steps alone: a rank, or the ranks of a node, which step alike (`stretto.averaging.worker`). A fragment is all
of the parameters or a part. Each rank reports at a departure everything that it has contributed since the one before,
and its share of the weight is its share of the mean.

Note [One fragment in progress]
    A fragment departs at the end of one update and arrives at the end of the same or of a later update, before the
    next departure. Its values are copied at the departure. If it may be in flight for longer than an update, a second
    lane sends it while the user's thread computes. There ranks gather the reports of the round of its departure,
    average the model's buffers and take the outer step. The arrival makes all of that known here: so at an arrival,
    and not at a departure, ranks learn of each other. No other code uses the group in between: other messages wait
    until the fragment has arrived (`_arrive`), which changes nothing that the model shows. Messages that do not pass
    through the replica, such as those for checkpoints, call `wait_for_transfers` before.

Note [The end of one rank]
    Only a rank itself knows that its data end, and a rank whose loader has a length knows it earlier than others. So
    its behaviour among the others may not depend on that: it steps, launches as planned and reports its last update
    as if more were to come, because the others may settle or save there. Only then, in an empty round, it says so,
    completes the fragment in flight, and waits for the others at their next departure. If none of them has a
    departure to make, all have reached the end, and all replicas are replaced by their mean. Anchor and velocity are
    not changed: should training continue, the next outer step finds the whole way from the anchor.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from stretto.averaging.mean import ReplicaMean, Whole
from stretto.averaging.outer import Fragment
from stretto.averaging.reports import alone, completed, empty_report, news, with_news
from stretto.averaging.weights import Weights
from stretto.averaging.worker import WITHOUT_DATA, Worker
from stretto.engine.accumulation import Totals
from stretto.engine.buffer_sync import BufferSync, at, average_buffers, moved, newest_at_rest
from stretto.engine.buffers import Buffer, changes_of
from stretto.engine.on_device import choose_runtime
from stretto.engine.options import Options
from stretto.engine.replica import Performer, Replica, are_finite
from stretto.engine.replica_sync import SyncState
from stretto.engine.report import Asks, RankReport, RoundReport, Vote
from stretto.engine.round import Round
from stretto.engine.runtime import Pending, Runtime, RuntimeOver
from stretto.errors import RanksDisagree, ReplicaNonFinite
from stretto.exchange import Exchange
from stretto.flat import Slices
from stretto.optimizer import ReducedGradient, ShardedOptimizer, squared_norm
from stretto.strategies.contract import Land, Launch, Look, Moment


@dataclasses.dataclass(slots=True)
class FragmentTransfer:
    """The results of one launch."""

    fragment: int
    has_left: bool
    """Whether a mean was computed: not if no rank has contributed since the fragment was last sent."""
    is_end: bool
    """Whether no rank had a launch to make."""
    round_index: int
    """The round of the launch."""
    report: RoundReport
    """The report of all rounds from the previous launch to this one."""
    snapshot: list[Buffer]
    """The model's buffers on this rank at the launch, including the arrivals of that round."""
    averages: dict[int, Buffer]
    """Their averages over ranks, by index."""


class LocalReplica(Replica):
    """One rank's replica in a job whose ranks step with their own gradients.

    Takes the arguments of `Replica`.

    Args:
        worker: The ranks that step this replica together.
        fragments: Number of fragments of the parameters for outer steps; 0 means that all parameters are averaged
            together.
    """

    def __init__(
        self,
        exchange: Exchange,
        sharded: ShardedOptimizer,
        *,
        worker: Worker,
        fragments: int,
        options: Options,
        **others: Any,
    ) -> None:
        super().__init__(exchange, sharded, options=options, steps_alone=True, **others)
        exchange.keep_gradients()
        self._worker = worker
        self._mean = ReplicaMean(exchange, sharded)
        self.has_anchor = fragments > 0
        self.fragments: Sequence[Fragment | Whole] = [Whole(exchange, self._mean)]
        self._side_lane = self.runtime
        if self.has_anchor:
            buckets = range(len(sharded.masters))
            self.fragments = parts = [
                Fragment(exchange, sharded, buckets[first::fragments], options.wire_of_changes)
                for first in range(fragments)
            ]
            anchors = [part.anchor_by_bucket for part in parts]
            # As good as the last mean: equal on all ranks.
            self._mean.measure_from([anchors[i % fragments][i // fragments] for i in buckets])
            self._side_lane = choose_runtime(exchange.group, sharded.masters[0].device, overlaps=True)
            self.runtime = SideLaneRuntime(self.runtime, self._side_lane)
        self._under_way: Pending[FragmentTransfer] | None = None
        self._arrived: FragmentTransfer | None = None
        self._last_left = self._left_at = 0  # which fragment has left last, and in which round
        self._weights = Weights(exchange.rank, exchange.world_size, len(self.fragments), len(sharded.masters))
        self._own_sums: Slices | None = None
        # Totals of its contributions since a fragment was last sent; and one byte per parameter slot: used since then?
        self._totals, self._used = Totals(), bytes(len(sharded.layout.slots))
        # Differences between the model's buffers and the agreed values in the last round.
        self._changed = b""
        # The vote of this rank, or of its node of shards, in that round.
        self._vote = Vote.GO_ON
        self._asks = Asks.NOTHING
        # Whether the data of this rank's worker had ended at its last gradients.
        self._is_without_data = False

    @property
    def performers(self) -> Mapping[type, Performer]:
        return {**super().performers, Look: self._look, Launch: self._launch, Land: self._land}

    def reduce(self, round: Round) -> None:
        """Use the gradients of this rank's worker, without a message to other workers."""
        exchange, progress = self.exchange, self.progress
        finite = are_finite(round.buffer.flats)  # before others' gradients are added
        flats = round.buffer.flats
        # The buffer itself, where it is as wide as the masters.
        if [flat.dtype for flat in flats] == [master.dtype for master in self.sharded.masters.flats]:
            sums = self.sharded.owned.cut(flats)
        else:
            sums = self._own_sums = self._own_sums or self.sharded.new_sums()
            for total, flat in zip(sums.flats, flats, strict=True):
                total.copy_(flat)
        self._worker.add_up(flats, sums)
        own = round.own_report(finite, squared_norm(sums))
        if round.contribution.count and own.vote in WITHOUT_DATA:
            own = dataclasses.replace(own, vote=Vote.GO_ON)  # see Note [The end of one rank]
        if self.node_group is not None:
            own = self.node_group.merge(own, lambda: round.settings(exchange.layout), self.where)
            exchange.take_account(self.node_group.exchange)
        else:
            own = completed(own)
        self._changed, self._vote, self._asks = own.changed, own.vote, own.asks
        report, norm_squared, self._is_without_data = self._worker.look_at(round, own, self.where)
        gradient = ReducedGradient(sums, report.weight, norm_squared, report.used)
        round.skipped = self.is_left_out(report, norm_squared, ReplicaNonFinite)
        if round.skipped:
            gradient.leave_out()
            round.buffers = round.sound
            own = empty_report(len(gradient.used), own.changed, progress.step)
            report = alone(own, exchange.rank, exchange.world_size)
        else:
            self._totals.add(own.totals)
            self._used = bytes(a | b for a, b in zip(self._used, own.used, strict=True))
        self.sync.diverge()
        round.gradient, round.report, round.is_reduced = gradient, report, True
        round.alone, round.met = True, False

    # Performers

    def _look(self, _: Look, round: Round | None) -> Moment:
        # A worker whose data have ended launches at once and waits there: only departures let ranks agree on an end.
        is_finishing = round is not None and self._is_without_data
        is_in_flight = self._under_way is not None or self._arrived is not None
        in_flight_rounds = self.progress.round_index - self._left_at if is_in_flight else None
        return Moment(
            self.progress.round_index, self.sync.gap, is_finishing, in_flight_rounds=in_flight_rounds
        )

    def _launch(self, effect: Launch, round: Round) -> bool:
        """Send a fragment; on a rank without data, wait for the other ranks and continue from their position."""
        buffers, changed = self._buffers(round)
        own = RankReport(
            totals=self._totals,
            used=self._used,
            vote=self._vote,
            asks=self._asks,
            settings=round.settings_digest(),
            changed=changed,
            round_index=self.progress.round_index,
            step=self.progress.step,
            stepped=self.progress.stepped,
        )
        self._totals, self._used = Totals(), bytes(len(self._used))
        self._last_left, self._left_at = effect.fragment, self.progress.round_index
        self.sync.fragment_launched()
        self.fragments[effect.fragment].load(effect, round.buffer.flats)
        self._under_way = self._side_lane.spawn(lambda: self._transfer(effect, own, round, buffers))
        if self._is_without_data:
            transfer = self._arrive()
            self._left_at = transfer.round_index
            self.progress.round_index = transfer.round_index
            if transfer.is_end:
                self._unite(effect, transfer, round)
                return False
        return True

    def _land(self, effect: Land, round: Round) -> None:
        """Install an arrived fragment, and read the other ranks' reports."""
        transfer, self._arrived = self._arrive(), None
        fragment = self.fragments[transfer.fragment]
        has_waited = transfer.round_index == self.progress.round_index
        if transfer.has_left:
            fragment.land(effect.mix)
            self._weights.land(transfer.fragment, keeps_own=effect.mix > 0)
        self.publish_masters(round)
        self.sync.fragment_landed(
            is_whole=not (effect.delay or effect.mix or len(self.fragments) > 1),
            states=fragment.averages_state if transfer.has_left else None,
        )
        if has_waited:
            self._catch_up(transfer.report)
        elif not self._is_without_data:
            self.progress.stepped = True  # like every step of a rank that does not ask the others
        self._tell(transfer, round, has_waited=has_waited)

    # What ranks do together, perhaps on the lane beside

    def _transfer(
        self, launch: Launch, own: RankReport, round: Round, buffers: list[Buffer]
    ) -> FragmentTransfer:
        fragment = self.fragments[launch.fragment]
        report = self._gather(fragment.exchange, own)
        rounds = report.records["round_index"]
        # A rank that came early has a schedule that is yet to be turned.
        if (rounds == rounds.max()).all() and not report.settings_agree:
            self.refuse_settings(round)
        averages = average_buffers(
            fragment.exchange, buffers, report.changed, report.micro_batches, round.first
        )
        is_end = all(vote in WITHOUT_DATA for vote in report.votes)
        share = None if is_end else self._weights.launch(launch.fragment, report)
        if share is not None:
            fragment.transfer(share, launch)
        return FragmentTransfer(
            fragment=launch.fragment,
            has_left=share is not None,
            is_end=is_end,
            round_index=int(rounds.max()),
            report=report,
            snapshot=buffers,
            averages=averages,
        )

    def _gather(self, exchange: Exchange, own: RankReport) -> RoundReport:
        """Gather reports of all rounds since the last departure.

        Raises:
            RanksDisagree: Ranks launch in different rounds, so their coins fall differently.
        """
        records = exchange.gather_bytes(*own.pack())
        report = RoundReport.unpack(records, len(own.used), len(own.changed))
        rounds = report.records["round_index"].tolist()
        is_without_data = [vote in WITHOUT_DATA for vote in report.votes]
        planned = {index for index, ended in zip(rounds, is_without_data, strict=True) if not ended}
        # A rank without data comes early and waits; one that comes late has passed an average by.
        if len(planned) > 1 or (planned and max(rounds) > max(planned)):
            found = ", ".join(
                f"rank {rank} settles or saves after round {~index}"
                if index < 0
                else f"rank {rank}{', which has no more data,' if ended else ''} averages in round {index}"
                for rank, (index, ended) in enumerate(zip(rounds, is_without_data, strict=True))
            )
            raise RanksDisagree(
                f"rank {self.rank}, after step {own.step}: expected all ranks to average, settle or save in "
                f"the same round, found that {found}: if the rate is a function, it must return the same on "
                "all ranks and depend on the round's index alone; settle and save only at updates that every "
                "rank reaches, up to the last update of the rank with the least data, or with gap 0"
            )
        return report

    # What ranks know of each other

    def _arrive(self) -> FragmentTransfer:
        """Wait for the fragment in flight, if there is one, and return the results of the last launch."""
        if self._under_way is not None:
            pending, self._under_way = self._under_way, None
            self._arrived = pending.result()
            for fragment in self.fragments:
                if fragment.exchange is not self.exchange:
                    self.exchange.take_account(fragment.exchange)
        return self._arrived  # type: ignore[return-value]  # who looks at it knows that there is one

    def _unite(self, launch: Launch, transfer: FragmentTransfer, round: Round) -> None:
        """Replace all replicas by their mean."""
        share = self._weights.share(transfer.report)
        if share is not None:
            self._mean.unite(share, round.buffer.flats, state=launch.state)
        self._arrived = None
        self._weights.unite(transfer.report)
        self.sync.mark_synced(states=None if share is None else launch.state)
        self.publish_masters(round)
        self._catch_up(transfer.report)
        self._tell(transfer, round, has_waited=True)

    def _catch_up(self, report: RoundReport) -> None:
        """Continue from the other ranks' position, on a rank that came early."""
        steps = report.records["step"]
        step = int(steps.max())
        # What the others have done is news, and reported; at the very end a step that nobody took is none.
        is_over = all(vote in WITHOUT_DATA for vote in report.votes)
        # A rank that came early has stepped in an earlier round than this one.
        has_stepped = int((steps + report.records["stepped"]).max()) > step
        self.progress.catch_up(
            int(report.records["round_index"].max()),
            step,
            stepped=has_stepped or (report.weight > 0 and not is_over),
        )

    def _tell(self, transfer: FragmentTransfer, round: Round, *, has_waited: bool) -> None:
        """Complete the round with the results of a launch in this or an earlier round."""
        earlier, ranks = round.report, self._worker.ranks
        report = news(transfer.report, earlier, ranks)
        round.report = with_news(earlier, report, ranks) if round.met else report
        round.buffer_means, round.met = {**round.buffer_means, **transfer.averages}, True
        # The model holds this round's buffers, or where the round is left out, what ranks agreed on before it.
        taken = round.buffers if has_waited or round.skipped else transfer.snapshot
        round.averaged = [
            taken[index] if index in transfer.averages else value
            for index, value in enumerate(round.snapshot)
        ]

    def _buffers(self, round: Round) -> tuple[list[Buffer], bytes]:
        """Return the model's buffers, including this round's arrivals, and a byte each: changed since the last
        average?
        """
        averages = round.buffer_means
        landed = moved(round.buffers, round.snapshot, averages, round.first)
        buffers: list[Buffer] = [landed.get(index, value) for index, value in enumerate(round.buffers)]
        if not averages and not round.skipped:
            return buffers, self._changed
        return buffers, changes_of([averages.get(i, value) for i, value in enumerate(round.agreed)], buffers)

    # At rest

    @property
    def name(self) -> str:
        """Name of this rank's own state in a checkpoint."""
        name = self._worker.name if self.node_group is None else super().name
        return f"{name}-of-{len(self.fragments)}-fragments" if self.has_anchor else name

    def anchors(self, *, waits: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the anchors by name, equal on all ranks; without waiting, only of fragments that are not in flight."""
        if waits:
            self._arrive()
        for index, fragment in self._at_rest():
            for number, anchor in enumerate(fragment.anchor):
                yield f"fragment {index}, set {number}", anchor

    def outer_state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield velocity, residuals and losses of fragments that are not in flight, each with its kind and its name."""
        for index, fragment in self._at_rest():
            kinds = {
                "velocity": fragment.velocity,
                "error memory": [*fragment.exchange.residuals, *fragment.lost],
            }
            for kind, tensors in kinds.items():
                for number, tensor in enumerate(tensors):
                    yield kind, f"fragment {index}, number {number}", tensor

    def gather_committed(self, flats: list[Tensor], buffer_sync: BufferSync) -> list[Buffer]:
        """Fill `flats` with the mean of all replicas; return the mean of the buffers."""
        self._arrive()
        if self.sync.is_synced:
            means = super().gather_committed(flats, buffer_sync)
        else:
            own = buffer_sync.copies
            report = self._look_around(changes_of(buffer_sync.agreed, own))
            self._mean.show(self._weights.share(report), flats)
            found = average_buffers(
                self.exchange, own, report.changed, report.micro_batches, buffer_sync.first
            )
            means = [found.get(index, value) for index, value in enumerate(buffer_sync.agreed)]
        if (transfer := self._arrived) is None:
            return means
        return newest_at_rest(self.exchange, buffer_sync, means, transfer.snapshot, transfer.averages)

    def agreed_optimizer(self, changed: bytes) -> ShardedOptimizer:
        """Return the optimizer, or, if replicas differ, a copy with their mean; all ranks must call it."""
        self._arrive()
        if self.sync.is_whole:
            return self.sharded
        report = self._look_around(changed)
        return self._mean.consensus(self._weights.share(report), self._weights.share_of_state(report))

    def wait_for_transfers(self) -> None:
        """Wait until the fragment in flight has arrived; it is installed later, when it is due."""
        self._arrive()

    def begin_again(self) -> None:
        """Use the current masters, equal on all ranks, as the last average and as the anchor; no fragment is in
        flight.
        """
        self._arrive()
        self._arrived = None
        self._totals, self._used = Totals(), bytes(len(self._used))
        self.sync.mark_synced(states=True)
        self._weights.begin_again()
        for fragment in self.fragments:
            fragment.begin_again()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's replica and its part of the outer optimizer, once it has trained.

        It refers to the job's own tensors.
        """
        self._arrive()
        if self.sync.is_whole:
            return {}
        replica = self._mean.state_dict()
        if self.has_anchor:
            replica["last_mean"] = None  # the anchor
        replica["since"] = {
            "used": self._used,
            "totals": dataclasses.asdict(self._totals),
            "rounds": self.sync.gap,
        }
        trip = None
        if (arrived := self._arrived) is not None:
            trip = {field.name: getattr(arrived, field.name) for field in dataclasses.fields(arrived)}
            trip["report"] = [record.tobytes() for record in arrived.report.records]
        replica["outer"] = {
            **self._weights.state_dict(),
            "fragments": [fragment.state_dict() for fragment in self.fragments],
            "is_apart": not self.sync.is_synced,
            "trip": trip,
        }
        return {"replica": replica}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace this rank's replica, if the state contains one: other kinds of replicas save only counts."""
        if "replica" not in state:
            return
        replica = state["replica"]
        self._mean.load_state_dict(replica)
        since = replica["since"]
        self._used, self._totals = bytes(since["used"]), Totals(**since["totals"])
        outer = replica["outer"]
        self._weights.load_state_dict(outer)
        for fragment, saved in zip(self.fragments, outer["fragments"], strict=True):
            fragment.load_state_dict(saved)
        self._arrived, self._left_at = None, 0
        if (trip := outer["trip"]) is not None:
            device = self.sharded.masters[0].device
            slots, buffers = len(self.sharded.layout.slots), len(trip["snapshot"])
            self._arrived = FragmentTransfer(
                **{
                    **trip,
                    "report": RoundReport.unpack(trip["report"], slots, buffers),
                    "snapshot": [at(value, device) for value in trip["snapshot"]],
                    "averages": {index: at(value, device) for index, value in trip["averages"].items()},
                }
            )
            self._left_at = self._arrived.round_index
        apart = SyncState.PARTIAL if self.has_anchor else SyncState.DIVERGING
        self.sync.resume(apart if outer["is_apart"] else SyncState.SYNCED, since["rounds"], states=False)

    def _at_rest(self) -> Iterator[tuple[int, Fragment]]:
        """Yield the fragments of outer steps that are not in flight."""
        for index, fragment in enumerate(self.fragments):
            is_away = self._under_way is not None and index == self._last_left
            if isinstance(fragment, Fragment) and not is_away:
                yield index, fragment

    def _look_around(self, changed: bytes) -> RoundReport:
        """Gather the reports for a mean that changes no state; all ranks must call it."""
        progress = self.progress
        # Below zero: it must not be taken for the average of a rank that is somewhere else.
        own = dataclasses.replace(
            empty_report(len(self.sharded.layout.slots), changed, progress.step),
            totals=self._totals,
            used=self._used,
            round_index=~progress.round_index,
        )
        return self._gather(self.exchange, own)


class SideLaneRuntime(RuntimeOver):
    """A runtime with a second lane, which sends a fragment while the user's thread continues to step.

    Args:
        runtime: The runtime of the job's rounds.
        side: Performs work on the second lane, one piece after the other.
    """

    def __init__(self, runtime: Runtime, side: Runtime) -> None:
        super().__init__(runtime)
        self.side = side

    def join(self) -> None:
        """Wait for both lanes, then end them."""
        super().join()
        self.side.join()

    def leave(self) -> None:
        """End both lanes after an error, without waiting."""
        super().leave()
        self.side.leave()
