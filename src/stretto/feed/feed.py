"""The beginning and the end of a pass over the data, at which all ranks come to the same end.

Note [The end of the data]
    Ranks learn from the round reports that one of them has no more data. A loader with a length is asked once more
    before the batch of that number is handed out. If nothing comes, the rank says so with its last batch, so that no
    round is needed for the news, and what the loader does at its end has been done. If a batch comes, the length was
    wrong, and the loader is as one without a length: exhausted when it is asked and has nothing. So a length is a hint
    and the iterator is the truth.

    A rank without data goes on in here: it hands over what it has accumulated, then empty rounds, until all have
    agreed. Then all land what is left, so that every update has ended and the model shows committed parameters. Where
    the number of updates is given, nothing is accumulated after the last one: its rounds are landed at once.

Note [Batches that are out]
    A loop may ask for the next batch before it has counted the one in hand: between forward and backward pass, or to
    see which batch is the last. Then as many batches are out whenever it asks, from its first batch on, and few. A
    loop that skips batches has at some time none out, or ever more. Where a loop that looks ahead asks and there is
    nothing more to hand out, the iterator stops, and the pass ends when the micro-batches of the batches that are out
    are counted, inside that call. A loop that skips its first few batches cannot be told from it: its pass ends with
    the job's next call for rest, the next `feed`, `finish` or `commit`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from stretto.echo.loader import EchoLoader
from stretto.engine import Job
from stretto.engine.compute_lane import Until
from stretto.engine.report import Vote
from stretto.feed import passes
from stretto.feed.batches import Batches, Pass
from stretto.feed.updates import JobUpdates
from stretto.records import Update


class Feed(Batches):
    """The batches of one job's rank, with all that no batch passes.

    Args:
        job: Of this rank.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._restored: Mapping[str, Any] | None = None
        """What a checkpoint says of the pass it was saved in, until the next pass begins."""

    def state_of(self, loader: Any) -> Any:
        """Return the state of a loader, for a checkpoint: that behind the batch that was handed out last."""
        current = self._pass
        if current is not None and current.loader is loader and current.ahead and current.state is not None:
            return current.state
        return loader.state_dict()

    def pass_state(self) -> dict[str, Any] | None:
        """Return where the pass under way is, for a checkpoint with the loader's state; None where there is none.

        One that was left before its end counts: its rest is not what comes next.
        """
        current, is_left = self._pass, not self._is_feeding
        if current is None or (is_left and current.is_exhausted):
            return None
        has_ended = not is_left and (current.has_ended or self._compute.course.have_data_ended(current.until))
        return {
            "is_left": is_left,
            "position": current.position,
            "is_exhausted": current.is_exhausted,
            "votes": [int(vote) for vote in self._compute.course.votes] if has_ended else [],
            "num_out": self._num_out(current),
        }

    def _num_out(self, current: Pass) -> int:
        """Return how many batches the loop holds that it has not counted, where it looks ahead."""
        if self._num_late is not None:
            return -(-self._num_late // current.per_batch)
        counted = self._compute.num_counted > current.num_counted
        return current.num_out - counted if current.looks_ahead and current.num_fed > 1 else 0

    def go_on(self, state: Mapping[str, Any] | None) -> None:
        """Let the next pass be the rest of the one in which `pass_state()` was saved."""
        self._restored, self._num_late = state, None
        if self._pass is not None:
            self._pass.leave_behind(False)

    def end(self) -> None:
        """Go no further than the updates that are committed; all ranks come here after the same one."""
        self._last_update = self._compute.course.steps

    def rest(self) -> None:
        """All ranks are about to show, save or load what is committed: end a pass of which nothing more is counted."""
        current = self._pass
        if current is not None and current.num_counted == self._compute.num_counted:
            self.close()

    def drain(self) -> None:
        """Land everything, and have replicas averaged; all ranks must call."""
        self.close()
        self._compute.course.finish()
        while not (self._is_drained() and self._job.replica.agreement.is_united):
            self._pass_round()

    def commit(self) -> list[Update]:
        """Commit what this rank has counted and land everything; all ranks come here after the same micro-batch."""
        compute = self._compute
        self.close()
        if self._pass is not None:
            self._pass.leave_behind(False)
        compute.check_alike("commit()")
        with compute.course.finishing(forgets=True):
            while not compute.is_clear:
                self._pass_round()
        return self.take_landed()

    def _begin_pass(self, loader: Iterable[Any], until: Until) -> Pass:
        """Begin a pass, or go on with the one that a checkpoint was saved in the end of."""
        self._compute.course.begin_pass()
        restored, self._restored = self._restored, None
        if restored is not None and restored["is_left"]:
            passes.leave(loader)
            restored = None
        batches = self.input.begin(loader, JobUpdates(self._job))
        if restored is None:
            last = self._pass
            if last is None or last.batches is not batches:
                return Pass(loader, batches, passes.length_of(loader), until)
            is_same = not last.is_exhausted
            return Pass(loader, batches, passes.length_of(loader), until, ahead=last.ahead, is_same=is_same)
        length = passes.length_of(loader)
        batches, votes = passes.rest_of(restored, loader, batches)
        if votes:
            self._compute.course.resume_pass(votes)
        at, is_exhausted = int(restored["position"]), bool(restored["is_exhausted"])
        return Pass(loader, batches, length, until, at, is_exhausted=is_exhausted, has_ended=bool(votes))

    def _look_ahead(self, current: Pass, batch: Any) -> Any:
        """Ask the loader once more while `batch`, the last by its length, is in hand; return that batch.

        It is returned as a copy: whoever is asked again may write into its memory, or give it back.
        """
        compute = self._compute
        with compute.lifetime.running():
            compute.take_off_if_ready()  # the round before: it does not hold this last batch
        last = self._last_update
        is_ahead = current.looks_ahead and current.num_out > 1
        if last is not None and (
            current.num_out * current.per_batch >= compute.num_lacking(last)
            if is_ahead
            else compute.course.steps_in_sight + compute.ends_with_next >= last
        ):
            return batch  # the end is known, and a batch that came now would be lost
        loader = current.loader
        if isinstance(loader, EchoLoader) and loader.has_more(compute.ends_with_next):
            return batch  # which one comes is chosen at the parameters that it meets
        batch = passes.own_tensors(batch)
        if current.look_ahead(self.input.take) and not is_ahead:
            compute.course.exhaust()
        return batch

    def _pass_rounds(self, current: Pass) -> None:
        """Take part in rounds without data until the agreed end."""
        compute = self._compute
        passes.check_trained(compute.where, current.num_fed, compute.num_counted, compute.course.steps)
        compute.course.exhaust()
        while not self._is_over(current.until):
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
            votes = {Vote.GO_ON} if landing is None else set(landing.reduction.report.votes)
            self._keep(compute.end_round() if votes & {Vote.GO_ON, Vote.STOP} else compute.fly())
        else:
            self._keep(compute.fly() if compute.has_round_ready else compute.end_round())
        self._land_in_sight(self._last_update)

    def _end(self, current: Pass) -> None:
        """Land what is left on any rank, and show the committed parameters; all ranks come here at the same round."""
        compute = self._compute
        if not current.has_ended:  # or these are votes about what was left after the end of the data
            compute.course.end_pass()
        if compute.course.have_data_ended(current.until):
            current.end()
        with compute.course.finishing(forgets=False):
            while not self._is_drained():
                self._pass_round()
        if compute.model.shown == "estimate":
            compute.show_committed()
            compute.model.until_training()
        is_known = current.looks_ahead and (current.depth is not None or current.per_batch == 1)
        current.leave_behind(current.num_out > 0 and not is_known)

    def _is_drained(self) -> bool:
        """Return whether every update has ended and nobody has anything left to contribute; the same on all ranks."""
        agreed = self._compute.course.have_all_left()
        agreement = self._job.replica.agreement
        # Ranks that step alone come to the last update at different times, and meet at an average behind it.
        has_enough = self._has_enough() and (agreement.is_united or not agreement.steps_alone)
        return (agreed or has_enough) and self._compute.is_clear
