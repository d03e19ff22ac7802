"""Ranks that look ahead with gradients of their own: each shows another estimate, and all hold the same masters.

Note [When the estimate is made]
    Round t-1 is reduced beside the gradients g_t, and brings θ_t. The next gradients are to be taken near θ_{t+1},
    which g_t decides, and whose reduction begins only now. What a rank has of it already is its own part. So the
    estimate is made at the landing, on the compute lane, which waits for it; nothing is sent. A rank needs the state of
    the whole optimizer for this, hence a replicated one.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stretto.engine.accumulation import Accumulation
from stretto.engine.agreed import AgreedReplica
from stretto.engine.replica import Flight, Performer
from stretto.engine.round import Reduction, Round, Shown
from stretto.flat import Slices
from stretto.optimizer import ReducedGradient
from stretto.strategies.contract import PreviewOwn


class OwnPreviews(AgreedReplica):
    """One rank's replica, whose model shows an estimate of this rank's own.

    Args are those of `AgreedReplica`, and:
        keeps_own: Whether to remember this rank's part of a sum, for estimates that replace it.
    """

    shows_own = True

    def __init__(self, *args: Any, keeps_own: bool, **named: Any) -> None:
        super().__init__(*args, **named)
        self._keeps_own = keeps_own
        self._used = b""
        self._own: list[Tensor] = []
        """This rank's part of the last sum, one tensor per flat set; from a preview on what others have added to it."""
        self._own_weight = 0.0

    @property
    def performers(self) -> Mapping[type, Performer]:
        """Performers by effect."""
        return {**super().performers, PreviewOwn: self._preview_own}

    def reduce(self, round: Round) -> Reduction:
        """Exchange the gradients of `round`, and remember this rank's part of them."""
        own = list(self._contents(round.buffer.flats, copies=True).flats) if self._keeps_own else []
        reduction = super().reduce(round)
        self._own, self._own_weight = own, round.contribution.totals.weight
        if reduction.skipped:
            self._own_weight = 0.0
            for part in own:
                part.zero_()
        return reduction

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the sum that a checkpoint carries."""
        if not self._own:
            return {}
        return {"own": list(self.sharded.owned.cut(self._own)), "own weight": self._own_weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` has returned, if the state holds it."""
        if "own" in state:
            own = self.sharded.new_sums()
            for part, saved in zip(own, state["own"], strict=True):
                part.copy_(saved)
            self._own = list(own.flats)
            self._own_weight = state["own weight"]

    def _preview_own(self, effect: PreviewOwn, flight: Flight | None) -> None:
        """Let the landing show an estimate; what it needs of this round's sum is kept before a step divides it."""
        if flight is None or not isinstance(effect.gradient, ReducedGradient):
            raise TypeError(f"a strategy asked for {effect!r} without this round's gradient")
        gradient = effect.gradient
        self._used = gradient.used
        if self._keeps_own:
            self._own_weight = gradient.weight - self._own_weight
            for part, total in zip(self._own, gradient.sums.flats, strict=True):
                torch.sub(total, part, out=part)
        flight.change_at_landing(self._show)

    def _show(self, flats: list[Tensor], accumulation: Accumulation) -> Shown:
        """Write the estimate into `flats`, which hold the committed parameters, if this rank has anything to add."""
        own = accumulation.contribution.totals.weight
        weight = own + (self._own_weight if self._keeps_own else 0.0)
        sums = self._contents(accumulation.buffer.flats, copies=self._keeps_own)
        if self._keeps_own:
            for total, others in zip(sums.flats, self._own, strict=True):
                total.add_(others)
        norm_squared = float(ReducedGradient(sums, 0.0, 0.0, b"").measure())
        if not (own > 0 and weight > 0 and math.isfinite(norm_squared)):
            return "committed"
        gradient = ReducedGradient(sums, weight, norm_squared, self._used)
        _, clip = self._clip(gradient)
        self.sharded.preview(gradient, self.progress.hyperparameters, clip, flats)
        self.runtime.charge("preview", self.sharded.numel)
        return "estimate"

    def _contents(self, flats: list[Tensor], *, copies: bool) -> Slices:
        """Return this rank's gradients, as wide as masters; the buffer itself where no copy is needed."""
        masters = self.sharded.masters.flats
        wide = [flat.to(master.dtype, copy=copies) for flat, master in zip(flats, masters, strict=True)]
        return self.sharded.owned.cut(wide)
