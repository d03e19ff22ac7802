"""Yields batches to the user's loop, each once, until all ranks end together.

Note [The end of the data]
    Ranks learn from the round reports that one of them has no more data. A loader with a length is asked once more
    before the batch of that number is given out. If nothing comes, the rank says so with its last batch, so that no
    round is needed for the news, and what the loader does at its end has been done. If a batch comes, the length was
    wrong, and the loader is as one without a length: exhausted when it is asked and has nothing. So a length is a hint
    and the iterator is the truth.

    A rank without data continues in here: it passes what it has accumulated, then empty rounds, until all have
    agreed. Then all complete the remaining rounds, so that every update has ended and the model shows committed
    parameters. Where the number of updates is given, nothing is accumulated after the last update: its rounds are
    completed at once.

Note [Batches that are out]
    A loop may ask for the next batch before it has counted the one in hand: between forward and backward pass, or to
    see which batch is the last. Then as many batches are out whenever it asks, from its first batch on, and few. A
    loop that skips batches has at some time none out, or ever more. Where a loop that looks ahead asks and there is
    nothing more to give out, the iterator stops, and the pass ends when the micro-batches of the batches that are out
    are counted, inside that call. `feed` cannot distinguish a loop that skips its first few batches: its pass ends
    with the job's next call for rest, the next `feed`, `finish` or `commit`.
"""

import collections
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from stretto.echo.loader import EchoLoader, check_unfed
from stretto.echo.statistics import InputStatistics, num_samples
from stretto.engine import Job
from stretto.engine.compute_lane import Until
from stretto.engine.report import Vote
from stretto.errors import CheckpointError, OutOfTurn
from stretto.feed import again, passes
from stretto.feed.updates import JobUpdates
from stretto.records import Update

_log = logging.getLogger("stretto")

Batch = TypeVar("Batch")
NOTHING = object()
"""The result of an exhausted loader."""
Take: TypeAlias = Callable[[Iterator[Any], object], tuple[Any, int]]
"""Takes a batch from an iterator, or returns the given default if there is none, with the number of the batch's use."""


@dataclasses.dataclass(slots=True)
class Pass:
    """One pass of this rank over a loader."""

    loader: Iterable[Any]
    batches: Iterator[Any]
    length: int | None
    """The loader's own length, if it has one."""
    until: Until
    position: int = 0
    """Number of batches returned since its beginning."""
    num_fed: int = 0
    """Number of batches since the last checkpoint."""
    is_exhausted: bool = False
    """Whether the loader was asked for a batch and had none."""
    ahead: tuple[Any, int] | None = None
    """A batch that came when the loader was asked for one more than its length, and the number of its use."""
    state: Any = None
    """The loader's state before that batch; None for a loader without a state."""
    error: Exception | None = None
    """The loader's error when it was asked for one more, to be raised when its next batch is due."""
    is_behind: bool = False
    """Whether it has ended, on all ranks, although the loop may still count batches from it."""
    is_same: bool = False
    """Whether its iterator comes from the previous pass, whose end may not have been reported yet."""
    has_ended: bool = False
    """Whether all ranks have agreed on its end because of the data, and now only complete the remaining rounds."""

    # Batches that are out; see Note [Batches that are out].
    num_counted: int = 0
    """The job's number of micro-batches at the loop's last request."""
    num_out: int = 0
    """Number of returned batches that the loop has not counted."""
    per_batch: int = 1
    """Micro-batches that the loop counted for its last batch."""
    depth: int | None = None
    """Number of uncounted batches when the loop first asked for one after counting."""
    looks_ahead: bool = True
    """Whether the loop has always held a small number of uncounted batches when it asked for one, and the same
    number each time since it began to count."""
    samples: collections.deque[int] = dataclasses.field(default_factory=collections.deque)
    """Sizes of the uncounted batches and of the current one."""

    # Of a loader without a state; see `stretto.feed.again`.
    draws: Mapping[str, Any] | None = None
    """The random states with which it began; None for a loader with a state."""
    last: Any = None
    """The last returned batch."""

    def leave_behind(self, is_behind: bool) -> None:
        """Set whether batches of this ended pass may still be counted."""
        self.is_behind = is_behind

    def asked(self, num_counted: int) -> int:
        """The loop requests a batch; return how many returned batches it will still count: 0 if it does not look
        ahead.
        """
        counted, self.num_counted = num_counted - self.num_counted, num_counted
        if counted > 0:
            self.num_out -= 1
            self.per_batch = counted
            self.depth = self.num_out if self.depth is None else self.depth
        if self.num_fed:
            is_steady = self.depth is None or self.num_out == self.depth
            self.looks_ahead &= 0 < self.num_out <= passes.MOST_OUT and is_steady
        return self.num_out if self.looks_ahead and self.num_fed else 0

    def take(self, take: Take) -> tuple[Any, int]:
        """Return the next batch, or `NOTHING`, and the number of its use; the iterator is not asked again after
        `NOTHING`.
        """
        if self.error is not None:
            raise self.error
        if self.is_exhausted:
            return NOTHING, 0
        ahead, self.ahead = self.ahead, None
        taken = take(self.batches, NOTHING) if ahead is None else ahead
        if taken[0] is NOTHING and self.is_same:
            taken = take(self.batches, NOTHING)
        self.is_same, self.is_exhausted = False, taken[0] is NOTHING
        return taken

    def look_ahead(self, take: Take) -> bool:
        """Ask the loader for one more while a batch is in use; return whether it has none."""
        self.state = passes.state_before(self.loader)
        try:
            ahead = take(self.batches, NOTHING)
        except Exception as error:  # the batch in hand comes before it
            self.error = error
            return False
        if ahead[0] is NOTHING:
            self.is_exhausted = True
        else:
            self.ahead = ahead
        return self.is_exhausted

    def end(self) -> None:
        """Note that all ranks have agreed on its end because of the data."""
        self.has_ended = True


class Feed:
    """The batches of one rank of a job, and the resulting updates.

    Args:
        job: Of this rank.
    """

    def __init__(self, job: Job) -> None:
        self.input = InputStatistics(job.compute.runtime.now)
        self.has_begun = False
        """Whether batches have ever been returned here."""
        self._job = job
        self._compute = job.compute
        job.compute.hooks.mark.hold(self, job.compute.let_go)
        lifetime = job.compute.lifetime
        is_alone = lifetime.failures.world_size == 1  # and may catch what its loader raises
        self._asking: Callable[[], AbstractContextManager[None]] = (
            nullcontext if is_alone else functools.partial(lifetime.running, is_users=True)
        )
        """Context for calls of the loader: if it raises, the other ranks raise the error at once, and the job ends."""
        self._on_update: Callable[[Update], None] | None = None
        self._last_update: int | None = None
        """The update after which to end."""
        self._num_changes = -1
        """Of the job's rounds, when `_hand_out` asked last whether the pass is over: it asks once after each."""
        self._committed: list[Update] = []
        """Updates that were not reported yet."""
        self._pass: Pass | None = None
        """The pass in progress, or the last one."""
        self._is_feeding = self._is_unfed = False
        self._num_late: int | None = None
        """Micro-batches that the loop still counts for a pass without more batches; None if there is no such pass."""
        self._restored: Mapping[str, Any] | None = None
        """The checkpoint's record of the pass in which it was saved, until the next pass begins."""
        self._again: tuple[Any, Mapping[str, Any], Iterator[Any]] | None = None
        """A loader without a state, the checkpoint's record of it, and the rest of that pass, until that pass
        begins."""
        self._device = job.sharded.masters[0].device

    def batches(
        self,
        loader: Iterable[Batch],
        updates: int | None,
        until: Until,
        on_update: Callable[[Update], None] | None,
    ) -> Iterator[Batch]:
        """See `DataParallel.feed`."""
        with self._compute.lifetime.running():
            passes.check_arguments(loader, updates, until, on_update)
            self.close()
            self._last_update, self._on_update, self.has_begun = updates, on_update, True
            last, current = self._pass, self._begin_pass(loader, until)
            current.num_counted = self._compute.num_counted
            current.per_batch = 1 if last is None else last.per_batch
            self._pass = current
        self._is_feeding, self._num_changes = True, -1
        try:
            yield from self._hand_out(current)
            if self._num_late is None:
                with self._compute.lifetime.running():
                    self._end(current)
        finally:
            # One that was dropped may end after another has begun.
            self._is_feeding &= self._pass is not current or self._num_late is not None
            current.last = current.last if self._num_late is not None else None
        if self._num_late is None:
            self._on_update = None

    def _hand_out(self, current: Pass) -> Iterator[Any]:
        """Yield the batches of a pass until all ranks agree on its end."""
        compute = self._compute
        while True:
            num_out, is_over = current.asked(compute.num_counted), False
            if compute.lifetime.ended_because is not None:
                raise compute.lifetime.refusal()
            if num_out or self._num_changes != compute.rounds.num_changes:
                with compute.lifetime.running():
                    if not num_out:
                        self._install_up_to(self._last_update)
                    is_over = self._is_over(current.until) or (
                        num_out > 0 and self._are_enough(current, num_out)
                    )
                self._num_changes = compute.rounds.num_changes
            batch = NOTHING if is_over else self._next(current)
            if batch is NOTHING:
                if num_out:
                    self._num_late = num_out * current.per_batch
                    self._end_data_with_last(current)
                elif not is_over:
                    with compute.lifetime.running():
                        self._pass_rounds(current)
                return
            if current.num_fed and not compute.num_counted:
                with compute.lifetime.running():  # a loop that calls loss.backward() trains nothing
                    compute.accumulation.check_own(compute.where)
            current.num_fed += 1
            current.num_out += 1
            current.position += 1
            if current.position == current.length:  # by its length, which may be wrong, this is the last
                batch = self._look_ahead(current, batch)
            if not num_out:
                current.samples.clear()
            current.samples.append(num_samples(batch))
            current.last = batch
            yield batch
            if self._pass is not current:
                with compute.lifetime.running():
                    raise passes.one_at_a_time(compute.where)

    def _next(self, current: Pass) -> Any:
        """Return the next batch of a pass, or `NOTHING`."""
        with self._asking():
            batch, use = current.take(self.input.take)
        if batch is not NOTHING:
            self.input.uses.append(use)
        return batch

    def count(
        self, weight: float, loss: Tensor | None, samples: int | None, *, lacks: bool = False
    ) -> Update | None:
        """Count a micro-batch; return the update that it completes, if any, once it is reported.

        Args:
            weight: Of the micro-batch.
            loss: Its mean loss, if it is known.
            samples: None for the size of the batch that was given out.
            lacks: Whether it may have no gradient.

        Raises:
            OutOfTurn: The micro-batch belongs to a pass that is over.
        """
        compute, current = self._compute, self._pass
        self._is_unfed = not self._is_feeding
        if self._is_unfed:
            check_unfed(sum(compute.quota.minima) if compute.quota.is_fixed else None, compute.where)
        if current is not None and self._num_late is not None:
            self._end_data_with_last(current)
        elif current is not None and current.is_behind:
            raise passes.counted_behind(compute.where, current.num_out)
        if samples is None:
            samples = current.samples[0] if current is not None and current.samples else 1
        # Only an `EchoLoader` gives a batch twice.
        fresh = samples if self.input.echo is None else self.input.note(loss, weight, samples)
        update = compute.count(weight, loss, samples, fresh, lacks)
        if current is not None and len(current.samples) > 1 and current.per_batch == 1:
            current.samples.popleft()
        update = None if update is None else self._tell(update)
        if self._num_late is not None:
            self._num_late -= 1
            if not self._num_late:
                self.close()
        return update

    def close(self) -> None:
        """End a pass without more batches if its loop has not: the loop has counted all of them, or no longer
        counts.
        """
        current = self._pass
        if self._num_late is None or current is None:
            return
        self._num_late = current.last = None
        self._install_up_to(self._last_update)
        if not self._is_over(current.until):
            self._pass_rounds(current)
        self._end(current)
        self._is_feeding, self._on_update = False, None

    def _end_data_with_last(self, current: Pass) -> None:
        """Report with the last batch that the data have ended."""
        if current.is_exhausted and self._num_late == 1:
            self._compute.rounds.end_data()

    def _tell(self, update: Update) -> Update:
        """Call `on_update`, then return the update with its input statistics."""
        if not self.has_begun:
            return update
        update = self.input.fill(update)
        if self._on_update is not None:
            self._on_update(update)
        return update

    def take_committed(self) -> list[Update]:
        """Return the updates that were not reported yet."""
        updates, self._committed = self._committed, []
        return updates

    def _are_enough(self, current: Pass, num_out: int) -> bool:
        """Return whether the batches that are out complete the last update."""
        if self._last_update is None:
            return False
        if not self._compute.quota.is_fixed:
            raise passes.ahead_of_clock(self._compute.where)
        num_lacking = self._compute.num_lacking(self._last_update)
        if num_lacking <= (num_out - 1) * current.per_batch:
            raise passes.ahead_of_end(self._compute.where, num_out, num_lacking)
        return num_lacking <= num_out * current.per_batch

    def _is_over(self, until: Until) -> bool:
        """Return whether all ranks have agreed to end; the same on every rank at the same round."""
        rounds, last = self._compute.rounds, self._last_update
        return (last is not None and rounds.steps >= last) or rounds.is_pass_over(until)

    def _install_up_to(self, last: int | None) -> None:
        """Complete rounds instead of accumulating once the update `last` is in flight: later gradients would be
        lost.
        """
        while (
            last is not None
            and self._compute.rounds.steps < last <= self._compute.rounds.steps_once_installed
        ):
            self._keep(self._compute.finish_round())

    def _keep(self, update: Update | None) -> None:
        """Keep an update that no call returns, for a report now or by `finish`."""
        if update is not None:
            update = self._tell(update)
            self._committed += [] if self._on_update is not None else [update]

    # The beginning and the end of a pass

    def _begin_pass(self, loader: Any, until: Until) -> Pass:
        """Start a pass, or continue the pass in whose end a checkpoint was saved."""
        self._compute.rounds.begin_pass()
        restored, self._restored = self._restored, None
        loaded, self._again = self._again, None
        if restored is not None and restored["is_left"]:
            passes.leave(loader)
            restored = None
        updates = JobUpdates(self._job)
        draws = None if again.has_state(loader) else again.draws_of(loader, self._device)
        if restored is None:
            batches = self.input.begin(loader, updates)
            length = passes.length_of(loader)  # that of an echo, which it knows once it has begun
            last = self._pass
            if last is None or last.batches is not batches:
                return Pass(loader, batches, length, until, draws=draws)
            is_same = not last.is_exhausted
            return Pass(loader, batches, length, until, ahead=last.ahead, is_same=is_same, draws=draws)
        if loaded is not None:
            if loaded[0] is not loader:
                raise OutOfTurn(
                    f"{self._compute.where}: feed(): expected the loader that load() was given, of whose pass this is "
                    f"the rest, found another {type(loader).__name__}"
                )
            draws = loaded[1]["begun"]
        # A loader of torchdata.nodes begins another pass where nothing is left of this one.
        restarts = getattr(loader, "restart_on_stop_iteration", None)
        if restarts is not None:
            loader.restart_on_stop_iteration = False
        batches = self.input.begin(loader if loaded is None else loaded[2], updates)
        length = passes.length_of(loader)
        if restarts is not None:
            loader.restart_on_stop_iteration = restarts
        batches, votes = passes.rest_of(restored, loader, batches)
        if votes:
            self._compute.rounds.resume_pass(votes)
        at, is_exhausted = int(restored["position"]), bool(restored["is_exhausted"])
        rest = Pass(loader, batches, length, until, at, is_exhausted=is_exhausted, draws=draws)
        rest.has_ended = bool(votes)
        return rest

    def _look_ahead(self, current: Pass, batch: Any) -> Any:
        """Ask the loader for one more while `batch`, the last by its length, is in use; return that batch.

        It is returned as a copy: the iterator may write into its memory at the next call.
        """
        compute = self._compute
        with compute.lifetime.running():
            compute.submit_if_ready()  # the round before: it does not hold this last batch
        last = self._last_update
        is_ahead = current.looks_ahead and current.num_out > 1
        if last is not None and (
            current.num_out * current.per_batch >= compute.num_lacking(last)
            if is_ahead
            else compute.rounds.steps_once_installed + compute.ends_with_next >= last
        ):
            return batch  # the end is known, and a batch that came now would be lost
        loader = current.loader
        if isinstance(loader, EchoLoader) and loader.has_more(compute.ends_with_next):
            return batch  # which one comes is chosen at the parameters that it meets
        batch = passes.own_tensors(batch)
        if current.look_ahead(self.input.take) and not is_ahead:
            compute.rounds.end_data()
        return batch

    def _pass_rounds(self, current: Pass) -> None:
        """Take part in rounds without data until the agreed end."""
        compute = self._compute
        passes.check_trained(compute.where, current.num_fed, compute.num_counted, compute.rounds.steps)
        compute.rounds.end_data()
        while not self._is_over(current.until):
            self._pass_round()

    def _pass_round(self) -> None:
        """Take the next step of a rank without data: complete a round, then close one, in the same order as ranks
        with data.

        Guards look at a round before the round ahead of it is complete, on all ranks alike. If no rank has data, the
        accumulating round is empty everywhere, and stays open.
        """
        compute = self._compute
        if compute.overlaps:
            compute.submit_if_ready()
            arrived = compute.wait_for_lane()
            votes = {Vote.GO_ON} if arrived is None else set(arrived.report.votes)
            self._keep(compute.end_round() if votes & {Vote.GO_ON, Vote.STOP} else compute.finish_round())
        else:
            self._keep(compute.finish_round() if compute.has_round_ready else compute.end_round())
        self._install_up_to(self._last_update)

    def _end(self, current: Pass) -> None:
        """Complete the remaining rounds of all ranks, and show the committed parameters; all ranks reach this at the
        same round.
        """
        compute = self._compute
        rounds = compute.rounds
        gone = [rank for rank, vote in enumerate(rounds.votes) if vote == Vote.FINISHING]
        if gone and rounds.vote == Vote.GO_ON and Vote.STOP not in rounds.votes:
            _log.warning(
                "%s: ranks %s have left their loops and finished, which ends the pass here, too: to end a pass early "
                "call parallel.stop() on one rank, or break on all ranks after the same update",
                compute.where,
                gone,
            )
        if not current.has_ended:  # or these are votes about what was left after the end of the data
            compute.rounds.end_pass()
        if compute.rounds.have_data_ended(current.until):
            current.end()
        with compute.rounds.finishing(forgets=False):
            while not self._is_finished():
                self._pass_round()
        if compute.model.shown == "estimate":
            compute.show_committed()
            compute.model.until_training()
        is_known = current.looks_ahead and (current.depth is not None or current.per_batch == 1)
        current.leave_behind(current.num_out > 0 and not is_known)

    def _is_finished(self) -> bool:
        """Return whether every update has ended and no rank has data left; the same on all ranks."""
        agreed = self._compute.rounds.have_all_left()
        agreement, last = self._job.replica.sync, self._last_update
        # Ranks that step alone come to the last update at different times, and meet at an average behind it.
        has_met = agreement.is_synced or not agreement.steps_alone
        has_enough = last is not None and self._compute.rounds.steps >= last and has_met
        return (agreed or has_enough) and self._compute.is_between_updates

    # At rest

    def state_of(self, loader: Any) -> Any:
        """Return the state of a loader, for a checkpoint: the state after the last returned batch.

        Raises:
            CheckpointError: It has none, and the loop does not take its batches from it.
        """
        current = self._pass
        if again.has_state(loader):
            state = (
                current.state if current is not None and current.loader is loader and current.ahead else None
            )
            return loader.state_dict() if state is None else state
        if self._again is not None and self._again[0] is loader:
            return self._again[1]
        if self._compute.num_counted and (current is None or current.loader is not loader):
            raise CheckpointError(
                f"loader: a {type(loader).__name__} has no state_dict(), and feed() gives out those of another object: "
                "give feed() this very loader, or take a StatefulDataLoader of torchdata"
            )
        return {
            "now": again.draws_of(loader, self._device),
            "begun": None if current is None else current.draws,
            "position": 0 if current is None else current.position,
            "digest": 0 if current is None else again.digest_of(current.last),
        }

    @property
    def unsaved(self) -> str:
        """What only the loader's own state restores of the last pass: "loop" (without `feed`), "draws", or nothing."""
        if self._is_unfed:
            return "loop"
        return "draws" * (self._pass is not None and bool((self._pass.draws or {}).get("generators")))

    def restore(self, loader: Any, state: Any, place: Mapping[str, Any]) -> str:
        """Bring a loader to its saved position, inside the pass at `place` or after it; return a note if that is not
        exact.

        Raises:
            CheckpointError: The state belongs to a loader of another kind.
        """
        is_counted = isinstance(state, Mapping) and state.keys() == {"now", "begun", "position", "digest"}
        if again.has_state(loader) == is_counted:
            raise CheckpointError(
                f"loader: {type(loader).__name__} {'has' if is_counted else 'has no'} state_dict(), expected a loader "
                "like the one that was saved, which differs in it"
            )
        if not is_counted:
            loader.load_state_dict(state)
            return ""
        self._again = None
        again.draw_as(loader, state["now"])
        if not place or place["is_left"]:
            return ""
        batches, note = iter(()), ""
        if not (place["is_exhausted"] or place["votes"]):
            batches, note = again.rest_of_pass(loader, state, self._device)
        self._again = loader, state, batches
        return note

    def pass_state(self) -> Mapping[str, Any] | None:
        """Return the position of the pass in progress, for a checkpoint with the loader's state; None without a pass.

        A pass that ended early counts too: its rest does not follow.
        """
        if self._restored is not None:
            return self._restored
        current, is_left = self._pass, not self._is_feeding
        if current is None or (is_left and current.is_exhausted):
            return None
        has_ended = not is_left and (current.has_ended or self._compute.rounds.have_data_ended(current.until))
        return {
            "is_left": is_left,
            "position": current.position,
            "is_exhausted": current.is_exhausted,
            "votes": [int(vote) for vote in self._compute.rounds.votes] if has_ended else [],
            "num_out": self._num_out(current),
        }

    def _num_out(self, current: Pass) -> int:
        """Return how many uncounted batches the loop holds, if it looks ahead."""
        if self._num_late is not None:
            return -(-self._num_late // current.per_batch)
        counted = self._compute.num_counted > current.num_counted
        return current.num_out - counted if current.looks_ahead and current.num_fed > 1 else 0

    def go_on(self, state: Mapping[str, Any] | None) -> None:
        """Let the next pass be the rest of the pass in which `pass_state()` was saved."""
        self._restored, self._num_late = state, None
        self._again = None if state is None else self._again
        if self._pass is not None:
            self._pass.leave_behind(False)

    def end(self) -> None:
        """End after the committed updates; all ranks call this after the same update."""
        self._last_update, self._num_changes = self._compute.rounds.steps, -1

    def rest(self) -> None:
        """Prepare to show, save or load committed state on all ranks: end a pass whose batches are no longer
        counted.
        """
        current = self._pass
        if current is not None and current.num_counted == self._compute.num_counted:
            self.close()

    def finish(self) -> None:
        """Complete every round, and average the replicas; all ranks must call it."""
        self.close()
        self._compute.rounds.finish()
        while not (self._is_finished() and self._job.replica.sync.is_synced):
            self._pass_round()

    def commit(self) -> list[Update]:
        """Commit the counted micro-batches and complete every round; all ranks call this after the same micro-batch."""
        compute = self._compute
        self.close()
        if self._pass is not None:
            self._pass.leave_behind(False)
        compute.check_alike("commit()")
        with compute.rounds.finishing(forgets=True):
            while not compute.is_between_updates:
                self._pass_round()
        return self.take_committed()
