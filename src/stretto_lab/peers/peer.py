"""The training loop around a stock method: it counts micro-batches, agrees with other ranks on the end, and reports
updates.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from stretto.echo.statistics import InputStatistics
from stretto.engine.round import Weighed, weighed
from stretto.errors import ConfigError
from stretto.groups import SoloGroup, ThrottledGroup, private_group, release
from stretto.groups.collectives import method_of
from stretto.optimizer import learning_rate
from stretto.records import Incident, Update

Batch = TypeVar("Batch")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NoOptions:
    """The options of a method without options."""


class Peer:
    """A stock method with the interface of `DataParallel`, over all ranks of the job.

    A subclass says how the model is wrapped, how gradients are kept from being exchanged before the last micro-batch of
    an update, and how the optimizer steps.

    Besides gradients the ranks exchange counts, weights, losses and the wish to stop: one small all-gather per update
    on a plain Gloo group, which is not measured and runs during the last backward pass.

    The forward pass goes through `model`, which may be a wrapper. `settled` is for looking at the model that was
    given. Its buffers are not kept equal: rank 0's count. The stock method handles exceptions: when a process ends,
    the collectives of the others fail.
    """

    name: str
    """Name on the command line."""
    needs_launcher = True
    """Whether the method needs a job of `torch.distributed`."""
    options_type: type = NoOptions
    """Class of the method's options."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        micro_batches: int,
        *,
        clip_norm: float | None = None,
        scheduler: Any = None,
        options: Any = None,
    ) -> None:
        """Wrap `model` over all ranks of the job; all ranks must call.

        Args:
            model: On its device, with equal weights on all ranks. Train through the peer's `model`.
            optimizer: Over all trainable parameters of the model, not yet stepped; schedulers may set its rates.
            micro_batches: Per rank and update.
            clip_norm: Limit of the gradients' global norm; None does not clip.
            scheduler: Stepped at every update; None leaves it to the caller.
            options: An `options_type`; None takes its defaults.

        Raises:
            ConfigError: The method needs a job of `torch.distributed`, and there is none.
        """
        if self.needs_launcher and not dist.is_initialized():
            raise ConfigError(
                f"{self.name} needs torch.distributed: start with torchrun, or call init_process_group"
            )
        self.options = self.options_type() if options is None else options
        self.optimizer = optimizer
        self.micro_batches = micro_batches
        self.clip_norm = clip_norm
        self.scheduler = scheduler
        self._on_update: Callable[[Update], None] | None = None
        self.group = private_group()
        self.steps = 0
        self.rounds = 0
        self.late_incidents: tuple[Incident, ...] = ()
        self._control = dist.new_group(backend="gloo") if dist.is_initialized() else SoloGroup()
        self.measured: tuple[Any, ...] = (self.group,)  # whose bytes count
        self._tally = Tally()
        self._input = InputStatistics()
        self._ended = False
        self._sent_to_start = 0
        self.model = self.wrap(model)
        self._sent_to_start = self.sent_bytes
        self._sent_before = 0
        self._returned = time.monotonic()
        self.prepare(is_last=micro_batches == 1)

    # What a stock method does in its own way

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module for forward passes."""
        return model

    def prepare(self, is_last: bool) -> None:
        """Prepare for the next micro-batch; only the last one of an update exchanges gradients."""

    def step(self) -> None:
        """Change the parameters by the gradients."""
        self.optimizer.step()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Show the committed parameters in the given model during the block; all ranks must enter it."""
        yield

    def agree(self, tally: "Tally") -> Callable[[], "Totals"]:
        """Start to exchange tallies; the returned function waits for the other ranks' tallies."""
        own = tally.as_tensor()
        everybody = own.new_empty(self.world_size * len(own))
        work = method_of(self._control, "all_gather_single")(everybody, own)

        def totals() -> Totals:
            work.wait()
            return Totals.of(everybody.view(self.world_size, -1))

        return totals

    # The interface of `DataParallel`

    @property
    def rank(self) -> int:
        """This process's position among the job's ranks."""
        return self.group.rank()

    @property
    def world_size(self) -> int:
        return self.group.size()

    @property
    def begins_update(self) -> bool:
        """Whether the next micro-batch is the first of an update."""
        return self._tally.micro_batches == 0

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank has sent since the start; 0 if the group does not count them (only throttled groups do)."""
        counting = [group for group in self.measured if isinstance(group, ThrottledGroup)]
        return sum(group.sent_bytes for group in counting) - self._sent_to_start

    def feed(
        self,
        loader: Iterable[Batch],
        updates: int | None = None,
        on_update: Callable[[Update], None] | None = None,
    ) -> Iterator[Batch]:
        """Yield micro-batches until all ranks end at the same update.

        It works as `DataParallel.feed`, except that a rank whose data have ended repeats its last batch at weight zero:
        a stock method needs a backward pass on every rank.
        """
        self._on_update = on_update
        batches, nothing = self._input.begin(loader, PeerUpdates(self)), object()
        batch: Any = nothing
        while not self._ended and (updates is None or self.steps < updates):
            following, use = (nothing, 0) if self._tally.exhausted else self._input.take(batches, nothing)
            if following is not nothing:
                batch = following
                self._input.uses.append(use)
            elif batch is nothing:
                raise ConfigError(
                    f"rank {self.rank}: the loader has no batch; expected at least one per rank"
                )
            else:
                self._tally.exhausted = True  # from here on with weight zero, so that collectives still match
            yield batch

    def backward(self, loss: Tensor, weight: float = 1.0, samples: int = 1) -> Update | None:
        """Run one micro-batch's backward pass; return the update that it completed, or None."""
        counted = 0.0 if self._tally.exhausted else weight
        self._tally.add(loss, counted, samples, self._input.note(loss, counted, samples))
        is_last = self._tally.micro_batches == self.micro_batches
        totals = self.agree(self._tally) if is_last else None
        (loss * (counted / self.micro_batches)).backward()
        update = None if totals is None else self._update(totals())
        if update is not None and self._on_update is not None:
            self._on_update(update)
        self.prepare(is_last=self._tally.micro_batches + 1 == self.micro_batches)
        return update

    def micro_batch(
        self,
        loss_function: Callable[[Batch], Tensor | Weighed],
        batch: Batch,
        weight: float = 1.0,
        samples: int = 1,
    ) -> Update | None:
        """Run one micro-batch's forward and backward pass; as `DataParallel.micro_batch`."""
        return self.backward(*weighed(loss_function(batch), weight, samples))

    def stop(self) -> None:
        """Ask all ranks to end `feed` after the update in progress."""
        self._tally.stop = True

    def end(self) -> None:
        """End `feed` after the last update; all ranks must call it, in `on_update`."""
        self._ended = True

    def finish(self) -> list[Update]:
        """End the job; all ranks must call. Micro-batches of an incomplete update are dropped.

        Returns:
            No update: a stock method has nothing in flight.
        """
        self.optimizer.zero_grad()
        self._ended = True
        for group in (self.group, self._control):
            release(group)
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    # An update

    def _update(self, totals: "Totals") -> Update | None:
        """Step and report, unless all weights were zero."""
        rates = tuple(map(learning_rate, self.optimizer.param_groups))
        self.rounds += 1
        self._tally = Tally()
        self._ended = totals.ends
        norm = math.nan
        if totals.weight > 0:
            # A gradient is now the mean over ranks of  Σ weight · g / micro_batches.
            norm = self._scale_and_clip(self.world_size * self.micro_batches / totals.weight)
            self.step()
            self.steps += 1
            if self.scheduler is not None:
                self.scheduler.step()
        self.optimizer.zero_grad()
        return self._input.fill(self._record(totals, norm, rates)) if totals.weight > 0 else None

    def _scale_and_clip(self, scale: float) -> float:
        """Scale and clip the gradients; return their norm, or NaN without clipping, since a stock loop does not compute
        it.
        """
        # In the model's order, as a plain loop hands them over: the order decides the last bit of the norm.
        parameters = list(self.model.parameters())
        if scale != 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        if self.clip_norm is None:
            return math.nan
        norm: Any = nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # FSDP2 gives a DTensor

    def _record(self, totals: "Totals", norm: float, learning_rates: tuple[float, ...]) -> Update:
        now, sent = time.monotonic(), self.sent_bytes
        update = Update(
            step=self.steps,
            round_index=self.rounds - 1,
            samples=totals.samples,
            fresh_samples=totals.fresh_samples,
            weight=totals.weight,
            loss=totals.loss,
            gradient_norm=norm,
            staleness=0,
            micro_batches=totals.micro_batches,
            rounds=(totals.micro_batches,),
            seconds=now - self._returned,
            lane_seconds=math.nan,
            exposed_seconds=math.nan,
            sent_bytes=sent - self._sent_before,
            learning_rates=learning_rates,
            skipped_rounds=0,
        )
        self._returned, self._sent_before = now, sent
        return update


class PeerUpdates:
    """Gives an `EchoLoader` the update of its next batch; a stock method's parameters are not compared.

    Args:
        peer: The method on this rank.
    """

    is_fixed = True

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.micro_batches = peer.micro_batches

    def begins(self, slot: int) -> bool:
        """Return whether the next batch is the first of an update."""
        return self._peer.begins_update

    def parameters(self) -> int | None:
        return None


@dataclasses.dataclass(kw_only=True, slots=True)
class Tally:
    """The counts of one rank since the last update."""

    micro_batches: int = 0
    """Number of micro-batches, including those of weight zero."""
    counted: int = 0
    """Number of micro-batches with a weight."""
    weight: float = 0.0
    """Sum of the weights."""
    loss_sum: float = 0.0
    """Sum of weight times loss."""
    samples: int = 0
    """Samples in the micro-batches that had a weight."""
    fresh_samples: int = 0
    """Samples used for the first time."""
    stop: bool = False
    """Whether this rank wants to end."""
    exhausted: bool = False
    """Whether this rank's data have ended."""

    def add(self, loss: Tensor, weight: float, samples: int, fresh_samples: int) -> None:
        """Count one micro-batch."""
        self.micro_batches += 1
        if weight > 0:
            self.counted += 1
            self.weight += weight
            self.loss_sum += weight * float(loss.detach())
            self.samples += samples
            self.fresh_samples += fresh_samples

    def as_tensor(self) -> Tensor:
        """Return the counts for the other ranks in float64, which holds all of them exactly."""
        counts = (self.counted, self.weight, self.loss_sum, self.samples, self.fresh_samples)
        return torch.tensor((*counts, self.stop, self.exhausted), dtype=torch.float64)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """The counts of all ranks since the last update."""

    micro_batches: tuple[int, ...]
    """Number of micro-batches with a weight, by rank."""
    weight: float
    """Sum of the weights of all ranks."""
    loss: float
    """Weighted mean; NaN if all weights are zero."""
    samples: int
    """Samples in those micro-batches."""
    fresh_samples: int
    """Samples used for the first time."""
    ends: bool
    """Whether the job ends with this update: a rank wants to stop, or its data have ended."""

    @classmethod
    def of(cls, tallies: Tensor) -> "Totals":
        """Return the sums over the rows of `Tally.as_tensor`, one row per rank."""
        counted, weights, loss_sums, samples, fresh_samples, stops, exhausted = tallies.t().tolist()
        weight = math.fsum(weights)
        return cls(
            micro_batches=tuple(map(int, counted)),
            weight=weight,
            loss=math.fsum(loss_sums) / weight if weight > 0 else math.nan,
            samples=int(sum(samples)),
            fresh_samples=int(sum(fresh_samples)),
            ends=any(stops) or any(exhausted),
        )
