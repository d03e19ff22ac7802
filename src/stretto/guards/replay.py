"""Rounds that guards can run again: the kept micro-batches, and the guards' work on the compute lane."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stretto.checksums import on_host, same_bytes
from stretto.engine.accumulation import Accumulation, GradientBuffer
from stretto.engine.buffers import is_comparable
from stretto.engine.frozen_state import frozen_state
from stretto.engine.job import Job
from stretto.engine.round import Listener, LossFunction, weighed
from stretto.engine.runtime import VirtualTime
from stretto.errors import UsageError
from stretto.flat import shard_of
from stretto.guards.interpreter import GuardInterpreter
from stretto.random_states import random_states, restore_random_states
from stretto.records import Incident


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One forward and backward pass, and the random states at its start."""

    batch: Any
    weight: float
    samples: int
    fresh_samples: int
    random: dict[str, Any]
    """Random states before it."""


class KeptRound:
    """The micro-batches of the accumulating round: references to batches, and copies of random states and buffers.

    If a micro-batch was counted without its loss function, the round cannot be run again.

    Args:
        model: Its forward passes change its buffers.
        device: The model's device.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self.device = device
        # The latest loss function; kept after its round, because another rank's round may be run with it.
        self._loss_function: LossFunction | None = None
        self.forget()

    def forget(self) -> None:
        """Drop the kept micro-batches and begin the next round."""
        self.micro_batches: list[MicroBatch] = []
        self._buffers: dict[str, Tensor] = {}
        self._begun: tuple[Any, dict[str, Any]] | None = None
        self._count = 0

    @property
    def is_whole(self) -> bool:
        """Whether all micro-batches of the round were kept."""
        return len(self.micro_batches) == self._count

    def begin(self, loss_function: LossFunction, batch: Any) -> None:
        """Keep the batch and random states of the next micro-batch; before the first one, also the model's buffers."""
        if self._count == 0:
            self._buffers = self.buffers()
        self._loss_function = loss_function
        self._begun = batch, random_states(self.device)

    def end(self, weight: float, samples: int, fresh_samples: int) -> None:
        """Count a micro-batch, kept or not."""
        self._count += 1
        if self._begun is not None:
            batch, states = self._begun
            self._begun = None
            kept = MicroBatch(
                batch=batch, weight=weight, samples=samples, fresh_samples=fresh_samples, random=states
            )
            self.micro_batches.append(kept)

    def run(self, accumulation: Accumulation, virtual_time: VirtualTime | None) -> None:
        """Run all micro-batches again, from the buffers and random states of the first run.

        Buffers end with the values of the first run, or with correct ones if that run was damaged. Random states are
        restored.

        Args:
            accumulation: Receives the gradients; must be attached.
            virtual_time: Charged for each micro-batch.
        """
        now = random_states(self.device)
        self.restore_buffers(self._buffers)
        for micro_batch in self.micro_batches:
            restore_random_states(micro_batch.random, self.device)
            if self._loss_function is None:
                raise UsageError(
                    "this rank must repeat a micro-batch of another rank, and has no loss function yet, because "
                    "it has had no batch: expected at least one batch on every rank"
                )
            loss, _, _ = weighed(self._loss_function(micro_batch.batch), 0.0, 0)
            accumulation.backward(loss, micro_batch.weight)
            loss = loss.reshape(())
            accumulation.count(micro_batch.weight, loss, micro_batch.samples, micro_batch.fresh_samples)
            if virtual_time is not None:
                virtual_time.charge("micro-batch", 0)
        restore_random_states(now, self.device)

    def buffers(self) -> dict[str, Tensor]:
        """Return copies of the model's present buffers, by name; others are not looked at."""
        return {name: one.detach().clone() for name, one in self._model.named_buffers() if is_comparable(one)}

    def restore_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Restore the buffers that have changed; the others are not written, so that their version counters do not
        change.
        """
        known = [
            (buffer, values[name])
            for name, buffer in self._model.named_buffers()
            if name in values and is_comparable(buffer)
        ]
        are_same = on_host([same_bytes(*pair) for pair in known])
        with torch.no_grad():
            for (buffer, value), is_same in zip(known, are_same, strict=True):
                if not is_same:
                    buffer.copy_(value)

    def correct(self, name: str, buffer: Tensor) -> None:
        """Replace the initial value of a buffer for reruns of this round, because it was damaged."""
        if name in self._buffers:
            self._buffers[name] = buffer.detach().clone()

    @property
    def first_buffers(self) -> dict[str, Tensor]:
        """Return copies of the round's initial buffers, by name; if no round has begun, of the current ones."""
        return self._buffers or self.buffers()

    def of(self, micro_batches: list[MicroBatch], buffers: dict[str, Tensor]) -> "KeptRound":
        """Return another rank's round, to be run with this rank's model and loss function."""
        kept = KeptRound(self._model, self.device)
        kept._loss_function, kept._buffers, kept.micro_batches = self._loss_function, buffers, micro_batches
        return kept


class GuardedRounds(Listener):
    """Receives the events of the compute lane for all guards of a job.

    Args:
        job: This rank's job.
        interpreter: Performs the guards' effects while the job is idle.
    """

    def __init__(self, job: Job, interpreter: GuardInterpreter) -> None:
        self.job = job
        self.kept = KeptRound(job.model.model, job.layout.sets[0].device)
        """The round that accumulates."""
        self.interpreter = interpreter
        watches = {guard.name: guard.watch_rounds(self) for guard in interpreter.guards}
        found = [watch for watch in watches.values() if watch is not None]
        # A damaged round is repaired before it is audited.
        self._watches = sorted(found, key=lambda watch: watch.needs_rounds)
        self._needing = [name for name, watch in watches.items() if watch is not None and watch.needs_rounds]

    def micro_batch_begins(self, loss_function: LossFunction, batch: object) -> None:
        """Keep the batch, the loss function and the random states of the micro-batch, to run it again."""
        if self._watches:
            self.kept.begin(loss_function, batch)

    def micro_batch_counted(self, weight: float, samples: int, fresh_samples: int) -> None:
        """Count the micro-batch, whether it was kept or not.

        Raises:
            UsageError: It was not kept, but a guard needs it.
        """
        self.kept.end(weight, samples, fresh_samples)
        if self._needing and not self.kept.is_whole:
            raise UsageError(
                f"guard {', '.join(self._needing)} runs micro-batches again, and this micro-batch came "
                "through backward or count_micro_batch: expected parallel.micro_batch(loss_function, batch) "
                "for each micro-batch"
            )

    def round_ends(self) -> Sequence[Incident]:
        """Let every guard check the round, and return the incidents."""
        return [incident for watch in self._watches for incident in watch.round_ends()]

    def round_closed(self) -> None:
        """Drop the kept round."""
        self.kept.forget()

    def install_begins(self) -> None:
        """Let guards check the values before the model shows them."""
        self.interpreter.run("before_install")
        self.interpreter.forget(("values to be shown",))

    def installed(self, values: Sequence[Tensor]) -> None:
        """Report the installed values to every guard."""
        for watch in self._watches:
            watch.installed(values)

    def committed_is_read(self) -> None:
        """Let guards check masters, optimizer state and the wire's residual before they are shown or saved."""
        self.interpreter.run("before_step")
        self.interpreter.run("before_reduce")

    def began_again(self) -> None:
        """Let guards start with the current state."""
        self.interpreter.start()
        for watch in self._watches:
            watch.begin_again()

    def ended(self) -> Sequence[Incident]:
        """Return the incidents found after the last update."""
        return self.interpreter.conclude_job()

    def frozen_state(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return, by name, frozen parameters and buffers: each as the model holds it, and this rank's part of it.

        Where the ranks of a node hold shards of one model, all must call.
        """
        model = self.job.model
        if self.job.node_group is None:
            return {name: (tensor, tensor) for name, tensor in frozen_state(model.model)}
        model.drop_copies()  # while a module is gathered, other tensors are in its parameters' places
        return {name: (tensor, shard_of(tensor)[0]) for name, tensor in frozen_state(model.model)}

    def agree(self, *, damaged: bool, able: bool) -> tuple[bool, bool]:
        """Return whether there is damage, and whether it can be handled.

        Where the ranks of a node hold shards of one model, none can act alone: all must call, and hear whether any has
        found damage, and whether all are able.
        """
        node_group = self.job.node_group
        return (
            (damaged, able) if node_group is None else node_group.agree_on_damage(damaged=damaged, able=able)
        )

    def run_again(self, kept: KeptRound) -> Accumulation:
        """Run a round again, separately from this rank's current round, and return its accumulation."""
        accumulation = Accumulation(self.job.model.parameters, GradientBuffer(self.job.layout))
        with self.job.compute.aside(accumulation):
            kept.run(accumulation, self.job.compute.runtime.virtual_time)
        return accumulation
