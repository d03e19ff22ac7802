"""Replicas that step alone: what a rank has done since the last average, and the average of all replicas.

What is alone is a worker: a rank, or the ranks of a node, which step alike (`stretto.averaging.worker`).

At an average all ranks take part as if the round had been one of all: each reports everything that it has contributed
since the last average, and its share of the weight is its share of the mean (`stretto.averaging.mean`).

Note [The end of one rank]
    That its data end is known to a rank alone, and one whose loader has a length knows it earlier than others. So
    nothing that it does among the others may follow from that: it steps, averages as planned and reports its last
    update as if more were to come, because the others may settle or save there. Only then, in a round of its own that
    holds nothing, it says so, and waits for the others at their next average.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from stretto.averaging.mean import ReplicaMean, Share
from stretto.averaging.worker import WITHOUT_DATA, Worker, WorkersRound
from stretto.engine.accumulation import Totals
from stretto.engine.agreed import AgreedReplica, Alike
from stretto.engine.buffers import Buffer, changes_of
from stretto.engine.replica import Flight, Performer
from stretto.engine.report import RankReport, RoundReport, Vote
from stretto.engine.round import Reduction, Round
from stretto.engine.statistics import Statistics, average_statistics
from stretto.errors import RanksDisagree, ReplicaNonFinite
from stretto.exchange import Exchange
from stretto.flat import Slices
from stretto.optimizer import ReducedGradient, ShardedOptimizer
from stretto.strategies.contract import Average, Look, Moment


@dataclasses.dataclass(slots=True)
class _SinceAverage:
    """What this rank has contributed since replicas were last averaged."""

    used: bytearray
    """One byte per parameter slot: used since then?"""
    totals: Totals = dataclasses.field(default_factory=Totals)


class LocalReplica(AgreedReplica):
    """One rank's replica among others that step with gradients of their own.

    Args are those of `AgreedReplica`, and:
        worker: The ranks that step this replica alike.
    """

    def __init__(
        self, exchange: Exchange, sharded: ShardedOptimizer, *, worker: Worker, **others: Any
    ) -> None:
        super().__init__(exchange, sharded, steps_alone=True, **others)
        exchange.keep_gradients()
        self._worker = worker
        self._mean = ReplicaMean(exchange, sharded)
        self._own_sums: Slices | None = None
        self._since = self._nothing_yet()
        self._changed = b""
        """How the model's buffers differed from what ranks had agreed on in that round."""
        self._vote = Vote.GO_ON
        """Of this rank, or of a node of shards, in that round."""
        self._known: WorkersRound
        """Of the round whose gradients came last."""

    @property
    def performers(self) -> Mapping[type, Performer]:
        """Performers by effect."""
        return {**super().performers, Look: self._look, Average: self._average}

    @property
    def name(self) -> str:
        """Of this rank's own state in a checkpoint."""
        return self._worker.name if self.within is None else super().name

    def reduce(self, round: Round) -> Reduction:
        """Take the gradients of this rank's worker; nobody else is asked."""
        exchange, progress = self.exchange, self.progress
        finite = round.look_at_gradients()  # before others' gradients are added
        flats, feedback = round.buffer.flats, exchange.feedback
        if feedback is not None:  # an earlier wire owes
            flats = feedback.begin(flats, round.contribution.used)
            for index in range(len(exchange.layout.buckets)):
                feedback.add(index)
        sums = self._own_gradient(flats)
        self._worker.add_up(flats, sums)
        measured = round.measured(finite, ReducedGradient(sums, 0.0, 0.0, b"").measure())
        own = round.report()
        if round.contribution.count and own.vote in WITHOUT_DATA:
            own = dataclasses.replace(own, vote=Vote.GO_ON)  # see Note [The end of one rank]
        if self.within is not None:
            own = self.within.merge(own, own.places(measured), round.hyperparameters, self.where)
            exchange.take_account(self.within.exchange)
        else:
            own = own.completed(measured)
        self._changed, self._vote = own.changed, own.vote
        self._known = known = self._worker.look_at(round, own, self.where)
        report, norm_squared = known.report, known.norm_squared
        gradient = ReducedGradient(sums, report.weight, norm_squared, report.used)
        skipped = self.is_left_out(report, norm_squared, ReplicaNonFinite)
        if skipped:
            gradient.leave_out()
            round.leave_out_buffers()
            own = empty_report(len(gradient.used), own.changed, progress.step)
            report = RoundReport.alone(own, exchange.rank, exchange.world_size)
        else:
            exchange.settle()
            self._since.totals.add(own.totals)
            self._since.used = bytearray(a | b for a, b in zip(self._since.used, own.used, strict=True))
        self.agreement.drift()
        return Reduction(gradient, report, {}, skipped, alone=True, met=False)

    def gather_committed(self, flats: list[Tensor], statistics: Statistics) -> list[Buffer]:
        """Fill `flats` with the mean of all replicas; return the mean of the buffers."""
        if self.agreement.is_united:
            return super().gather_committed(flats, statistics)
        own = statistics.copies
        report = self._look_around(changes_of(statistics.agreed, own))
        self._mean.show(self._share(report), flats)
        means = average_statistics(self.exchange, own, report.changed, report.micro_batches, statistics.first)
        return [means.get(index, value) for index, value in enumerate(statistics.agreed)]

    def agreed_optimizer(self, changed: bytes) -> ShardedOptimizer:
        """Return the optimizer, or where replicas differ a copy that holds their mean; all ranks must call."""
        if self.agreement.is_whole:
            return self.sharded
        report = self._look_around(changed)
        return self._mean.consensus(self._share(report), self._share_of_state(report))

    def begin_again(self) -> None:
        """Take the present masters, alike on all ranks, for an average."""
        self._since = self._nothing_yet()
        self.agreement.unite(states=True)
        self._mean.begin_again()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's replica where replicas differ; it refers to the job's own tensors."""
        if self.agreement.is_whole:
            return {}
        since = {
            **dataclasses.asdict(self._since),
            "used": bytes(self._since.used),
            "rounds": self.agreement.gap,
        }
        return {"replica": {**self._mean.state_dict(), "since": since}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put a replica in the place of this rank's, if the state holds one: other kinds save counts alone."""
        if "replica" not in state:
            return
        self._mean.load_state_dict(state["replica"])
        since = state["replica"]["since"]
        self._since = _SinceAverage(bytearray(since["used"]), Totals(**since["totals"]))
        gap = since["rounds"]
        self.agreement.resume(Alike.DRIFTING if gap else Alike.UNITED, gap, states=False)

    def _own_gradient(self, flats: Sequence[Tensor]) -> Slices:
        """Return this rank's gradients: the buffer itself, where it is as wide as the masters."""
        if [flat.dtype for flat in flats] == [master.dtype for master in self.sharded.masters.flats]:
            return self.sharded.owned.cut(flats)
        self._own_sums = self._own_sums or self.sharded.new_sums()
        for total, flat in zip(self._own_sums.flats, flats, strict=True):
            total.copy_(flat)
        return self._own_sums

    def _look(self, _: Look, flight: Flight | None) -> Moment:
        # A worker whose data have ended averages at once and waits there: only averages let ranks agree on an end.
        drains = flight is not None and self._known.is_without_data
        return Moment(self.progress.round_index, self.agreement.gap, drains)

    def _average(self, effect: Average, flight: Flight | None) -> None:
        """Bring the replicas together; the round ends as if all ranks had taken part in it."""
        if flight is None:
            raise TypeError("a strategy must step with AllReduce to average ahead of its gradients")
        report = self._meet(self._own_report(flight.round))
        self._check_settings(report, flight.round)
        statistics = average_statistics(
            self.exchange, flight.round.statistics, report.changed, report.micro_batches, flight.round.first
        )
        share = report.share(self.exchange.rank)
        states_are_alike = self.agreement.states_are_alike if share is None else effect.state
        if share is not None:
            self._mean.unite(share, flight.round.buffer.flats, state=effect.state)
        self.begin_again()
        self.agreement.unite(states=states_are_alike)
        self.sharded.publish(flight.round.buffer.flats)
        flight.reduction.meet(report.news(flight.reduction.report, self._worker.ranks), statistics)
        self._catch_up(report)

    def _own_report(self, round: Round) -> RankReport:
        """Return what this rank reports of its last round at an average."""
        return dataclasses.replace(
            round.report(),
            vote=self._vote,
            changed=self._changed,
            round_index=self.progress.round_index,
            step=self.progress.step,
            stepped=self.progress.stepped,
        )

    def _check_settings(self, report: RoundReport, round: Round) -> None:
        rounds = report.records["round_index"]
        # A rank that came early has a schedule that is yet to be turned.
        if (rounds == rounds.max()).all() and not report.settings_agree:
            self.refuse_settings(round)

    def _catch_up(self, report: RoundReport) -> None:
        """Take over where the others are, on a rank that came early."""
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

    def _meet(self, own: RankReport) -> RoundReport:
        """Gather the reports of an average.

        Args:
            own: What this rank reports of its last round; the totals since the last average take the place of that
                round's.

        Raises:
            RanksDisagree: Ranks average in different rounds, so their coins fall differently.
        """
        own = self._since_average(own)
        records = self.exchange.gather_bytes(RoundReport.pack(own))
        report = RoundReport.unpack(records, len(own.used), len(own.changed))
        self._check_rounds(report, [vote not in WITHOUT_DATA for vote in report.votes], own.step)
        return report

    def _since_average(self, own: RankReport) -> RankReport:
        """Return a report of all rounds since the last average."""
        return dataclasses.replace(own, totals=self._since.totals, used=bytes(self._since.used))

    def _check_rounds(self, report: RoundReport, is_due: Sequence[bool], step: int) -> None:
        """Check that all ranks that average as planned do so in the same round."""
        rounds = report.records["round_index"].tolist()
        planned = {index for index, due in zip(rounds, is_due, strict=True) if due}
        # A rank without data comes early and waits; one that comes late has passed an average by.
        if len(planned) > 1 or (planned and max(rounds) > max(planned)):
            is_without_data = [vote in WITHOUT_DATA for vote in report.votes]
            found = ", ".join(map(_whereabouts, range(len(rounds)), rounds, is_without_data))
            raise RanksDisagree(
                f"rank {self.rank}, after step {step}: expected all ranks to average, or to settle or save, in the "
                f"same round, found that {found}: a rate that is a function must give the same on all ranks and depend "
                "on nothing but the round's index; settle and save at updates to which all ranks come: up to the "
                "last one of the rank with the least data, and those with gap 0"
            )

    def _share(self, report: RoundReport) -> Share | None:
        """Return this rank's share of the mean of all replicas; None where they are equal."""
        return report.share(self.exchange.rank)

    def _share_of_state(self, report: RoundReport) -> Share:
        """Return this rank's share of the mean optimizer state, which may differ where the replicas are equal."""
        share = report.share(self.exchange.rank)
        return 1 / self.exchange.world_size if share is None else share

    def _look_around(self, changed: bytes) -> RoundReport:
        """Gather the reports of an average that leaves no trace; all ranks must call."""
        progress = self.progress
        # Below zero: it must not be taken for the average of a rank that is somewhere else.
        own = empty_report(len(self.sharded.layout.slots), changed, progress.step)
        return self._meet(dataclasses.replace(own, round_index=~progress.round_index))

    def _nothing_yet(self) -> _SinceAverage:
        return _SinceAverage(bytearray(len(self.sharded.layout.slots)))


def _whereabouts(rank: int, index: int, is_without_data: bool) -> str:
    if index < 0:
        return f"rank {rank} settles or saves after round {~index}"
    return f"rank {rank}{', which has no more data,' if is_without_data else ''} averages in round {index}"


def empty_report(num_slots: int, changed: bytes, step: int) -> RankReport:
    """Return the report of a rank that contributes nothing."""
    return RankReport(
        totals=Totals(),
        gradient_is_finite=True,
        norm_squared=0.0,
        vote=Vote.GO_ON,
        settings=0,
        used=bytes(num_slots),
        changed=changed,
        step=step,
    )
