"""A device's arithmetic and memory: the same work gives the same bits, what is written is read back.

Arithmetic: the same work gives the same bits, again and again, with every core busy.

Note [Known results]
    Sums of products of small whole numbers are exact in float32, in any order, as long as they stay below 2^24. So
    for matrix products and convolutions over such numbers the true result is known beforehand, from 64-bit integers:
    a device that is wrong in the same way every time shows too. Attention divides and exponentiates; there the first
    result is what the others, and those of other ranks, are compared with.

Memory: what is written is read back, over and over, in patterns that reach every bit both ways.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from stretto.checksums import digest, hexadecimal

_SEED = 20
_LARGEST = 8
"""Operands are whole numbers up to this: 256 products of two stay far below 2^24."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operator:
    """Work to repeat."""

    inputs: Callable[[], list[Tensor]]
    """Its operands, in the host's memory; the same on all ranks."""
    run: Callable[..., list[Tensor]]
    """The work: operands to results, gradients among them."""
    truth: Callable[..., list[Tensor]] | None = None
    """Exact results in the host's memory, where they are known."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What became of one operator on one device."""

    digest: str
    """Of the first results."""
    repeats: int
    differing: int
    """Of the repeats, those with other bits than the first."""
    is_true: bool | None
    """Whether the first results are the exact ones; None where these are not known."""


def repeat(
    operators: Mapping[str, Operator], device: torch.device, seconds: float, threads: int
) -> dict[str, Work]:
    """Run every operator again and again and compare the bits.

    Args:
        operators: By name.
        device: Where.
        seconds: How long, all operators together.
        threads: How many do so at once, each by itself; on a CPU one per core keeps all busy.
    """
    torch.manual_seed(_SEED)
    operands = {name: [value.to(device) for value in one.inputs()] for name, one in operators.items()}
    first = {name: _bits(one.run(*operands[name])) for name, one in operators.items()}
    counts = dict.fromkeys(operators, 0)
    differing = dict.fromkeys(operators, 0)
    counting = threading.Lock()
    deadline = time.monotonic() + seconds

    def work() -> None:
        while True:
            for name, one in operators.items():
                bits = _bits(one.run(*operands[name]))
                with counting:
                    counts[name] += 1
                    differing[name] += bits != first[name]
            if time.monotonic() > deadline:
                return

    workers = [threading.Thread(target=work, name=f"stretto-doctor-{number}") for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {
        name: Work(
            digest=" ".join(map(hexadecimal, first[name])),
            repeats=counts[name],
            differing=differing[name],
            is_true=None if one.truth is None else _bits(one.truth(*one.inputs())) == first[name],
        )
        for name, one in operators.items()
    }


def _bits(results: Sequence[Tensor]) -> list[int]:
    return [digest(result.detach().contiguous()) for result in results]


def _whole_numbers(*shapes: Sequence[int]) -> Callable[[], list[Tensor]]:
    def inputs() -> list[Tensor]:
        draws = torch.Generator().manual_seed(_SEED)
        return [
            torch.randint(-_LARGEST, _LARGEST + 1, tuple(shape), generator=draws).float() for shape in shapes
        ]

    return inputs


def _draws(*shapes: Sequence[int]) -> Callable[[], list[Tensor]]:
    def inputs() -> list[Tensor]:
        draws = torch.Generator().manual_seed(_SEED)
        return [torch.randn(tuple(shape), generator=draws) for shape in shapes]

    return inputs


def _with_gradients(
    forward: Callable[..., Tensor], operands: Sequence[Tensor], upstream: Tensor
) -> list[Tensor]:
    """Return the result of `forward`, and the gradient of every operand for the gradient `upstream` of the result."""
    leaves = [operand.detach().requires_grad_() for operand in operands]
    result = forward(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, upstream)]


def _matmul(left: Tensor, right: Tensor, upstream: Tensor) -> list[Tensor]:
    return _with_gradients(torch.matmul, (left, right), upstream)


def _true_matmul(left: Tensor, right: Tensor, upstream: Tensor) -> list[Tensor]:
    a, b, g = left.long(), right.long(), upstream.long()
    return [(a @ b).float(), (g @ b.T).float(), (a.T @ g).float()]


def _convolution(images: Tensor, kernels: Tensor, upstream: Tensor) -> list[Tensor]:
    return _with_gradients(lambda x, k: functional.conv2d(x, k, padding=1), (images, kernels), upstream)


def _true_convolution(images: Tensor, kernels: Tensor, upstream: Tensor) -> list[Tensor]:
    """In float64, which holds all of these sums exactly."""
    return [result.float() for result in _convolution(images.double(), kernels.double(), upstream.double())]


def _attention(query: Tensor, key: Tensor, value: Tensor, upstream: Tensor) -> list[Tensor]:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return _with_gradients(forward, (query, key, value), upstream)


OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {
        "matmul": Operator(_whole_numbers((192, 160), (160, 192), (192, 192)), _matmul, _true_matmul),
        "convolution": Operator(
            _whole_numbers((4, 8, 16, 16), (16, 8, 3, 3), (4, 16, 16, 16)), _convolution, _true_convolution
        ),
        "attention": Operator(_draws(*[(2, 4, 64, 32)] * 4), _attention),
    }
)
"""Forward and backward, of what models are made of."""


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
