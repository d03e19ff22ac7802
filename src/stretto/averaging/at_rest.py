"""What a replica that steps alone is asked at rest: the mean of all, what ranks hold alike, and its own state."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from stretto.averaging.local import LocalReplica, SinceDeparture, Trip
from stretto.averaging.outer import Fragment
from stretto.averaging.reports import empty_report
from stretto.engine.accumulation import Totals
from stretto.engine.agreed import Alike
from stretto.engine.buffers import Buffer, changes_of
from stretto.engine.report import RoundReport
from stretto.engine.statistics import Statistics, at, average_statistics
from stretto.engine.written import newest_at_rest
from stretto.optimizer import ShardedOptimizer


class LocalAtRest(LocalReplica):
    """A replica that steps alone, with all that an update does not pass; arguments are those of `LocalReplica`."""

    @property
    def name(self) -> str:
        """Of this rank's own state in a checkpoint."""
        name = self._worker.name if self.within is None else super().name
        return f"{name}-of-{len(self.fragments)}-fragments" if self.has_anchor else name

    def anchors(self, *, waits: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the anchors by name, equal on all ranks: without waiting, only of fragments that are at rest."""
        if waits:
            self._arrive()
        for index, fragment in self._at_rest():
            for number, anchor in enumerate(fragment.anchor):
                yield f"fragment {index}, set {number}", anchor

    def outer_state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield velocity, debts and losses of fragments that are at rest, each with its kind and its name."""
        for index, fragment in self._at_rest():
            kinds = {"velocity": fragment.velocity, "error memory": [*fragment.exchange.owed, *fragment.lost]}
            for kind, tensors in kinds.items():
                for number, tensor in enumerate(tensors):
                    yield kind, f"fragment {index}, number {number}", tensor

    def gather_committed(self, flats: list[Tensor], statistics: Statistics) -> list[Buffer]:
        """Fill `flats` with the mean of all replicas; return the mean of the buffers."""
        self._arrive()
        if self.agreement.is_united:
            means = super().gather_committed(flats, statistics)
        else:
            own = statistics.copies
            report = self._look_around(changes_of(statistics.agreed, own))
            self._mean.show(self._weights.share(report), flats)
            found = average_statistics(
                self.exchange, own, report.changed, report.micro_batches, statistics.first
            )
            means = [found.get(index, value) for index, value in enumerate(statistics.agreed)]
        if (trip := self._arrived) is None:
            return means
        return newest_at_rest(self.exchange, statistics, means, trip.snapshot, trip.averages)

    def agreed_optimizer(self, changed: bytes) -> ShardedOptimizer:
        """Return the optimizer, or where replicas differ a copy that holds their mean; all ranks must call."""
        self._arrive()
        if self.agreement.is_whole:
            return self.sharded
        report = self._look_around(changed)
        return self._mean.consensus(self._weights.share(report), self._weights.share_of_state(report))

    def wait_for_transfers(self) -> None:
        """Wait until the fragment that is under way has arrived; it lands when it is due."""
        self._arrive()

    def begin_again(self) -> None:
        """Take the present masters, alike on all ranks, for an average and for the anchor; nothing is under way."""
        self._arrive()
        self._arrived = None
        self._since = self._nothing_yet()
        self.agreement.unite(states=True)
        self._weights.begin_again()
        for fragment in self.fragments:
            fragment.begin_again()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's replica and its part of the outer optimizer, once anything has happened.

        It refers to the job's own tensors.
        """
        self._arrive()
        if self.agreement.is_whole:
            return {}
        replica = self._mean.state_dict()
        if self.has_anchor:
            replica["last_mean"] = None  # the anchor
        replica["since"] = {
            **dataclasses.asdict(self._since),
            "used": bytes(self._since.used),
            "rounds": self.agreement.gap,
        }
        replica["outer"] = {
            **self._weights.state_dict(),
            "fragments": [fragment.state_dict() for fragment in self.fragments],
            "is_apart": not self.agreement.is_united,
            "trip": None if self._arrived is None else _packed(self._arrived),
        }
        return {"replica": replica}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put a replica in the place of this rank's, if the state holds one: other kinds save counts alone."""
        if "replica" not in state:
            return
        replica = state["replica"]
        self._mean.load_state_dict(replica)
        since = replica["since"]
        self._since = SinceDeparture(bytearray(since["used"]), Totals(**since["totals"]))
        outer = replica["outer"]
        self._weights.load_state_dict(outer)
        for fragment, saved in zip(self.fragments, outer["fragments"], strict=True):
            fragment.load_state_dict(saved)
        self._arrived = None if outer["trip"] is None else self._unpacked(outer["trip"])
        self._left_at = 0 if self._arrived is None else self._arrived.round_index
        apart = Alike.APART if self.has_anchor else Alike.DRIFTING
        self.agreement.resume(apart if outer["is_apart"] else Alike.UNITED, since["rounds"], states=False)

    def _at_rest(self) -> Iterator[tuple[int, Fragment]]:
        """Yield the fragments of outer steps that are not under way."""
        for index, fragment in enumerate(self.fragments):
            is_away = self._under_way is not None and index == self._last_left
            if isinstance(fragment, Fragment) and not is_away:
                yield index, fragment

    def _look_around(self, changed: bytes) -> RoundReport:
        """Gather the reports of a mean that leaves no trace; all ranks must call."""
        progress = self.progress
        # Below zero: it must not be taken for the average of a rank that is somewhere else.
        own = dataclasses.replace(
            empty_report(len(self.sharded.layout.slots), changed, progress.step),
            round_index=~progress.round_index,
        )
        return self._gather(self.exchange, self._since_departure(own))

    def _unpacked(self, saved: Mapping[str, Any]) -> Trip:
        device = self.sharded.masters[0].device
        slots, buffers = len(self.sharded.layout.slots), len(saved["snapshot"])
        return Trip(
            **{
                **saved,
                "report": RoundReport.unpack(saved["report"], slots, buffers),
                "snapshot": [at(value, device) for value in saved["snapshot"]],
                "averages": {index: at(value, device) for index, value in saved["averages"].items()},
            }
        )


def _packed(trip: Trip) -> dict[str, Any]:
    fields = {field.name: getattr(trip, field.name) for field in dataclasses.fields(trip)}
    return {**fields, "report": [record.tobytes() for record in trip.report.records]}
