"""Checks of one device: the same work gives the same bits, and memory holds what was written to it.

Note [Known results]
    Sums of products of small whole numbers are exact in float32, in any order, as long as they stay below 2^24. So the
    true result of a matrix product or convolution over such numbers can be computed beforehand, in 64-bit integers
    or float64: a device that is wrong in the same way every time shows too. Attention divides and exponentiates and
    has no such result. Its first result is compared with later ones, and with those of other ranks.
"""

import dataclasses
import math
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
"""Operands are whole numbers up to this, so that the sum of 2^17 products stays below 2^24. bfloat16 and the inner
formats of tensor cores hold them exactly."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operator:
    """Work to repeat."""

    operands: Callable[[], list[Tensor]]
    """Makes the operands, in the host's memory; the same on all ranks."""
    run: Callable[..., list[Tensor]]
    """The work: operands to results, gradients among them."""
    exact: Callable[..., list[Tensor]] | None = None
    """Operands to exact results, where these can be known."""


def _with_gradients(forward: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """Return work on operands and the gradient of the result: its results are that of `forward` and all gradients."""

    def run(*operands: Tensor) -> list[Tensor]:
        *inputs, upstream = operands
        leaves = [value.detach().requires_grad_() for value in inputs]
        result = forward(*leaves)
        return [result.detach(), *torch.autograd.grad(result, leaves, upstream)]

    return run


_matmul = _with_gradients(torch.matmul)
_convolution = _with_gradients(lambda images, kernels: functional.conv2d(images, kernels, padding=1))


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention, step by step: the fused kernels of GPUs add gradients in any order."""
    length, width = query.shape[-2:]
    later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ key.transpose(-2, -1)).div(math.sqrt(width)).masked_fill(later, -torch.inf)
    return scores.softmax(-1) @ value


_attention = _with_gradients(_attend)


def _exactly(run: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Return the same work in float64, where all sums are exact; results are rounded once, to the operands' dtype."""

    def exact(*operands: Tensor) -> list[Tensor]:
        return [result.to(operands[0].dtype) for result in run(*(one.double() for one in operands))]

    return exact


def _whole_numbers(*shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    return [
        torch.randint(-_LARGEST, _LARGEST + 1, tuple(shape), generator=generator).to(dtype)
        for shape in shapes
    ]


def _normal_numbers(*shapes: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    return [torch.randn(tuple(shape), generator=generator) for shape in shapes]


OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {
        "matmul": Operator(
            lambda: _whole_numbers((192, 160), (160, 192), (192, 192)), _matmul, _exactly(_matmul)
        ),
        "convolution": Operator(
            lambda: _whole_numbers((4, 8, 16, 16), (16, 8, 3, 3), (4, 16, 16, 16)),
            _convolution,
            _exactly(_convolution),
        ),
        "attention": Operator(lambda: _normal_numbers(*[(2, 4, 64, 32)] * 4), _attention),
    }
)
"""Forward and backward of what models are made of; the last operand is the gradient of the result."""
_WIDE = ((2048, 256), (256, 2048), (2048, 2048))
LARGE_OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {
        "matmul": Operator(lambda: _whole_numbers(*_WIDE), _matmul, _exactly(_matmul)),
        "matmul in bf16": Operator(
            lambda: _whole_numbers(*_WIDE, dtype=torch.bfloat16), _matmul, _exactly(_matmul)
        ),
        "convolution": Operator(
            lambda: _whole_numbers((32, 32, 32, 32), (64, 32, 3, 3), (32, 64, 32, 32)),
            _convolution,
            _exactly(_convolution),
        ),
        "attention": Operator(lambda: _normal_numbers(*[(8, 16, 256, 64)] * 4), _attention),
    }
)
"""The same for devices, of a size that gives each of some hundred multiprocessors a tile of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OperatorResult:
    """What came of repeating one operator on one device."""

    digest: str
    """Of the first results."""
    repeats: int
    differing: int
    """Repeats with other bits than the first."""
    is_exact: bool | None
    """Whether the first results are the exact ones; None where these are not known."""


def repeat(
    operators: Mapping[str, Operator], device: torch.device, seconds: float, threads: int
) -> dict[str, OperatorResult]:
    """Run every operator again and again and compare the bits.

    Args:
        operators: By name.
        device: Where they run.
        seconds: How long, all operators together; each runs at least once.
        threads: How many run them at once, each by itself. On a CPU one per core keeps all cores busy.
    """
    torch.manual_seed(_SEED)
    operands = {name: [value.to(device) for value in one.operands()] for name, one in operators.items()}
    first = {name: _digests(one.run(*operands[name])) for name, one in operators.items()}
    repeats = dict.fromkeys(operators, 0)
    differing = dict.fromkeys(operators, 0)
    lock = threading.Lock()
    deadline = time.monotonic() + seconds

    def work() -> None:
        while True:
            for name, one in operators.items():
                found = _digests(one.run(*operands[name]))
                with lock:
                    repeats[name] += 1
                    differing[name] += found != first[name]
            if time.monotonic() > deadline:
                return

    workers = [threading.Thread(target=work, name=f"stretto-doctor-{number}") for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {
        name: OperatorResult(
            digest=" ".join(map(hexadecimal, first[name])),
            repeats=repeats[name],
            differing=differing[name],
            is_exact=None if one.exact is None else _digests(one.exact(*one.operands())) == first[name],
        )
        for name, one in operators.items()
    }


def _digests(results: Sequence[Tensor]) -> list[int]:
    # From the host's memory, where a digest sees every bit and can be compared with that of exact results.
    return [digest(result.cpu()) for result in results]


_CONSTANTS = (0, -1, 0x5555555555555555, -0x5555555555555556)
"""Words with all bits clear, all bits set, and the two in which they alternate."""
_ODD_FACTOR = 0x2545F4914F6CDD1D
"""Multiplied by an odd number modulo 2^64, all indices become different words."""
_NUM_PATTERNS = len(_CONSTANTS) + 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryResult:
    """What came of writing and reading memory."""

    passes: int
    """How often the whole buffer was written and read."""
    damaged_words: int
    megabytes: int
    """Length of the buffer, in units of 2^20 bytes."""
    first: str
    """Where the first damaged word was, and what it held; empty if there is none."""


def write_and_read(
    device: torch.device, megabytes: int, seconds: float, disturb: Callable[[Tensor], None] | None = None
) -> MemoryResult:
    """Write and read a buffer until the time is up, every pattern at least once.

    Args:
        device: Where the buffer lies.
        megabytes: Its length, in units of 2^20 bytes.
        seconds: How long to go on.
        disturb: What happens between writing and reading; for a rehearsal.
    """
    words = torch.empty(megabytes * 2**17, dtype=torch.int64, device=device)
    expected = torch.empty_like(words)
    deadline = time.monotonic() + seconds
    passes = damaged = 0
    first = ""
    while passes < _NUM_PATTERNS or time.monotonic() < deadline:
        _fill(expected, passes)
        words.copy_(expected)
        if disturb is not None:
            disturb(words)
        wrong = torch.nonzero(words != expected).flatten()
        if len(wrong) and not first:
            first = _describe(words, expected, int(wrong[0]))
        damaged += len(wrong)
        passes += 1
    return MemoryResult(passes=passes, damaged_words=damaged, megabytes=megabytes, first=first)


def _fill(words: Tensor, turn: int) -> None:
    """Write the pattern of a turn: one of the constants, or, last in every cycle, a different word at each place."""
    if (index := turn % _NUM_PATTERNS) < len(_CONSTANTS):
        words.fill_(_CONSTANTS[index])
    else:
        torch.arange(turn, turn + len(words), out=words)
        words.mul_(_ODD_FACTOR)


def _describe(words: Tensor, expected: Tensor, place: int) -> str:
    found, wanted = (int(tensor[place]) % 2**64 for tensor in (words, expected))
    return f"word {place}: expected {wanted:016x}, found {found:016x}, bits {found ^ wanted:016x}"
