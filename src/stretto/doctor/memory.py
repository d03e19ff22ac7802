"""Memory: what is written is read back, over and over, in patterns that reach every bit both ways."""

import dataclasses
import time
from collections.abc import Callable

import torch
from torch import Tensor

_CONSTANTS = (0, -1, 0x5555555555555555, -0x5555555555555556)
"""All bits clear, all set, and the two that alternate."""
_MIX = 0x2545F4914F6CDD1D
"""Odd, so that multiplying by it modulo 2^64 gives every index another word."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Readback:
    """What came of a memory test."""

    passes: int
    """How often the whole buffer was written and read."""
    damaged_words: int
    first: str
    """Where the first damaged word was, and what it held; empty where there is none."""


def write_and_read(
    device: torch.device, megabytes: int, seconds: float, disturb: Callable[[Tensor], None] | None = None
) -> Readback:
    """Write and read a buffer until the time is up, every pattern at least once.

    Args:
        device: Where it lies.
        megabytes: How long it is, in units of 2^20 bytes.
        seconds: How long to go on.
        disturb: What happens between writing and reading; for a rehearsal.
    """
    words = torch.empty(megabytes * 2**17, dtype=torch.int64, device=device)
    expected = torch.empty_like(words)
    deadline = time.monotonic() + seconds
    passes = damaged = 0
    first = ""
    while passes < len(_CONSTANTS) + 1 or time.monotonic() < deadline:
        _write(expected, passes)
        words.copy_(expected)
        if disturb is not None:
            disturb(words)
        wrong = torch.nonzero(words != expected).flatten()
        if len(wrong) and not first:
            first = _describe(words, expected, int(wrong[0]))
        damaged += len(wrong)
        passes += 1
    return Readback(passes=passes, damaged_words=damaged, first=first)


def _write(words: Tensor, turn: int) -> None:
    """Write the pattern of a turn: a constant, or last in every cycle a word of each place's own."""
    index = turn % (len(_CONSTANTS) + 1)
    if index < len(_CONSTANTS):
        words.fill_(_CONSTANTS[index])
    else:
        torch.arange(turn, turn + len(words), out=words)
        words.mul_(_MIX)


def _describe(words: Tensor, expected: Tensor, place: int) -> str:
    found, wanted = (int(tensor[place]) % 2**64 for tensor in (words, expected))
    return f"word {place}: expected {wanted:016x}, found {found:016x}, bits {found ^ wanted:016x}"
