"""Feeds batches to the user's loop, each once, and brings all ranks to the same end.

Note [The end of the data]
    Ranks learn from the round reports that one of them has no more data. A loader with a length says so with its last
    batch, so that no round is needed for the news; another one is exhausted only when it is asked once more. A rank
    without data goes on in here: it hands over what it has accumulated, then empty rounds, until all have agreed. Then
    all land what is left, so that every update has ended and the model shows committed parameters. Where the number of
    updates is given, nothing is accumulated behind the last one: its rounds are landed at once.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

from stretto.checksums import digest
from stretto.echo.statistics import InputStatistics
from stretto.engine import Job
from stretto.engine.report import Vote
from stretto.errors import ConfigError, StepWithoutBackward
from stretto.fields import is_count
from stretto.records import Update

Batch = TypeVar("Batch")
Until = Literal["any", "all"]


class Feed:
    """The batches of one job's rank, and the updates that they lead to.

    Args:
        job: Of this rank.
    """

    def __init__(self, job: Job) -> None:
        self.input = InputStatistics(job.compute.runtime.now)
        self.has_begun = False
        """Whether batches have ever been handed out here."""
        self.num_samples = 1
        """Of the batch that was handed out last."""
        self._job = job
        self._compute = job.compute
        self._on_update: Callable[[Update], None] | None = None
        self.next_phase: int | None = None
        """The update behind which another strategy takes over; None where none does."""
        self.begin_phase: Callable[[], None] = lambda: None
        """Called there, before anybody hears of that update."""
        self._last_update: int | None = None
        """After which to end."""
        self._landed: list[Update] = []
        """Updates that nobody has been told of."""
        self._is_stopped = False
        """Whether some rank has asked all to end for good."""

    def batches(
        self,
        loader: Iterable[Batch],
        updates: int | None,
        until: Until,
        on_update: Callable[[Update], None] | None,
    ) -> Iterator[Batch]:
        """See `DataParallel.feed`."""
        with self._compute.lifetime.running():
            self._begin(updates, until)
            self._on_update, self.has_begun = on_update, True
            batches = self.input.begin(loader, JobUpdates(self._job, self.next_phase is None))
            length = _length_of(loader)
        nothing = object()
        num_fed = 0
        while True:
            with self._compute.lifetime.running():
                self._land_in_sight(self._last_update)
                self.land_phase()  # a checkpoint may have brought its round
            if self._is_over(until):
                break
            batch: Any = self.input.take(batches, nothing)
            if batch is nothing:
                with self._compute.lifetime.running():
                    self._pass_rounds(until, num_fed)
                break
            if num_fed and not self._compute.num_counted:
                with self._compute.lifetime.running():  # a loop that calls loss.backward() trains nothing
                    self._compute.accumulation.check_own(self._compute.where)
            num_fed += 1
            if num_fed == length:
                with self._compute.lifetime.running():
                    self._compute.take_off_if_ready()  # the round before: it does not hold this last batch
                    self._compute.vote = max(self._compute.vote, Vote.EXHAUSTED)
            self.num_samples = num_samples(batch)
            yield batch
        with self._compute.lifetime.running():
            self._end()
        self._on_update = None

    def end(self) -> None:
        """Go no further than the updates that are committed; all ranks come here behind the same one."""
        self._last_update = self._compute.steps

    def drain(self) -> None:
        """Land everything, and have replicas averaged; all ranks must call."""
        self._compute.vote = Vote.DRAIN
        while not (self._is_drained() and self._job.replica.is_united):
            self._pass_round()

    def commit(self) -> list[Update]:
        """Commit what this rank has counted and land everything; all ranks come here after the same micro-batch."""
        compute = self._compute
        compute.check_alike("commit()")
        own, compute.vote = compute.vote, Vote.DRAIN
        while not compute.is_clear:
            self._pass_round()
        compute.vote, compute.votes = own, []  # these votes were about this, not about the end of the data
        return self.take_landed()

    def unite(self) -> None:
        """Have replicas averaged where nothing is under way; all ranks come here behind the same update."""
        compute = self._compute
        own, compute.vote = compute.vote, Vote.DRAIN
        while not (compute.is_clear and self._job.replica.is_united):
            self._pass_round()
        compute.vote, compute.votes = own, []  # as in `commit`

    def arrived(self, update: Update | None) -> Update | None:
        """Tell of the update that a micro-batch has brought, if it has; return it."""
        told = None if update is None else self._tell(update)
        self.land_phase()
        return told

    def land_phase(self) -> None:
        """Land the last update of a phase once it is in sight."""
        self._land_in_sight(self.next_phase)

    def _tell(self, update: Update) -> Update:
        """Return the update with what was taken from the loader, once `on_update` has heard of it."""
        if self.next_phase is not None and self._compute.steps >= self.next_phase:
            self.begin_phase()
        if not self.has_begun:
            return update
        update = self.input.fill(update)
        if self._on_update is not None:
            self._on_update(update)
        return update

    def take_landed(self) -> list[Update]:
        """Return the updates that nobody has been told of."""
        updates, self._landed = self._landed, []
        return updates

    def _begin(self, updates: int | None, until: str) -> None:
        """Start anew after an agreed end of data, which a loop over epochs passes many times; a stop stays."""
        if until not in ("any", "all"):
            raise ConfigError(f"feed(until={until!r}): expected 'any' or 'all'")
        if updates is not None and not is_count(updates, 0):
            raise ConfigError(f"feed(updates={updates!r}): expected a number of updates, or None")
        self._last_update = updates
        if self._compute.vote == Vote.EXHAUSTED:
            self._compute.vote = Vote.GO_ON
        votes = self._compute.votes
        self._is_stopped |= max(votes, default=Vote.GO_ON) == Vote.STOP
        self._compute.votes = [Vote.STOP if self._is_stopped else Vote.GO_ON for _ in votes]

    def _end(self) -> None:
        """Land what is left on any rank, and show the committed parameters; all ranks come here at the same round."""
        compute = self._compute
        self._is_stopped |= max(compute.votes, default=Vote.GO_ON) >= Vote.STOP
        own, compute.vote = compute.vote, Vote.DRAIN
        while not self._is_drained():
            self._pass_round()
        compute.vote = own
        if compute.model.shown == "estimate":
            compute.show_committed()
            compute.model.until_training()

    def _has_enough(self) -> bool:
        return self._last_update is not None and self._compute.steps >= self._last_update

    def _is_over(self, until: Until) -> bool:
        """Return whether all ranks have agreed to end; the same on every rank at the same round."""
        votes = self._compute.votes
        if self._has_enough() or not votes:
            return self._has_enough()
        decisive = max(votes) if until == "any" else min(votes)
        return max(votes) >= Vote.STOP or decisive >= Vote.EXHAUSTED

    def _is_drained(self) -> bool:
        """Return whether every update has ended and nobody has anything left to contribute; the same on all ranks."""
        votes, world_size = self._compute.votes, self._job.exchange.world_size
        agreed = votes in ([Vote.DRAIN] * world_size, [Vote.EXHAUSTED] * world_size)
        replica = self._job.replica
        # Ranks that step alone come to the last update at different times, and meet at an average behind it.
        has_enough = self._has_enough() and (replica.is_united or not replica.steps_alone)
        return (agreed or has_enough) and self._compute.is_clear

    def _pass_rounds(self, until: Until, num_fed: int) -> None:
        """Take part in rounds without data until the agreed end."""
        if not num_fed:
            raise ConfigError(
                f"{self._compute.where}: the loader has no batch; expected at least one per rank"
            )
        if not self._compute.num_counted:
            raise StepWithoutBackward(
                f"{self._compute.where}: {num_fed} batches, and not one micro-batch: expected parallel.backward(loss) "
                "for each batch, in the place of loss.backward(), optimizer.step() and optimizer.zero_grad()"
            )
        self._compute.vote = max(self._compute.vote, Vote.EXHAUSTED)
        while not self._is_over(until):
            self._pass_round()

    def _pass_round(self) -> None:
        """Take the next step of a rank without data: land, then close, in the order of ranks that have some.

        Guards look at a round before the one ahead of it lands, on all ranks alike. Where nobody has data left, what
        accumulates is empty everywhere, and stays open.
        """
        compute = self._compute
        if compute.overlaps:
            compute.take_off_if_ready()
            landing = compute.wait_for_lane()
            is_last = landing is not None and set(landing.reduction.report.votes) <= {
                Vote.EXHAUSTED,
                Vote.DRAIN,
            }
            self._keep(compute.fly() if is_last else compute.end_round())
        else:
            self._keep(compute.fly() if compute.has_round_ready else compute.end_round())
        self._land_in_sight(self._last_update)
        self.land_phase()

    def _land_in_sight(self, last: int | None) -> None:
        """Land rather than accumulate once the update `last` is in sight: what came behind would be lost."""
        while last is not None and self._compute.steps < last <= self._compute.updates_in_sight:
            self._keep(self._compute.fly())

    def _keep(self, update: Update | None) -> None:
        """Tell of an update that no call returns, now or when `finish` returns it."""
        if update is not None:
            update = self._tell(update)
            self._landed += [] if self._on_update is not None else [update]


class JobUpdates:
    """Tells an `EchoLoader` which update its next batch goes to, and at which parameters its gradient will be taken.

    Args:
        job: Of this rank.
        has_one_strategy: Whether all updates to come have the same number of micro-batches, unless a clock decides it.
    """

    def __init__(self, job: Job, has_one_strategy: bool) -> None:
        self._compute = job.compute
        self.micro_batches = sum(job.compute.quota.minima)
        self.is_fixed = has_one_strategy and job.compute.quota.is_fixed and job.compute.begins_update
        self._begun_at = -1  # micro-batches before the newest update
        self._versions: list[int] = []
        self._fingerprint = 0

    def begins(self, slot: int) -> bool:
        """Return whether the next batch is the first of an update; a batch that was not counted has begun none."""
        if not self._compute.begins_update or self._compute.num_counted == self._begun_at:
            return False
        self._begun_at = self._compute.num_counted
        return True

    def parameters(self) -> int:
        """Return a digest of the parameters that the model shows in training, equal for equal values."""
        parameters = self._compute.model.parameters
        versions = [parameter._version for parameter in parameters]
        if versions != self._versions:
            with self._compute.model.unsettled():
                self._fingerprint = functools.reduce(lambda seed, one: digest(one, seed), parameters, 0)
            self._versions = versions
        return self._fingerprint


def _length_of(loader: Iterable[Any]) -> int | None:
    """Return how many batches a loader says that it has; None if it does not know."""
    try:
        return len(loader)  # type: ignore[arg-type]  # whether it has one is the question
    except (TypeError, NotImplementedError):
        return None


def num_samples(batch: object) -> int:
    """Return the length of the first tensor or array found in a batch, or 1."""
    return next(_lengths(batch), 1)


def _lengths(batch: object) -> Iterator[int]:
    """Yield the length of every tensor and array in the containers of a batch; 1 for one without dimensions."""
    shape = getattr(batch, "shape", None)
    if isinstance(shape, tuple):
        yield shape[0] if shape else 1
    elif isinstance(batch, Mapping):
        yield from _lengths(list(batch.values()))
    elif isinstance(batch, (list, tuple)):
        for part in batch:
            yield from _lengths(part)
    elif dataclasses.is_dataclass(batch):
        yield from _lengths([getattr(batch, field.name) for field in dataclasses.fields(batch)])
