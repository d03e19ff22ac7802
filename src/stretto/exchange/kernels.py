"""Packing on a GPU, in one or two kernels per direction, bit-identical to PyTorch's operations.

Each format is defined in its own file; this file repeats its arithmetic. `stretto.exchange.fused` imports it when a
CUDA tensor is packed and Triton is installed. A packed block is a row of words: integers, the first one in the lowest
bits, and a scale in the last word.

Note [The same bits]
    Divisions round to nearest (`div_rn`), and nothing is contracted to a fused multiply-add (`_EXACT`). Adding 1.5 ·
    2^23 rounds to an integer, halves to even, which is then in the lowest bits of the sum. The largest of a block is
    found among the bits of its values, where NaN is larger than infinity. Sums have the order of `block_sums`.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

from stretto.exchange.blocks import turned_back

# Blocks per program.
_BLOCKS = tl.constexpr(32)
_BLOCK = tl.constexpr(64)
# Mask of all bits of a number except its sign.
_SIZE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_NOT_A_NUMBER = tl.constexpr(0x7FC00000)
_TINY = tl.constexpr(2.0**-126)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_LARGEST_BF16 = tl.constexpr(torch.finfo(torch.bfloat16).max)
_ROUNDING = tl.constexpr(1.5 * 2.0**23)
_BITS_OF_ROUNDING = tl.constexpr(0x4B400000)
_EXACT = {"enable_fp_fusion": False}


# Of integers that share a scale


def pack_integers(values: Tensor, content: Tensor, integers: dict[str, Any]) -> None:
    """Pack values as a format of integers does; see `stretto.exchange.integers`.

    Args:
        values: `(numel,)`, contiguous.
        content: Bytes, overwritten.
        integers: The format.
    """
    count, words = values.numel() // 64, content.view(_word(integers))
    with torch.cuda.device_of(values):
        _pack_integers[_programs(count)](values, words, count, **integers, **_EXACT)


def unpack_integers(content: Tensor, values: Tensor, integers: dict[str, Any]) -> None:
    """Unpack the result of `pack_integers` into values, float32."""
    count, words = values.numel() // 64, content.view(_word(integers))
    shape = {name: integers[name] for name in ("zero", "bits", "word_bits")}
    with torch.cuda.device_of(values):
        _unpack_integers[_programs(count)](words, values, count, **shape, **_EXACT)


def lose_integers(values: Tensor, integers: dict[str, Any]) -> None:
    """Replace values by their packing errors."""
    count = values.numel() // 64
    rounding = {name: value for name, value in integers.items() if name not in ("bits", "word_bits")}
    with torch.cuda.device_of(values):
        _lose_integers[_programs(count)](values, count, **rounding, **_EXACT)


def _word(integers: dict[str, Any]) -> torch.dtype:
    return torch.int32 if integers["word_bits"] == 32 else torch.int16


def _programs(count: int) -> tuple[int]:
    return (-(-count // 32),)


@triton.jit(do_not_specialize=["count"])
def _pack_integers(
    values,
    packed,
    count,
    largest: tl.constexpr,
    zero: tl.constexpr,
    bits: tl.constexpr,
    word_bits: tl.constexpr,
    scale_bits: tl.constexpr,
    of_mean: tl.constexpr,
):
    per_word: tl.constexpr = word_bits // bits
    num_words: tl.constexpr = _BLOCK // per_word
    rows, places, inside = _places(count)
    blocks = tl.load(values + places, mask=inside[:, None], other=0.0).to(tl.float32)
    integers, scales = _rounded(blocks, largest, zero, scale_bits, of_mean)
    numbers = (integers + zero) & ((1 << bits) - 1)
    shifted = numbers << (tl.arange(0, _BLOCK) % per_word * bits)[None, :]
    words = tl.sum(tl.reshape(shifted, (_BLOCKS, num_words, per_word)), axis=2)
    row = packed + rows * (num_words + 1)
    tl.store(row[:, None] + tl.arange(0, num_words)[None, :], words, mask=inside[:, None])
    tl.store(row + num_words, scales >> (32 - word_bits), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _unpack_integers(packed, values, count, zero: tl.constexpr, bits: tl.constexpr, word_bits: tl.constexpr):
    per_word: tl.constexpr = word_bits // bits
    num_words: tl.constexpr = _BLOCK // per_word
    rows, places, inside = _places(count)
    row = packed + rows * (num_words + 1)
    columns = tl.arange(0, _BLOCK)
    words = tl.load(row[:, None] + (columns // per_word)[None, :], mask=inside[:, None], other=0).to(tl.int32)
    # Shifted to the top and back, an integer has its sign again.
    integers = (words << (32 - bits - columns % per_word * bits)[None, :]) >> (32 - bits)
    if zero:
        integers = (integers & ((1 << bits) - 1)) - zero
    scales = tl.load(row + num_words, mask=inside, other=0).to(tl.int32) << (32 - word_bits)
    blocks = integers.to(tl.float32) * scales.to(tl.float32, bitcast=True)[:, None]
    tl.store(values + places, blocks, mask=inside[:, None])


@triton.jit(do_not_specialize=["count"])
def _lose_integers(
    values,
    count,
    largest: tl.constexpr,
    zero: tl.constexpr,
    scale_bits: tl.constexpr,
    of_mean: tl.constexpr,
):
    _, places, inside = _places(count)
    blocks = tl.load(values + places, mask=inside[:, None], other=0.0)
    integers, scales = _rounded(blocks.to(tl.float32), largest, zero, scale_bits, of_mean)
    arrived = integers.to(tl.float32) * scales.to(tl.float32, bitcast=True)[:, None]
    tl.store(values + places, blocks - arrived, mask=inside[:, None])


@triton.jit
def _places(count):
    """Return the rows of this program's blocks, the places of their values, and a mask of the existing rows."""
    rows = tl.program_id(0).to(tl.int64) * _BLOCKS + tl.arange(0, _BLOCKS)
    return rows, rows[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :], rows < count


@triton.jit
def _rounded(
    blocks,
    largest: tl.constexpr,
    zero: tl.constexpr,
    scale_bits: tl.constexpr,
    of_mean: tl.constexpr,
):
    """Return integers, and the bits of the scales of blocks; where a scale is not finite, what torch makes of it."""
    sizes = blocks.to(tl.int32, bitcast=True) & _SIZE
    top = tl.max(sizes, axis=1).to(tl.float32, bitcast=True)
    if of_mean:
        top = tl.where(top < _TINY, _TINY, top)
        parts = tl.div_rn(sizes.to(tl.float32, bitcast=True), top[:, None])
        sums, squares = _sums(parts), _sums(parts * parts)
        exact = tl.div_rn(squares, tl.where(sums < 1.0, 1.0, sums)) * top
    else:
        exact = tl.div_rn(top, tl.full((_BLOCKS,), largest, tl.float32))
    bits = tl.where(exact < _TINY, _TINY, exact).to(tl.int32, bitcast=True)
    scales = tl.where((bits & _SIZE) > _INFINITY, _NOT_A_NUMBER, bits & -(1 << (24 - scale_bits)))
    quotients = tl.div_rn(blocks, scales.to(tl.float32, bitcast=True)[:, None])
    integers = (quotients + _ROUNDING).to(tl.int32, bitcast=True) - _BITS_OF_ROUNDING
    if of_mean:
        integers = tl.minimum(tl.maximum(integers, -largest), largest)
    return tl.where(quotients == quotients, integers, -zero), scales


@triton.jit
def _sums(blocks):
    """Return the sums of blocks, in the order of `block_sums`."""
    for index in tl.static_range(6):
        blocks = tl.sum(tl.reshape(blocks, (_BLOCKS, 2, 32 >> index)), axis=1)
    return tl.reshape(blocks, (_BLOCKS,))


# Of levels, before and after a product with a rotation


def pack_rotated(
    values: Tensor,
    content: Tensor,
    drawn: tuple[Tensor, Tensor, int],
    levels: Tensor,
    rows: int,
    numbers: Any,
) -> None:
    """Pack rows of values as a rotated format does; see `stretto.exchange.rotated`.

    Args:
        values: `(numel,)`, contiguous.
        content: Bytes, overwritten.
        drawn: Rᵀ, the random offsets of the steps of a block's values, and the offset of the first scale of a row.
        levels: The level of each cell, whose last bits are packed.
        rows: Equally long ones, each packed as if it were alone.
        numbers: The format.
    """
    turn, offsets, first = drawn
    steps = torch.empty(values.numel() // 64, 64, dtype=torch.float32, device=values.device)
    largest, norms, widths = torch.empty(3, len(steps), dtype=torch.float32, device=values.device)
    shrink(values, steps, largest, norms, widths, offsets, numbers["steps"])
    turned, count = torch.mm(steps, turn, out=torch.empty_like(steps)), len(steps)
    constants = {
        "cells": len(levels),
        **{name: number for name, number in numbers.items() if name != "steps"},
    }
    with torch.cuda.device_of(values):
        _pack_levels[_programs(count)](
            turned,
            largest,
            norms,
            widths,
            content,
            levels,
            count,
            first,
            max(1, count // rows),
            **constants,
            **_EXACT,
        )


def unpack_rotated(
    content: Tensor, values: Tensor, drawn: tuple[Tensor, Tensor, Tensor], levels: Tensor, numbers: Any
) -> None:
    """Unpack bytes into rows of values, `(n, 64)`.

    Args:
        content: Bytes.
        values: Overwritten.
        drawn: Q, D of each row, and H.
        levels: In rising order.
        numbers: The format.
    """
    rounded, count, bits = torch.empty_like(values), len(values), numbers["bits"]
    with torch.cuda.device_of(content):
        _unpack_levels[_programs(count)](content, rounded, levels, count, bits=bits, **_EXACT)
        turned_back(rounded, *drawn, out=values)
        _scale[_programs(count)](values, content, count, bits=bits, **_EXACT)


def shrink(
    values: Tensor, steps: Tensor, largest: Tensor, norms: Tensor, widths: Tensor, offsets: Tensor, most: int
) -> None:
    """Write each block, `(n, 64)`, in steps, of which its norm has `most`; return its largest value, norm and width."""
    with torch.cuda.device_of(values):
        _shrink[_programs(len(steps))](
            values, steps, largest, norms, widths, offsets, len(steps), most, **_EXACT
        )


@triton.jit(do_not_specialize=["count"])
def _shrink(values, steps, largest, norms, widths, offsets, count, most: tl.constexpr):
    rows, places, inside = _places(count)
    blocks = tl.load(values + places, mask=inside[:, None], other=0.0).to(tl.float32)
    top = tl.max(blocks.to(tl.int32, bitcast=True) & _SIZE, axis=1)
    top = tl.where(top < 1, 1, top).to(tl.float32, bitcast=True)  # the smallest number, where all are zero
    parts = tl.div_rn(blocks, top[:, None])
    root = tl.sqrt_rn(_sums(parts * parts))
    width = tl.div_rn(tl.full((_BLOCKS,), 1.0, tl.float32), tl.where(root < 1.0, 1.0, root)) * most
    parts = parts * width[:, None] + tl.load(offsets + tl.arange(0, _BLOCK))[None, :]
    whole = parts.to(tl.int32).to(tl.float32)  # rounded down by hand: `tl.floor` flushes to zero
    parts = tl.where(parts == parts, tl.where(whole > parts, whole - 1.0, whole), parts)
    tl.store(steps + places, parts, mask=inside[:, None])
    tl.store(largest + rows, top, mask=inside)
    tl.store(widths + rows, width, mask=inside)
    tl.store(norms + rows, tl.sqrt_rn(_sums(parts * parts)), mask=inside)


@triton.jit(do_not_specialize=["count", "first", "row_blocks"])
def _pack_levels(
    turned,
    largest,
    norms,
    widths,
    packed,
    levels,
    count,
    first,
    row_blocks,
    golden: tl.constexpr,
    cells_of_norm: tl.constexpr,
    cells: tl.constexpr,
    bits: tl.constexpr,
):
    rows, places, inside = _places(count)
    norm = tl.load(norms + rows, mask=inside, other=0.0)
    one = tl.full((_BLOCKS,), 1.0, tl.float32)
    by = tl.div_rn(one, tl.where(norm < 1.0, 1.0, norm)) * cells_of_norm
    blocks = tl.load(turned + places, mask=inside[:, None], other=0.0) * by[:, None]
    cell = tl.where(blocks == blocks, blocks, 0.0).to(tl.int32) & (cells - 1)
    level = tl.load(levels + cell)
    codes = level.to(tl.int32, bitcast=True) & ((1 << bits) - 1)
    level = (level.to(tl.int32, bitcast=True) & -(1 << bits)).to(tl.float32, bitcast=True)
    along = _sums(level * blocks)
    along = tl.where(along < 1.0, 1.0, along)
    width = tl.load(widths + rows, mask=inside, other=1.0)
    scales = tl.div_rn(tl.div_rn(norm * cells_of_norm, along), width) * tl.load(
        largest + rows, mask=inside, other=0.0
    )
    limited = tl.where(scales > _LARGEST_BF16, _LARGEST_BF16, scales).to(tl.int32, bitcast=True)
    added = ((rows % row_blocks).to(tl.int32) * golden + first) & 0xFFFF
    halves = tl.where(scales == scales, limited + added, _NOT_A_NUMBER) >> 16
    row = packed + rows * (8 * bits + 2)
    _store_bits(row, codes, inside, 0, 2 if bits == 3 else bits)
    if bits == 3:
        _store_bits(row + 16, codes, inside, 2, 1)
    tl.store(row + 8 * bits, halves & 0xFF, mask=inside)
    tl.store(row + 8 * bits + 1, halves >> 8, mask=inside)


@triton.jit
def _store_bits(row, codes, inside, first: tl.constexpr, length: tl.constexpr):
    """Store `length` bits of each code from the bit `first` on; those that are alike in place share a byte."""
    parts: tl.constexpr = 8 // length
    cut = (codes >> first) & ((1 << length) - 1)
    cut = tl.reshape(cut, (_BLOCKS, parts, 8 * length)) << (tl.arange(0, parts) * length)[None, :, None]
    joined = tl.sum(cut, axis=1)
    tl.store(row[:, None] + tl.arange(0, 8 * length)[None, :], joined, mask=inside[:, None])


@triton.jit(do_not_specialize=["count"])
def _unpack_levels(packed, blocks, levels, count, bits: tl.constexpr):
    rows, places, inside = _places(count)
    row = packed + rows * (8 * bits + 2)
    codes = _load_bits(row, inside, 2 if bits == 3 else bits)
    if bits == 3:
        codes |= _load_bits(row + 16, inside, 1) << 2
    tl.store(blocks + places, tl.load(levels + codes), mask=inside[:, None])


@triton.jit
def _load_bits(row, inside, length: tl.constexpr):
    """Return the values that `_store_bits` stored."""
    columns = tl.arange(0, _BLOCK)
    joined = tl.load(row[:, None] + (columns % (8 * length))[None, :], mask=inside[:, None], other=0)
    return (joined.to(tl.int32) >> (columns // (8 * length) * length)[None, :]) & ((1 << length) - 1)


@triton.jit(do_not_specialize=["count"])
def _scale(blocks, packed, count, bits: tl.constexpr):
    rows, places, inside = _places(count)
    last = packed + rows * (8 * bits + 2) + 8 * bits
    lower = tl.load(last, mask=inside, other=0).to(tl.int32)
    upper = tl.load(last + 1, mask=inside, other=0).to(tl.int32)
    scales = (((upper << 8) | lower) << 16).to(tl.float32, bitcast=True)
    scaled = tl.load(blocks + places, mask=inside[:, None], other=0.0) * scales[:, None]
    scaled = tl.where(scaled > _LARGEST, _LARGEST, scaled)
    scaled = tl.where(scaled < -_LARGEST, -_LARGEST, scaled) + 0.0  # which turns negative zeros
    tl.store(blocks + places, scaled, mask=inside[:, None])
