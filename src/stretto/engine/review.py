"""The review of a round: its gradients were taken at what was installed, or they are taken again, or left out."""

import dataclasses
from collections.abc import Iterator

from stretto.engine.accumulation import Accumulation
from stretto.engine.guarded_model import GuardedModel
from stretto.engine.kept_round import KeptRound, LossFunction
from stretto.engine.lane import Lane
from stretto.engine.runtime import Runtime
from stretto.errors import UsageError
from stretto.flat import GradientBuffer
from stretto.guards.contract import Appointment
from stretto.records import Incident


class Review:
    """Looks at a round once its last micro-batch has been counted, before it is handed over.

    Args:
        guarded: The model, whose parameters may have been damaged.
        lane: Has masters to take parameters from, where it holds all of them.
        runtime: Of the lane.
    """

    def __init__(self, guarded: GuardedModel, lane: Lane, runtime: Runtime) -> None:
        self._guarded = guarded
        self._lane = lane
        self._runtime = runtime
        self.kept = KeptRound(guarded.model, lane.owner.layout.sets[0].device)

    def begin(self, loss_function: LossFunction, batch: object) -> None:
        """Take note of a micro-batch that could be run again, before its forward pass."""
        if self._lane.sentry.keeps_rounds:
            self.kept.begin(loss_function, batch)

    def count(self, weight: float, samples: int) -> None:
        """Take note that a micro-batch has been counted, whether it could be run again or not.

        Raises:
            UsageError: It could not, and a guard has to.
        """
        self.kept.end(weight, samples)
        if not self.kept.is_whole and self._lane.sentry.needs_rounds:
            names = ", ".join(guard.name for guard in self._lane.sentry.guards if guard.needs_rounds)
            raise UsageError(
                f"guard {names} runs micro-batches again, and this one came by way of backward or step: expected "
                "parallel.micro_batch(loss_function, batch) for each"
            )

    def forget(self) -> None:
        """Let go of the round: it is handed over."""
        self.kept.forget()

    def inspect(self, accumulation: Accumulation, step: int, *, lane_is_idle: bool) -> list[Incident]:
        """Take the round's gradients anew if parameters were damaged while they were taken, or leave them out.

        Args:
            accumulation: The round.
            step: The update that is under way.
            lane_is_idle: Whether nobody writes the masters.
        """
        if not accumulation.contribution.count:
            return []
        found = self._guarded.mend_damaged(self._lane.exchange.rank, step)
        if not found:
            return []
        count = accumulation.contribution.count
        outcome = "this rank's micro-batches of the round replayed"
        if not self._replay(accumulation, lane_is_idle=lane_is_idle):
            accumulation.begin(accumulation.buffer).attach()
            accumulation.contribution.count = count
            accumulation.is_left_out = True
            outcome = "this rank's gradients of the round left out"
        return [dataclasses.replace(incident, action=f"{incident.action}, {outcome}") for incident in found]

    def appointments(self, round_index: int) -> Iterator[tuple[str, Appointment]]:
        """Yield the audits that are due, with the name of the guard."""
        for guard in self._lane.sentry.guards:
            appointment = guard.audit(round_index, self._lane.exchange.world_size)
            if appointment is not None:
                yield guard.name, appointment

    def _replay(self, accumulation: Accumulation, *, lane_is_idle: bool) -> bool:
        """Run the round's micro-batches again, and return whether they ran on what was installed."""
        if not self.kept.is_whole or not self._is_installed(lane_is_idle=lane_is_idle):
            return False
        accumulation.begin(accumulation.buffer).attach()
        self.kept.run(accumulation, lambda: self._runtime.charge("micro-batch"))
        return self._guarded.is_as_installed()

    def _is_installed(self, *, lane_is_idle: bool) -> bool:
        """Return whether the parameters are mended, or could be taken from the masters of a replicated optimizer."""
        if self._guarded.is_as_installed():
            return True
        if not self._lane.replicated or not lane_is_idle:
            return False
        values = GradientBuffer(self._lane.owner.layout)
        self._lane.owner.publish(values.flats)
        return self._guarded.install_again(values.views)
