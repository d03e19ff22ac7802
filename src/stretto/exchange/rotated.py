"""Rotated wires: 1 to 4 bits for each value of a block, an unbiased estimate, and no residual.

A block x of 64 values is rotated by a random rotation R, so that its values look like draws from a normal
distribution, for every x. Each is rounded to the nearest of the levels that are best for that distribution, q. A
scale is sent too:

    y = R x,   q_j = the level nearest to y_j / σ,   s = ‖x‖² / ⟨y, q⟩;   received: x̂ = s Rᵀ q,   E x̂ = x

The error x̂ - x is at right angles to x. It is like the noise of gradients: independent from rank to rank and from
round to round, so that sums average it out, and there is nothing for error feedback to send later.

| bits | 1 | 2 | 3 | 4 |
|---|---|---|---|---|
| bytes per element | 1/8 + 1/32 | 1/4 + 1/32 | 3/8 + 1/32 | 1/2 + 1/32 |
| E ‖x̂ - x‖² / ‖x‖² | 0.56 | 0.13 | 0.037 | 0.010 |

Note [Rotations]
    The proof of E x̂ = x asks for an R that is uniform over all rotations (and reflections). One Hadamard matrix behind
    random signs is not: of a block with two or three values that are not zero, 1 bit would be off by half of it, in
    every draw. So

        R = Q D H

    with H the Hadamard matrix, D random signs, drawn by rank and round, and Q uniform, drawn by round. A product with
    any rotation is uniform too. D lets errors of ranks differ that send the same. Every rank knows what others have
    drawn: a draw is a function of round and rank (`stretto.randomness`), and a checkpoint holds the number of rounds.
    So one product with Q and one with H, with signs between them, rotate back the values of all ranks.

Note [Exact products]
    The values of a block are rounded to 4000ths of its norm, up or down at random, so that they are unbiased;
    Q to 512ths, and levels to 256ths. Then products are sums of integers, below 2^24 units: with n the square root of
    64, |R x| < 1.008 · (4000 + n) · 4096, and |H D Qᵀ q| < 1.02 · 1.51 n · 2^20. Float32 adds them without an error, in
    any order. So bits do not depend on the library or the device that multiplies, nor on how many rows are packed
    together. Errors of Q are symmetric, and bias an estimate by about 10^-9 of itself.

Note [Ends of float32]
    A block is divided by its largest value before anything else. A scale is sent in 16 bits, with
    the exponents of float32, rounded up or down at random, so it is unbiased too, below the smallest normal
    number as well. Values that an estimate would carry beyond the largest number end there.

Source: scale and rotation as in Vargaftik et al., "EDEN: Communication-Efficient and Robust Distributed Mean Estimation
for Federated Learning" (ICML 2022); levels as in Max, "Quantizing for Minimum Distortion" (1960).
"""

import functools
import itertools
import math
import statistics
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from stretto.exchange.blocks import block_sums, rotations, turned_back, upper_half
from stretto.exchange.fused import FusedWire
from stretto.randomness import draw

_BLOCK = 64
# Number of intervals from -8 σ to 8 σ, each with a level. No value is outside, because σ² is the mean of 64 squares.
_CELLS = 1024
# Number of intervals per σ; the interval around zero is twice as wide as the others.
_CELLS_OF_DEVIATION = 63.4
# Number of steps in the norm of a block; see Note [Exact products].
_STEPS = 4000
_STEPS_OF_ROTATION, _STEPS_OF_LEVEL = 512, 256
# By the bits of a number: the start and length of runs of bits that fill bytes evenly.
_RUNS = {1: ((0, 1),), 2: ((0, 2),), 3: ((0, 2), (2, 1)), 4: ((0, 4),)}
_CELLS_OF_NORM = math.sqrt(_BLOCK) * _CELLS_OF_DEVIATION
# 2^16 divided by the golden ratio: multiples of it are spread evenly.
_GOLDEN = 40503
_SEED = 0


class Rotated(FusedWire):
    """Eight numbers in as many bytes as each has bits, eight times; then a bf16 scale.

    Args:
        bits: Bits of a value, 1 to 4.
        stream: Name of the transfer; together with the other arguments it decides the rotation.
        round_index: Index of the round.
        ranks: The sender of each row; rows have equal length. A rank that packs has written all of them.
    """

    is_unbiased = True
    modules = MappingProxyType({**FusedWire.modules, "cpu": "stretto.exchange.compiled"})

    def __init__(
        self, bits: int, stream: str = "sums", round_index: int = 0, ranks: tuple[int, ...] = (0,)
    ) -> None:
        self.name = f"rotated{bits}"
        self.block_bytes = 8 * bits + 2
        self._bits = bits
        self.arguments = (bits,)
        self._drawn, self._ranks = (stream, round_index), ranks
        self._numbers = {
            "bits": bits, "steps": _STEPS, "golden": _GOLDEN,
            "cells_of_norm": _CELLS_OF_NORM,
        }  # fmt: skip

    def drawn(self, stream: str, round_index: int, *ranks: int) -> Self:
        """Return the same format with other rotations."""
        return type(self)(self._bits, stream, round_index, ranks)

    def pack(self, blocks: Tensor, packed: Tensor) -> None:
        """Rotate blocks, and round them to levels.

        Note [Memory]
            Three tensors of the size of `blocks` serve for all steps: fresh memory costs more than the arithmetic.
        """
        turn, offsets, step = self._own(blocks.device)
        first, turned, numbers = blocks.abs(), torch.empty_like(blocks), torch.empty_like(blocks)
        largest = first.amax(-1, keepdim=True).clamp_min_(2.0**-149)
        small = torch.div(blocks, largest, out=first)
        roots = block_sums(torch.mul(small, small, out=turned)).double().sqrt_().float()  # see below
        widths = roots.clamp_min_(1).reciprocal_().mul_(_STEPS)  # below 1 is a block of zeros
        steps = small.mul_(widths).add_(offsets).floor_()
        squares = torch.mul(steps, steps, out=turned).sum(-1, keepdim=True)
        norms = squares.double().sqrt_().float()  # in float32 a root may be off by its last bit
        torch.mm(steps, turn, out=turned)  # with `out` a user's autocast does not apply
        turned.mul_(norms.clamp_min(1).reciprocal_().mul_(_CELLS_OF_NORM))
        cells = first.view(torch.int32).copy_(turned).bitwise_and_(_CELLS - 1)  # also what is not a number
        torch.index_select(
            _levels_of_cells(self._bits, blocks.device), 0, cells.view(-1), out=numbers.view(-1)
        )
        words = numbers.view(torch.int32)
        codes = words.to(torch.int8).bitwise_and_(2**self._bits - 1)
        packed.view(torch.int16)[:, :-1] = _joined(codes, self._bits)
        words.bitwise_and_(-(2**self._bits))
        along = block_sums(numbers.mul_(turned)).clamp_min_(1)
        scales = norms.mul_(_CELLS_OF_NORM).div_(along).div_(widths).mul_(largest)
        count = len(blocks) // len(self._ranks)
        packed[:, -2:].view(torch.int16).copy_(upper_half(_rounded(scales, step, count)))

    def unpack(self, packed: Tensor) -> Tensor:
        """Return levels times their scale, rotated back."""
        codes = _apart(packed[:, :-2], self._bits).to(torch.int32)
        levels = _levels(self._bits, packed.device).index_select(0, codes.view(-1)).view_as(codes)
        drawn = self._of_all(packed.device)
        blocks = turned_back(levels, *drawn, out=codes.view(torch.float32))  # see Note [Memory]
        most = torch.finfo(torch.float32).max
        blocks.mul_(packed[:, -2:].view(torch.bfloat16).to(torch.float32))
        return blocks.clamp_(-most, most).add_(0.0)  # which turns negative zeros: products have either

    def launch_pack(self, kernels: Any, values: Tensor, content: Tensor) -> None:
        """Pack values into bytes."""
        levels = _levels_of_cells(self._bits, values.device)
        drawn = self._own(values.device)
        kernels.pack_rotated(values, content, drawn, levels, len(self._ranks), self._numbers)

    def launch_unpack(self, kernels: Any, content: Tensor) -> Tensor:
        """Return the values that were packed into `content`."""
        count = content.numel() // self.block_bytes
        values = torch.empty(count, _BLOCK, dtype=torch.float32, device=content.device)
        levels = _levels(self._bits, content.device)
        kernels.unpack_rotated(content, values, self._of_all(content.device), levels, self._numbers)
        return values.view(-1)

    def _own(self, device: torch.device) -> tuple[Tensor, Tensor, int]:
        """Return the draws of a sender: Rᵀ, the offsets of steps before truncation, and the offset of a scale."""
        rank = self._ranks[0]
        return *_rotation(*self._drawn, rank, device), _draw("scales", *self._drawn, rank) % 2**16

    def _of_all(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return Q, D of each row, and H."""
        signs = _signs(*self._drawn, self._ranks, device)
        return _uniform(*self._drawn, device), signs, _hadamard(device)


def _rounded(scales: Tensor, first: int, count: int) -> Tensor:
    """Return scales rounded to bf16 without bias; infinite scales become the largest finite one.

    Args:
        scales: `(n, 1)`, of rows of `count` blocks.
        first: Offset of the first scale of a row before truncation.
        count: Each row is rounded as if it were alone.
    """
    added = torch.arange(count, dtype=torch.int32, device=scales.device)
    added.mul_(_GOLDEN).add_(first).bitwise_and_(2**16 - 1)
    limited = scales.clamp_max(torch.finfo(torch.bfloat16).max).view(torch.int32)
    rows = len(scales) // count if count else 0
    rounded = (limited.view(rows, count) + added).bitwise_and_(-(2**16)).view(torch.float32).view(-1, 1)
    return rounded.masked_fill_(scales.isnan(), math.nan)


# Drawn by all ranks alike; kept for the buckets of a round


def _draw(what: str, stream: str, round_index: int, rank: int) -> int:
    return draw(_SEED, f"{what} of {stream} from rank {rank}", round_index)


@functools.lru_cache(maxsize=64)
def _rotation(stream: str, round_index: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return Rᵀ, `(64, 64)`, and the offsets of the steps of each value of a block, `(64,)`: from 0 to 1."""
    signs = _signs(stream, round_index, (rank,), device)
    (rotation,) = rotations(_uniform(stream, round_index, device), signs, _hadamard(device))
    offsets = (np.arange(_BLOCK) * _GOLDEN + _draw("values", stream, round_index, rank) % 2**16) % 2**16
    return rotation.t().contiguous(), _moved((offsets + 0.5) / 2**16, device)


def _signs(stream: str, round_index: int, ranks: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the diagonals of D, `(len(ranks), 64)`."""
    highest, count = max(ranks), len(ranks)
    whole = _signs_of_round(stream, round_index, max(6, highest.bit_length()), device)
    if count == 1 or ranks == tuple(range(count)):
        return whole[highest + 1 - count : highest + 1]
    return whole[list(ranks)]


@functools.lru_cache(maxsize=8)
def _signs_of_round(stream: str, round_index: int, bits: int, device: torch.device) -> Tensor:
    """Return the signs of the first 2^bits ranks: all ranks draw from one sequence."""
    words = np.random.Philox(key=draw(_SEED, f"signs of {stream}", round_index)).random_raw(2**bits)
    found = np.unpackbits(words.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1)
    return _moved(1.0 - 2.0 * found, device)


@functools.lru_cache(maxsize=8)
def _uniform(stream: str, round_index: int, device: torch.device) -> Tensor:
    """Return Q, `(64, 64)`, rounded; see Note [Exact products].

    Source: Mezzadri, "How to Generate Random Matrices from the Classical Compact Groups" (2007), section 5.
    """
    generator = torch.Generator().manual_seed(draw(_SEED, f"rotation of {stream}", round_index) >> 1)
    normal = torch.randn(_BLOCK, _BLOCK, generator=generator, dtype=torch.float64, device="cpu")
    orthogonal, upper = torch.linalg.qr(normal)
    uniform = orthogonal * upper.diagonal().sign()
    return _moved(uniform.mul_(_STEPS_OF_ROTATION).round_().div_(_STEPS_OF_ROTATION).numpy(), device)


@functools.cache
def _hadamard(device: torch.device) -> Tensor:
    """Return H, `(64, 64)`."""
    smallest = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device="cpu")
    whole: Tensor = functools.reduce(torch.kron, [smallest] * 6)
    return _moved((whole / math.sqrt(_BLOCK)).numpy(), device)


def _moved(values: Any, device: torch.device) -> Tensor:
    """Return an array as float32 on a device; to a GPU it is copied while the host continues."""
    found = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


# Levels


@functools.cache
def _levels(bits: int, device: torch.device) -> Tensor:
    """Return the levels in rising order, float32, rounded; see Note [Exact products]."""
    levels = torch.tensor(normal_levels(bits), dtype=torch.float32, device=device)
    return levels.mul_(_STEPS_OF_LEVEL).round_().div_(_STEPS_OF_LEVEL)


@functools.cache
def _levels_of_cells(bits: int, device: torch.device) -> Tensor:
    """Return for each interval the level that is nearest to its middle; the last bits of it give the level's index."""
    ends = torch.arange(_CELLS, dtype=torch.float32, device=device)
    ends[_CELLS // 2 :] -= _CELLS  # the last bits of negative integers
    # The end of a cell is the one that is nearer to zero.
    middles = (ends + ends.sign() / 2) / _CELLS_OF_DEVIATION
    levels = _levels(bits, device)
    nearest = (middles.unsqueeze(-1) - levels).abs().argmin(-1)
    return (levels[nearest].view(torch.int32) | nearest.to(torch.int32)).view(torch.float32)


def normal_levels(bits: int) -> list[float]:
    """Return the 2^bits levels, in rising order, to which a normally distributed value is best rounded.

    Each is the mean of the values that are nearest to it, found by Lloyd's iteration.
    """
    count = 2**bits
    levels = [6 * (index + 0.5) / count - 3 for index in range(count)]
    moved = math.inf
    while moved > 1e-7:
        edges = [-math.inf, *(math.fsum(pair) / 2 for pair in itertools.pairwise(levels)), math.inf]
        means = [_mean_between(*pair) for pair in itertools.pairwise(edges)]
        moved = max(abs(mean - level) for mean, level in zip(means, levels, strict=True))
        levels = means
    return levels


def _mean_between(low: float, high: float) -> float:
    """Return the mean of a normally distributed value between two bounds."""
    normal = statistics.NormalDist()
    return (normal.pdf(low) - normal.pdf(high)) / (normal.cdf(high) - normal.cdf(low))


# Numbers of a few bits: those that are alike in place share a byte


def _joined(numbers: Tensor, bits: int) -> Tensor:
    """Return int16, `(n, 4 * bits)`, that packs int8 numbers of a few bits, `(n, 64)`."""
    words, runs = numbers.view(torch.int64), []
    for first, length in _RUNS[bits]:
        cut = words if length == bits else words >> first & _in_each_byte(length)
        run, *others = cut.split(length, -1)
        for index, other in enumerate(others, start=1):
            run = run | other << length * index
        runs.append(run)
    return torch.cat(runs, -1).view(torch.int16)


def _apart(joined: Tensor, bits: int) -> Tensor:
    """Return the numbers that `_joined` packed."""
    words = joined.clone(memory_format=torch.contiguous_format).view(torch.int64)
    numbers = torch.empty(len(words), 8, dtype=torch.int64, device=words.device)
    runs = words.split([length for _, length in _RUNS[bits]], -1)
    for (first, length), run in zip(_RUNS[bits], runs, strict=True):
        for index, piece in enumerate(numbers.split(length, -1)):
            part = run >> length * index & _in_each_byte(length)
            if first:
                piece.bitwise_or_(part << first)
            else:
                piece.copy_(part)
    return numbers.view(torch.int8)


def _in_each_byte(bits: int) -> int:
    """Return a word with this number of low bits set in each of its bytes."""
    return ((1 << bits) - 1) * 0x0101010101010101
