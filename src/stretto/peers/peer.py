"""What one rank has seen since the last update, and the sum of it over ranks.

What all stock methods share: counting micro-batches, agreeing on the end, and the records.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from stretto.echo.statistics import InputStatistics
from stretto.engine.listener import Weighed, weighed
from stretto.errors import ConfigError
from stretto.groups import SoloGroup, ThrottledGroup, private_group, release
from stretto.records import Incident, Update


@dataclasses.dataclass(kw_only=True, slots=True)
class Tally:
    """One rank's micro-batches since the last update."""

    micro_batches: int = 0
    """How many were run, those of weight zero included."""
    counted: int = 0
    """How many had a weight."""
    weight: float = 0.0
    loss_sum: float = 0.0
    """Sum of weight times loss."""
    samples: int = 0
    stop: bool = False
    """Whether this rank wants to end."""
    exhausted: bool = False
    """Whether this rank's data have ended."""

    def add(self, loss: Tensor, weight: float, samples: int) -> None:
        """Count one micro-batch."""
        self.micro_batches += 1
        if weight > 0:
            self.counted += 1
            self.weight += weight
            self.loss_sum += weight * float(loss.detach())
            self.samples += samples

    def as_tensor(self) -> Tensor:
        """What the other ranks need to know, in float64, which holds all counts exactly."""
        told = (self.counted, self.weight, self.loss_sum, self.samples, self.stop, self.exhausted)
        return torch.tensor(told, dtype=torch.float64)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """The tallies of all ranks."""

    micro_batches: tuple[int, ...]
    """How many had a weight, by rank."""
    weight: float
    loss: float
    """Weighted mean; nan without any weight."""
    samples: int
    stop: bool
    """Whether any rank wants to end."""
    exhausted: tuple[bool, ...]
    """Whose data have ended, by rank."""

    @classmethod
    def of(cls, tallies: Tensor) -> "Totals":
        """Sum up the rows of `Tally.as_tensor`, one per rank."""
        counted, weights, loss_sums, samples, stops, exhausted = tallies.t().tolist()
        weight = math.fsum(weights)
        return cls(
            micro_batches=tuple(map(int, counted)),
            weight=weight,
            loss=math.fsum(loss_sums) / weight if weight > 0 else math.nan,
            samples=int(sum(samples)),
            stop=any(stops),
            exhausted=tuple(map(bool, exhausted)),
        )

    def ends(self, until: Literal["any", "all"]) -> bool:
        """Whether the job ends with this update."""
        return self.stop or (any(self.exhausted) if until == "any" else all(self.exhausted))


Batch = TypeVar("Batch")


class Peer:
    """The loop around a stock method, with the handle of `DataParallel`, over all ranks of the job.

    A subclass says how the model is wrapped, how a micro-batch without exchange is run and how an update is made.

    What is agreed besides the gradients (weights, losses, the wish to stop) travels in one small all-gather per
    update, on a plain Gloo group beside the measured one and beside the last backward pass.

    The forward pass goes through `model`, which may be a wrapper; `settled` is for looking at the model that was
    given, whose buffers are not kept equal: rank 0's count. An exception is left to the stock method: the other
    ranks' collectives fail once this process is gone.
    """

    name: str
    """On the command line."""
    needs_launcher = True
    """Whether the method works in a job of `torch.distributed` only."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        micro_batches: int,
        *,
        clip_norm: float | None = None,
    ) -> None:
        """See `make_peer`."""
        if self.needs_launcher and not dist.is_initialized():
            raise ConfigError(
                f"{self.name} needs torch.distributed: start with torchrun, or call init_process_group"
            )
        self.optimizer = optimizer
        self.micro_batches = micro_batches
        self.clip_norm = clip_norm
        self.group = private_group()
        self.steps = 0
        self.rounds = 0
        self.late_incidents: tuple[Incident, ...] = ()
        self._control = dist.new_group(backend="gloo") if dist.is_initialized() else SoloGroup()
        self._tally = Tally()
        self._input = InputStatistics()
        self._until: Literal["any", "all"] = "any"
        self._ended = False
        self._sent_to_start = 0
        self.model = self.wrap(model)
        self._sent_to_start = self.sent_bytes
        self._sent_before = 0
        self._returned = time.monotonic()
        self.prepare(is_last=micro_batches == 1)

    # What a method is

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return what the forward pass goes through."""
        return model

    def prepare(self, is_last: bool) -> None:
        """Make ready for the forward and backward pass of a micro-batch, the last of its update or not."""

    def step(self) -> None:
        """Change the parameters by the gradients."""
        self.optimizer.step()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Show plain committed parameters in the given model inside the block; all ranks must enter."""
        yield

    # The handle

    @property
    def rank(self) -> int:
        """This process's position among the job's ranks."""
        return self.group.rank()

    @property
    def world_size(self) -> int:
        """How many ranks train."""
        return self.group.size()

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank has sent since the start; 0 where the group does not count (only throttled ones do)."""
        sent = self.group.sent_bytes if isinstance(self.group, ThrottledGroup) else 0
        return sent - self._sent_to_start

    def feed(
        self, loader: Iterable[Batch], updates: int | None = None, until: Literal["any", "all"] = "any"
    ) -> Iterator[Batch]:
        """Yield micro-batches until all ranks end at the same update.

        As `DataParallel.feed`, but that a rank whose data have ended sees its last batch again, at weight zero: a stock
        method needs a backward pass on every rank.
        """
        self._until = until
        self._input.begin(loader)
        batches, nothing = iter(loader), object()
        batch: Any = nothing
        while not self._ended and (updates is None or self.steps < updates):
            following: Any = nothing if self._tally.exhausted else self._input.take(batches, nothing)
            if following is not nothing:
                batch = following
            elif batch is nothing:
                raise ConfigError(
                    f"rank {self.rank}: the loader has no batch; expected at least one per rank"
                )
            else:
                self._tally.exhausted = True  # from here on with weight zero, so that collectives still match
            yield batch

    def backward(self, loss: Tensor, weight: float = 1.0, samples: int = 1) -> Update | None:
        """Run one micro-batch's backward pass; return the update that it completed, if it did."""
        self._tally.add(loss, 0.0 if self._tally.exhausted else weight, samples)
        self._input.note_loss(loss, 0.0 if self._tally.exhausted else weight)
        is_last = self._tally.micro_batches == self.micro_batches
        totals = self.agree(self._tally) if is_last else None
        share = 0.0 if self._tally.exhausted else weight / self.micro_batches
        (loss * share).backward()
        update = None if totals is None else self._update(totals())
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

    def agree(self, tally: Tally) -> Callable[[], Totals]:
        """Start to exchange tallies; the result waits for the others'."""
        own = tally.as_tensor()
        everybody = own.new_empty(self.world_size * len(own))
        work = self._control.all_gather_single(everybody, own)

        def totals() -> Totals:
            work.wait()
            return Totals.of(everybody.view(self.world_size, -1))

        return totals

    def stop(self) -> None:
        """Ask all ranks to end `feed` after the update under way."""
        self._tally.stop = True

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

    def _update(self, totals: Totals) -> Update | None:
        """Commit unless all weights were zero, and report."""
        rates = tuple(float(group["lr"]) for group in self.optimizer.param_groups)
        self.rounds += 1
        self._tally = Tally()
        self._ended = totals.ends(self._until)
        norm = math.nan
        if totals.weight > 0:
            # Gradients are now means over ranks of the sum over micro-batches of weight / micro_batches.
            norm = self._scale_and_clip(self.world_size * self.micro_batches / totals.weight)
            self.step()
            self.steps += 1
        self.optimizer.zero_grad()
        return self._input.fill(self._record(totals, norm, rates)) if totals.weight > 0 else None

    def _scale_and_clip(self, scale: float) -> float:
        """Return the gradients' norm before clipping; nan without clipping: a stock loop does not compute it."""
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

    def _record(self, totals: Totals, norm: float, learning_rates: tuple[float, ...]) -> Update:
        now, sent = time.monotonic(), self.sent_bytes
        update = Update(
            step=self.steps,
            round_index=self.rounds - 1,
            samples=totals.samples,
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
