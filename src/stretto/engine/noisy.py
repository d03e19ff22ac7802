"""Artificial noise: every rank receives the mean gradient with separate Gaussian noise.

Note [Noise]
    g is the mean gradient, Σ w·g_i / Σ w over the micro-batches of all ranks, or of this rank where ranks step alone.
    Rank r steps with

        g + ε_r        ε_r ~ N(mean, variance) in every coordinate, new for every rank and every update

    A gradient is held as a sum of weight W, so the noise added to it is N(W · mean, W² · variance). It is added once
    the sum is there and its weight is known, before the norm is taken, the clip and the division. So ranks,
    micro-batches, weights, buckets, wires and hidden reductions do not matter. Where ranks share an optimizer, each
    hits the slices that it owns. Padding and unused parameters get no noise.

    A sum of several rounds holds what its parts have been given already. It is given what lacks:

        W = w_A + w_B      N((W - w_A) · mean, (W² - w_A²) · variance)

    so that the preview with A and the commit with A and B both have the requested variance.

    Draws depend on seed, rank and the number of the update alone. An update that is made again, after a round that was
    skipped or from a checkpoint, gets the same noise.

Source: "Capturing and Mitigating Gradient Aggregation Errors for Fault-Tolerant Distributed Training", Definition 2.1.
"""

import dataclasses
import math
from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from stretto.engine.comm_lane import Weave, Woven
from stretto.engine.replica import Performer, Replica
from stretto.engine.round import Round
from stretto.noise import Noise
from stretto.optimizer import ReducedGradient
from stretto.randomness import draw
from stretto.strategies.contract import Average, Boundary, Land, Launch, Preview, Script, Step

_SEEDS = 2**63
"""Number of seeds of a generator."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """Noise that was added to a sum of gradients."""

    mean: float
    variance: float
    used: bytes
    """One byte per parameter slot: whether it has noise."""


class NoisyRank:
    """Adds noise to the values that one rank receives, if that rank is chosen.

    Args:
        noise: The job's noise.
        replica: This rank's replica.
    """

    def __init__(self, noise: Noise, replica: Replica) -> None:
        noise.check(replica.exchange.world_size)
        self._noise = noise
        self._sharded = replica.sharded
        self._progress = replica.progress
        self._rank = replica.exchange.rank
        self._is_hit = noise.hits(self._rank)
        self._hits = 0
        """Number of additions of noise in the current update."""
        self._held: dict[ReducedGradient, _Held] = {}
        """By gradient: the noise added in the current update."""

    def around(self, weave: Weave | None) -> Weave:
        """Return a function that adds the noise to a script, before `weave` adds its effects: guards see noise as
        damage.
        """
        if weave is None:
            return self._woven
        return lambda script: weave(self._woven(script))

    def _woven(self, script: Script) -> Woven:
        """Yield the effects of `script`; add noise to a gradient right before a step or preview uses it."""
        reply: Any = None
        while True:
            effect = script.send(reply)
            if isinstance(effect, Step | Preview) and isinstance(effect.gradient, ReducedGradient):
                self._hit(effect.gradient)
            elif isinstance(effect, Boundary):
                self._held, self._hits = {}, 0
            reply = yield effect

    def _hit(self, gradient: ReducedGradient) -> None:
        """Add this update's noise to the mean of `gradient`.

        Its norm is to be taken again, on all ranks alike: ranks that are not hit take part.
        """
        weight, variance = gradient.weight, self._noise.variance_at(self._progress.step + 1)
        wanted = _Held(weight * self._noise.mean, weight**2 * variance, gradient.used)
        before = list(self._held_by(gradient))
        if not weight or [wanted] == before or not (wanted.mean or wanted.variance):
            return
        self._held[gradient] = wanted
        gradient.forget_norm()
        if not self._is_hit:
            return
        generator = self._generator("gradient", gradient.sums[0].device)
        for piece in self._sharded.pieces:
            slot = piece.slot.index
            if gradient.used[slot]:
                there = [held for held in before if held.used[slot]]
                mean = wanted.mean - sum(held.mean for held in there)
                lacking = max(0.0, wanted.variance - sum(held.variance for held in there))
                add_noise(self._sharded.values(gradient.sums, piece), mean, lacking, generator)

    def after_averages(self, performers: Mapping[type, Performer]) -> dict[type, Performer]:
        """Return performers of averages that afterwards add noise to the masters that they have written.

        Where replicas are equal, nothing is sent and nothing written.
        """
        if not (self._is_hit and self._noise.averages):
            return {}
        return {
            kind: self._hitting(performers[kind]) for kind in (Average, Launch, Land) if kind in performers
        }

    def _hitting(self, performer: Performer) -> Performer:
        masters = self._sharded.masters

        def perform(effect: Any, round: Round | None) -> Any:
            versions = [master._version for master in masters]
            reply = performer(effect, round)
            written = {index for index, master in enumerate(masters) if master._version != versions[index]}
            if written:
                self._hit_masters(written)
            if written and round is not None:  # otherwise the model goes on showing what they were
                self._sharded.publish(round.buffer.flats)
            return reply

        return perform

    def _hit_masters(self, buckets: Container[int]) -> None:
        generator = self._generator("average", self._sharded.masters[0].device)
        for piece in self._sharded.pieces:
            if piece.bucket in buckets:
                add_noise(
                    self._sharded.values(self._sharded.masters, piece), 0.0, self._noise.averages, generator
                )

    def _held_by(self, gradient: ReducedGradient) -> Iterator[_Held]:
        """Yield the noise of a gradient, or of each of its parts."""
        if gradient in self._held:
            yield self._held[gradient]
        else:
            for part in gradient.parts:
                yield from self._held_by(part)

    def _generator(self, what: str, device: torch.device) -> torch.Generator:
        self._hits += 1
        return generator_of(self._noise, f"{what} {self._hits}", self._rank, self._progress.step, device)


def generator_of(noise: Noise, what: str, rank: int, step: int, device: torch.device) -> torch.Generator:
    """Return the generator of the noise on values that a rank receives.

    Args:
        noise: The noise; it has the seed.
        what: The values; each kind has separate draws.
        rank: The receiving rank.
        step: Number of committed updates before.
        device: Device of the values; every type of device draws other numbers.
    """
    seed = draw(noise.seed or 0, f"noise on {what} of rank {rank}", step)
    return torch.Generator(device).manual_seed(seed % _SEEDS)


def add_noise(values: Tensor, mean: float, variance: float, generator: torch.Generator) -> None:
    """Add Gaussian noise to `values`, in place."""
    drawn = torch.randn(values.shape, dtype=values.dtype, device=values.device, generator=generator)
    values.add_(drawn.mul_(math.sqrt(variance)).add_(mean))
