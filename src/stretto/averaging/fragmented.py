"""Replicas that step alone, and whose fragments leave in turn for an outer step and land some updates later.

Note [One fragment under way]
    A fragment leaves at the end of one update and lands at the end of a later one, before the next one leaves. What it
    carries is copied when it leaves. On a lane beside the user's thread ranks gather the reports of the round in which
    it left, average the model's buffers and take the outer step. The landing makes all of that known here: so at a
    landing, and not at a departure, ranks learn of each other. Nobody else uses the group in between: whatever needs
    it waits until the fragment has arrived (`_arrive`), which changes nothing that the model shows. What does not go
    through the replica, such as the messages of checkpoints, calls `wait_for_transfers` before.

Note [The end]
    A rank without data lands what is under way and waits for the others at their next departure. If none of them has
    a departure to make, all have come to the end, and all replicas are replaced by their mean. Anchor and velocity
    stay as they are: should training go on, the next outer step finds the whole way from the anchor.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stretto.averaging.beside import WithLaneBeside
from stretto.averaging.local import LocalReplica
from stretto.averaging.outer import Fragment
from stretto.engine.agreed import Alike
from stretto.engine.buffers import Buffer, changes_of
from stretto.engine.options import Options
from stretto.engine.replica import Flight, Performer, flight_of
from stretto.engine.report import RankReport, RoundReport, in_rank_order
from stretto.engine.round import Round
from stretto.engine.runtime import Pending, choose_runtime
from stretto.engine.statistics import at, average_statistics, moved
from stretto.engine.written import newest_at_rest
from stretto.exchange import Exchange
from stretto.optimizer import ShardedOptimizer
from stretto.strategies.contract import Land, Launch, Look, Moment


@dataclasses.dataclass(slots=True)
class _Trip:
    """What one departure has brought."""

    fragment: int
    has_left: bool
    """Whether an outer step was taken: not where nobody has contributed anything since the fragment left last."""
    is_end: bool
    """Whether no rank had a departure to make."""
    round_index: int
    """The round in which it left."""
    report: RoundReport
    """Of all rounds from the departure before to this one."""
    snapshot: list[Buffer]
    """The model's buffers on this rank when it left, with what had landed in that round."""
    averages: dict[int, Buffer]
    """Their averages over ranks, by index."""


class FragmentedReplica(LocalReplica):
    """One rank's replica, with an anchor that all ranks hold alike.

    Args are those of `LocalReplica`, and:
        fragments: Into how many the parameters are cut.
    """

    def __init__(
        self,
        exchange: Exchange,
        sharded: ShardedOptimizer,
        *,
        fragments: int,
        options: Options,
        **others: Any,
    ) -> None:
        super().__init__(exchange, sharded, options=options, **others)
        buckets = range(len(sharded.masters))
        self.fragments = [
            Fragment(exchange, sharded, buckets[first::fragments], options.wire_of_changes)
            for first in range(fragments)
        ]
        self._mean.measure_from(self._anchor_by_bucket())  # as good as the last mean: equal on all ranks
        self._beside = choose_runtime(exchange.group, sharded.masters[0].device, overlaps=True)
        self.runtime = WithLaneBeside(self.runtime, self._beside)
        self._under_way: Pending[_Trip] | None = None
        self._arrived: _Trip | None = None
        self._last_left = self._left_at = 0  # which fragment has left last, and in which round
        self._weights = np.zeros((fragments, exchange.world_size))
        """What each rank has contributed since each fragment left last, up to the last departure of any."""
        self._left_with = np.zeros_like(self._weights)
        """What each rank had contributed when each fragment left last, or when all replicas became their mean."""
        self._differ = np.zeros(fragments, dtype=bool)
        """Of each fragment: whether ranks hold values of their own: it is under way, or kept a part when it landed."""

    @property
    def performers(self) -> Mapping[type, Performer]:
        """Performers by effect."""
        return {**super().performers, Launch: self._launch, Land: self._land}

    @property
    def name(self) -> str:
        """Of this rank's own state in a checkpoint."""
        return f"{super().name}-of-{len(self.fragments)}-fragments"

    @property
    def is_under_way(self) -> bool:
        """Whether a fragment has left that has not landed."""
        return self._under_way is not None or self._arrived is not None

    def anchors(self, *, waits: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the anchors by name, equal on all ranks: without waiting, only of fragments that are at rest."""
        if waits:
            self._arrive()
        for index in self._at_rest():
            for number, anchor in enumerate(self.fragments[index].anchor):
                yield f"fragment {index}, set {number}", anchor

    def outer_state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield velocity, debts and losses of fragments that are at rest, each with its kind and its name."""
        for index in self._at_rest():
            fragment = self.fragments[index]
            kinds = {"velocity": fragment.velocity, "error memory": [*fragment.exchange.owed, *fragment.lost]}
            for kind, tensors in kinds.items():
                for number, tensor in enumerate(tensors):
                    yield kind, f"fragment {index}, number {number}", tensor

    def gather_committed(self, flats: list[Tensor], statistics: Any) -> list[Buffer]:
        """Fill `flats` with the mean of all replicas; return the mean of the buffers."""
        self._arrive()
        means = super().gather_committed(flats, statistics)
        if (trip := self._arrived) is None:
            return means
        return newest_at_rest(self.exchange, statistics, means, trip.snapshot, trip.averages)

    def agreed_optimizer(self, changed: bytes) -> ShardedOptimizer:
        """Return the optimizer, or where replicas differ a copy that holds their mean; all ranks must call."""
        self._arrive()
        return super().agreed_optimizer(changed)

    def wait_for_transfers(self) -> None:
        """Wait until the fragment that is under way has arrived; it lands when it is due."""
        self._arrive()

    def begin_again(self) -> None:
        """Take the present masters, alike on all ranks, for the anchor; nothing is under way."""
        self._arrive()
        self._arrived = None
        self._since = self._nothing_yet()
        self.agreement.unite(states=True)
        for counts in (self._weights, self._left_with, self._differ):
            counts[:] = 0
        for fragment in self.fragments:
            fragment.begin_again()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's replica and its part of the outer optimizer, once anything has happened."""
        self._arrive()
        if state := super().state_dict():
            state["replica"]["last_mean"] = None  # the anchor
            state["replica"]["outer"] = {
                "fragments": [fragment.state_dict() for fragment in self.fragments],
                "weights": self._weights.tolist(),
                "left_with": self._left_with.tolist(),
                "differ": self._differ.tolist(),
                "rounds": self.agreement.gap,
                "is_apart": not self.agreement.is_united,
                "trip": None if self._arrived is None else _packed(self._arrived),
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put a replica in the place of this rank's."""
        super().load_state_dict(state)
        if "replica" not in state:
            return
        outer = state["replica"]["outer"]
        for fragment, saved in zip(self.fragments, outer["fragments"], strict=True):
            fragment.load_state_dict(saved)
        self._weights[:], self._left_with[:] = outer["weights"], outer["left_with"]
        self._differ[:] = outer["differ"]
        alike = Alike.APART if outer["is_apart"] else Alike.UNITED
        self.agreement.resume(alike, outer["rounds"], states=False)
        self._arrived = None if outer["trip"] is None else self._unpacked(outer["trip"])
        self._left_at = 0 if self._arrived is None else self._arrived.round_index

    # Performers

    def _look(self, effect: Look, flight: Flight | None) -> Moment:
        moment = super()._look(effect, flight)
        aloft = self.progress.round_index - self._left_at if self.is_under_way else None
        return dataclasses.replace(moment, aloft=aloft)

    def _launch(self, effect: Launch, flight: Flight | None) -> bool:
        """Let a fragment leave; on a rank without data, wait for the others and take over where they are."""
        flight = flight_of(effect, flight)
        round = flight.round
        is_due = effect.is_due and not self._known.is_without_data
        buffers, changed = _buffers(flight)
        own = dataclasses.replace(self._since_average(self._own_report(round)), changed=changed)
        self._since = self._nothing_yet()
        self._last_left, self._left_at = effect.fragment, self.progress.round_index
        self.agreement.depart()
        self.fragments[effect.fragment].load(keeps_progress=effect.keeps_progress)
        self._under_way = self._beside.spawn(lambda: self._travel(effect, own, round, buffers, is_due=is_due))
        if not is_due:
            trip = self._arrive()
            self._left_at = trip.round_index
            self.progress.wait_until(trip.round_index)
            if trip.is_end:
                self._unite(trip, flight)
                return False
        return True

    def _land(self, effect: Land, flight: Flight | None) -> None:
        """Mix in the outer step, and learn of the other ranks."""
        flight = flight_of(effect, flight)
        trip, self._arrived = self._arrive(), None
        fragment = self.fragments[trip.fragment]
        has_waited = trip.round_index == self.progress.round_index
        if trip.has_left:
            fragment.land(effect.mix)
            self._differ[trip.fragment] = effect.mix > 0
        self.sharded.publish(flight.round.buffer.flats)
        self.agreement.land(is_whole=not (effect.delay or effect.mix or len(self.fragments) > 1))
        if has_waited:
            self._catch_up(trip.report)
        elif not self._known.is_without_data:
            self.progress.take_step()  # like every step of a rank that does not ask the others
        self._tell(trip, flight, has_waited=has_waited)

    # On the lane beside

    def _travel(
        self, launch: Launch, own: RankReport, round: Round, buffers: list[Buffer], *, is_due: bool
    ) -> _Trip:
        fragment = self.fragments[launch.fragment]
        exchange = fragment.exchange
        report, due = self._gather(exchange, own, is_due=is_due)
        self._check_settings(report, round)
        averages = average_statistics(exchange, buffers, report.changed, report.micro_batches, round.first)
        has_left = False
        if any(due):
            self._weights += report.records["weight"]
            weights = self._weights[launch.fragment].copy()
            self._weights[launch.fragment] = 0
            if has_left := (total := in_rank_order(weights)) > 0:
                self._left_with[launch.fragment], self._differ[launch.fragment] = weights, True
                fragment.travel(float(weights[exchange.rank]) / total, launch)
        return _Trip(
            fragment=launch.fragment,
            has_left=has_left,
            is_end=not any(due),
            round_index=int(report.records["round_index"].max()),
            report=report,
            snapshot=buffers,
            averages=averages,
        )

    def _gather(
        self, exchange: Exchange, own: RankReport, *, is_due: bool
    ) -> tuple[RoundReport, Sequence[bool]]:
        """Gather reports of all rounds since the last departure, and whether each rank has a departure to make."""
        records = exchange.gather_bytes(RoundReport.pack(own) + bytes([is_due]))
        report = RoundReport.unpack([record[:-1] for record in records], len(own.used), len(own.changed))
        due = [bool(record[-1]) for record in records]
        self._check_rounds(report, due, own.step)
        return report, due

    # What ranks know of each other

    def _arrive(self) -> _Trip:
        """Wait for the fragment that is under way, if one is, and return what the last one has brought."""
        if self._under_way is not None:
            pending, self._under_way = self._under_way, None
            self._arrived = pending.result()
            for fragment in self.fragments:
                self.exchange.take_account(fragment.exchange)
        return self._arrived  # type: ignore[return-value]  # who looks at it knows that there is one

    def _unite(self, trip: _Trip, flight: Flight) -> None:
        """Replace all replicas by their mean."""
        if not self.agreement.is_united:
            self._mean.unite(self._share(trip.report), flight.round.buffer.flats, state=False)
        self._arrived = None
        self._left_with = self._contributed(trip.report)
        self._weights[:] = self._differ[:] = 0
        self.agreement.unite(states=False)
        self.sharded.publish(flight.round.buffer.flats)
        self._catch_up(trip.report)
        self._tell(trip, flight, has_waited=True)

    def _tell(self, trip: _Trip, flight: Flight, *, has_waited: bool) -> None:
        """Let the round end with what a departure, of this round or of an earlier one, has made known."""
        reduction, ranks = flight.reduction, self._worker.ranks
        earlier, was_met = reduction.report, reduction.met
        report = trip.report.news(earlier, ranks)
        reduction.meet(
            earlier.with_news(report, ranks) if was_met else report,
            {**reduction.statistics, **trip.averages},
        )
        # The model holds this round's buffers, or where the round is left out, what ranks agreed on before it.
        taken = flight.round.statistics if has_waited or reduction.skipped else trip.snapshot
        flight.take_snapshot({index: taken[index] for index in trip.averages})

    def _meet(self, own: RankReport) -> RoundReport:
        """Gather the reports of a mean that leaves no trace."""
        return self._gather(self.exchange, self._since_average(own), is_due=True)[0]

    def _share(self, report: RoundReport) -> list[float]:
        """Return this rank's share of the mean of all replicas, by bucket: what it has contributed since each left."""
        is_idle = ~(self._weights + report.records["weight"]).any(axis=1)
        # A fragment that has landed, and to which nobody has contributed, is equal on all ranks: one of them sends it.
        is_equal = (is_idle & ~self._differ)[:, np.newaxis]
        return self._shares(np.where(is_equal, 0.0, self._contributed(report)))

    def _share_of_state(self, report: RoundReport) -> list[float]:
        """Return this rank's share of the mean optimizer state, by bucket: no landing makes states equal."""
        return self._shares(self._contributed(report))

    def _contributed(self, report: RoundReport) -> NDArray[np.float64]:
        """Return what each rank has contributed since each fragment left, or where none has, until it left."""
        since = self._weights + report.records["weight"]
        return np.where(since.any(axis=1, keepdims=True), since, self._left_with)

    def _shares(self, weights: NDArray[np.float64]) -> list[float]:
        """Return this rank's share of each row, by bucket; rank 0 has all of one without weight."""
        rank, totals = self.exchange.rank, [in_rank_order(row) for row in weights]
        shares = [
            float(row[rank]) / total if total else float(rank == 0)
            for row, total in zip(weights, totals, strict=True)
        ]
        return [shares[index % len(shares)] for index in range(len(self.sharded.masters))]

    def _at_rest(self) -> list[int]:
        is_away = self._under_way is not None
        return [index for index in range(len(self.fragments)) if not (is_away and index == self._last_left)]

    def _anchor_by_bucket(self) -> list[Tensor]:
        found = {
            member: anchor
            for fragment in self.fragments
            for member, anchor in zip(fragment.members, fragment.anchor_by_bucket, strict=True)
        }
        return [found[index] for index in range(len(found))]

    def _unpacked(self, saved: Mapping[str, Any]) -> _Trip:
        device = self.sharded.masters[0].device
        slots, buffers = len(self.sharded.layout.slots), len(saved["snapshot"])
        return _Trip(
            **{
                **saved,
                "report": RoundReport.unpack(saved["report"], slots, buffers),
                "snapshot": [at(value, device) for value in saved["snapshot"]],
                "averages": {index: at(value, device) for index, value in saved["averages"].items()},
            }
        )


def _buffers(flight: Flight) -> tuple[list[Buffer], bytes]:
    """Return the model's buffers with what has landed in this round, and one byte each: changed since ranks agreed?"""
    round, averages = flight.round, flight.reduction.statistics
    landed = moved(round.statistics, flight.snapshot, averages, round.first)
    buffers: list[Buffer] = [landed.get(index, value) for index, value in enumerate(round.statistics)]
    return buffers, changes_of([averages.get(i, value) for i, value in enumerate(round.agreed)], buffers)


def _packed(trip: _Trip) -> dict[str, Any]:
    fields = {field.name: getattr(trip, field.name) for field in dataclasses.fields(trip)}
    return {**fields, "report": [record.tobytes() for record in trip.report.records]}
