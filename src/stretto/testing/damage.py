"""Damage that a check plants in the memory of a running job, between two updates."""

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from stretto.errors import ConfigError
from stretto.parallel import DataParallel

Site = Literal["masters", "optimizer state", "shown parameters", "gradient"]
Outcome = Literal["repaired", "reported", "ends the job"]

_BIT = 1 << 22
"""Of every damaged float32 word: the highest bit of the mantissa, so that the value stays finite."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """Bits flipped on one rank behind one update, and what a guard promises about it."""

    site: Site
    """Which tensor: the first of the owner's masters, of its optimizer's state, or of the model's parameters; or the
    gradient that this parameter is given by the next backward pass."""
    outcome: Outcome = "repaired"
    """Promised: the run ends as the clean one, to the bit; or the damage is named only; or the job ends with an
    error."""
    words: int = 1
    """Damaged float32 words, spread evenly over the tensor."""
    rank: int = 1
    """Whose memory; taken modulo the number of ranks."""
    behind: int = 2
    """The update after which it strikes, from 1: momentum exists by then."""

    def strike(self, parallel: DataParallel) -> None:
        """Flip the bits, if this is the rank."""
        if parallel.rank != self.rank % parallel.world_size:
            return
        if self.site == "gradient":
            self._strike_next_gradient(parallel.compute.guarded.parameters[0])
        else:
            self._flip(self._target(parallel))

    def _flip(self, tensor: Tensor) -> None:
        # Through `.data`: faulty memory tells no version counter.
        content = tensor.data.view(-1).view(torch.int32)
        content[torch.arange(self.words) * len(content) // self.words] ^= _BIT

    def _strike_next_gradient(self, parameter: Tensor) -> None:
        """Let one backward pass go wrong; whoever repeats it gets it right."""

        def wrong(gradient: Tensor) -> Tensor:
            handle.remove()
            computed = gradient.contiguous().clone()
            self._flip(computed)
            return computed

        handle = parameter.register_hook(wrong)

    def _target(self, parallel: DataParallel) -> Tensor:
        compute = parallel.compute
        owner = compute.lane.owner
        if self.site == "masters":
            return owner.masters[0]
        if self.site == "shown parameters":
            return compute.guarded.parameters[0]
        state = owner.optimizer.state[owner.segments[0].master]
        for value in state.values():
            if isinstance(value, Tensor) and value.numel() > 1:
                return value
        raise ConfigError(f"{self}: the optimizer has no state to damage; plant it behind a later update")
