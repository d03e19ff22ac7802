"""Rotated wires: 1 to 4 bits for each value of a block, an estimate that is right on average, and nothing owed.

A block x of 64 values is turned by a random rotation R, so that its values look like draws from a normal distribution,
whatever x is. Each is rounded to the nearest of the levels that are best for that distribution, q. A scale travels too:

    y = R x,   q_j = the level nearest to y_j / σ,   s = ‖x‖² / ⟨y, q⟩;   received: x̂ = s Rᵀ q,   E x̂ = x

The error x̂ - x is at right angles to x. It is like the noise of gradients: independent from rank to rank and from round
to round, so that sums average it out, and there is nothing for error feedback to send later.

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

Note [Ends of float32]
    A block is divided by its root mean square, taken in float64, before anything else. A scale travels in 16 bits, with
    the exponents of float32, rounded up or down at random: so it is right on average too, below the smallest normal
    number as well. Values that an estimate would carry beyond the largest number end there.

Source: scale and rotation as in Vargaftik et al., "EDEN: Communication-Efficient and Robust Distributed Mean Estimation
for Federated Learning" (ICML 2022); levels as in Max, "Quantizing for Minimum Distortion" (1960).
"""

import functools
import itertools
import math
import statistics
from typing import Any, Self

import torch
from torch import Tensor

from stretto.exchange.blocks import block_sums, upper_half
from stretto.exchange.fused import FusedWire
from stretto.randomness import draw

_BLOCK = 64
_CELLS = 1024
"""Parts from -8 σ to 8 σ, each with a level. No value lies outside, because σ² is the mean of 64 squares."""
_CELLS_OF_DEVIATION = 63.9
"""How many are as wide as σ together; the one around zero is twice as wide as the others."""
_RUNS = {1: ((0, 1),), 2: ((0, 2),), 3: ((0, 2), (2, 1)), 4: ((0, 4),)}
"""By the bits of a number: where in it runs of bits begin that fill bytes evenly, and how long they are."""
_CELLS_OF_NORM = math.sqrt(_BLOCK) * _CELLS_OF_DEVIATION
_GOLDEN = 40503
"""2^16 divided by the golden ratio: however many steps of that there are, they lie evenly."""
_SEED = 0


class Rotated(FusedWire):
    """Eight numbers in as many bytes as each has bits, eight times; then a bf16 scale.

    Args:
        bits: Of a value, 1 to 4.
        stream: What is sent; this and the rest say which rotation.
        round_index: In which round.
        rank: By whom.

    Note [Products]
        Kernels do what comes before the product with the rotation, and what comes after it. The product is always
        torch's, whose additions have an order of their own on every device. So bytes have the same bits wherever the
        product does, and what arrives is the same on devices of one kind.
    """

    is_unbiased = True

    def __init__(self, bits: int, stream: str = "sums", round_index: int = 0, rank: int = 0) -> None:
        self.name = f"rotated{bits}"
        self.block_bytes = 8 * bits + 2
        self._bits = bits
        self.arguments = (bits,)
        self._drawn = stream, round_index, rank

    def drawn(self, stream: str, round_index: int, rank: int) -> Self:
        """Return the same format with another rotation."""
        return type(self)(self._bits, stream, round_index, rank)

    def pack(self, blocks: Tensor, packed: Tensor) -> None:
        """Rotate blocks, and round them to levels.

        Note [Memory]
            Three tensors of the size of `blocks` serve for all steps: fresh memory costs more than the arithmetic.
        """
        first, turned, numbers = blocks.abs(), torch.empty_like(blocks), torch.empty_like(blocks)
        largest = first.amax(-1, keepdim=True).clamp_min_(2.0**-149)
        small = torch.div(blocks, largest, out=first)
        squares = block_sums(torch.mul(small, small, out=turned))
        norms = squares.double().sqrt_().float()  # in float32 a root may be off by its last bit
        # With `out` a user's autocast does not apply.
        torch.mm(small, _rotation(*self._drawn, blocks.device).mT, out=turned)
        turned.mul_(norms.clamp_min(1).reciprocal_().mul_(_CELLS_OF_NORM))  # below 1 is a block of zeros
        cells = first.view(torch.int32).copy_(turned).bitwise_and_(_CELLS - 1)  # also what is not a number
        levels = _levels_of_cells(self._bits, blocks.device)
        torch.index_select(levels, 0, cells.view(-1), out=numbers.view(-1))
        codes = numbers.view(torch.int32).to(torch.int8).bitwise_and_(2**self._bits - 1)
        packed.view(torch.int16)[:, :-1] = _joined(codes, self._bits)
        along = block_sums(numbers.mul_(turned)).clamp_min_(1)
        scales = norms.mul_(_CELLS_OF_NORM).div_(along).mul_(largest)
        packed[:, -2:].view(torch.int16).copy_(upper_half(_rounded(scales, _first_step(*self._drawn))))

    def unpack(self, packed: Tensor) -> Tensor:
        """Return levels times their scale, turned back."""
        codes = _apart(packed[:, :-2], self._bits).to(torch.int32)
        levels = _levels(self._bits, packed.device).index_select(0, codes.view(-1)).view_as(codes)
        blocks = codes.view(torch.float32)  # see Note [Memory]
        torch.mm(levels, _rotation(*self._drawn, packed.device), out=blocks)
        most = torch.finfo(torch.float32).max
        return blocks.mul_(packed[:, -2:].view(torch.bfloat16).to(torch.float32)).clamp_(-most, most)

    def launch_pack(self, kernels: Any, values: Tensor, content: Tensor) -> None:
        """Pack values into bytes."""
        small = torch.empty(values.numel() // _BLOCK, _BLOCK, dtype=torch.float32, device=values.device)
        largest, norms = torch.empty(2, len(small), dtype=torch.float32, device=values.device)
        kernels.shrink(values, small, largest, norms)
        turned = torch.empty_like(small)
        torch.mm(small, _rotation(*self._drawn, values.device).mT, out=turned)
        levels, first = _levels_of_cells(self._bits, values.device), _first_step(*self._drawn)
        steps = {"first": first, "step": _GOLDEN, "cells_of_norm": _CELLS_OF_NORM}
        kernels.pack_levels(turned, largest, norms, content, levels, self._bits, steps)

    def launch_unpack(self, kernels: Any, content: Tensor) -> Tensor:
        """Return the values that were packed into `content`."""
        count = content.numel() // self.block_bytes
        levels = torch.empty(count, _BLOCK, dtype=torch.float32, device=content.device)
        kernels.unpack_levels(content, levels, _levels(self._bits, content.device), self._bits)
        blocks = torch.empty_like(levels)
        torch.mm(levels, _rotation(*self._drawn, content.device), out=blocks)
        kernels.scale(blocks, content, self._bits)
        return blocks.view(-1)


def _first_step(stream: str, round_index: int, rank: int) -> int:
    """Return what is added to the scale of the first block before it is cut off."""
    return draw(_SEED, f"scales of {stream} from rank {rank}", round_index) % 2**16


def _rounded(scales: Tensor, first: int) -> Tensor:
    """Return scales rounded to bf16, which is right on average; infinite ones become the largest one."""
    added = torch.arange(len(scales), dtype=torch.int32, device=scales.device)
    added.mul_(_GOLDEN).add_(first).bitwise_and_(2**16 - 1)
    limited = scales.clamp_max(torch.finfo(torch.bfloat16).max)
    rounded = (limited.view(torch.int32) + added.unsqueeze(-1)).bitwise_and_(-(2**16)).view(torch.float32)
    return rounded.masked_fill_(scales.isnan(), math.nan)


# Drawn by all ranks alike; kept for the buckets of a round


@functools.lru_cache(maxsize=256)
def _rotation(stream: str, round_index: int, rank: int, device: torch.device) -> Tensor:
    """Return R, as Note [Rotations] has it, `(64, 64)`."""
    bits = draw(_SEED, f"signs of {stream} from rank {rank}", round_index)
    signs = [1 - 2 * (bits >> index & 1) for index in range(_BLOCK)]
    rotation: Tensor = _uniform(stream, round_index) * torch.tensor(signs, device="cpu") @ _hadamard()
    return rotation.to(device, torch.float32)


@functools.lru_cache(maxsize=4)
def _uniform(stream: str, round_index: int) -> Tensor:
    """Return Q, `(64, 64)`, in float64.

    Source: Mezzadri, "How to Generate Random Matrices from the Classical Compact Groups" (2007), section 5.
    """
    generator = torch.Generator().manual_seed(draw(_SEED, f"rotation of {stream}", round_index) >> 1)
    normal = torch.randn(_BLOCK, _BLOCK, generator=generator, dtype=torch.float64, device="cpu")
    orthogonal, upper = torch.linalg.qr(normal)
    uniform: Tensor = orthogonal * upper.diagonal().sign()
    return uniform


@functools.cache
def _hadamard() -> Tensor:
    """Return H, `(64, 64)`, in float64."""
    smallest = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device="cpu")
    whole: Tensor = functools.reduce(torch.kron, [smallest] * 6)
    return whole / math.sqrt(_BLOCK)


# Levels


@functools.cache
def _levels(bits: int, device: torch.device) -> Tensor:
    """Return the levels in rising order, float32. Their last bits say which one each is."""
    whole = torch.tensor(normal_levels(bits), dtype=torch.float32, device=device).view(torch.int32)
    codes = torch.arange(2**bits, dtype=torch.int32, device=device)
    return whole.bitwise_and_(-(2**bits)).bitwise_or_(codes).view(torch.float32)


@functools.cache
def _levels_of_cells(bits: int, device: torch.device) -> Tensor:
    """Return for each cell the level that is nearest to its middle."""
    ends = torch.arange(_CELLS, dtype=torch.float32, device=device)
    ends[_CELLS // 2 :] -= _CELLS  # the last bits of negative integers
    # The end of a cell is the one that is nearer to zero.
    middles = (ends + ends.sign() / 2) / _CELLS_OF_DEVIATION
    levels = _levels(bits, device)
    nearest = (middles.unsqueeze(-1) - levels).abs().argmin(-1)
    return levels[nearest]


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
    """Return the mean of a normally distributed value that lies between two."""
    normal = statistics.NormalDist()
    return (normal.pdf(low) - normal.pdf(high)) / (normal.cdf(high) - normal.cdf(low))


# Numbers of a few bits: those that are alike in place share a byte


def _joined(numbers: Tensor, bits: int) -> Tensor:
    """Return int16, `(n, 4 * bits)`, that holds numbers of a few bits, int8, `(n, 64)`."""
    words, runs = numbers.view(torch.int64), []
    for first, length in _RUNS[bits]:
        cut = words if length == bits else words >> first & _in_each_byte(length)
        run, *others = cut.split(length, -1)
        for index, other in enumerate(others, start=1):
            run = run | other << length * index
        runs.append(run)
    return torch.cat(runs, -1).view(torch.int16)


def _apart(joined: Tensor, bits: int) -> Tensor:
    """Return the numbers in the bytes that `_joined` has returned."""
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
    """Return a word with so many bits set in each of its bytes, the lowest ones."""
    return ((1 << bits) - 1) * 0x0101010101010101
