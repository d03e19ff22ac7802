"""The base of all kits: a class whose `test_` methods are the checks, and whose other methods say what is checked."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from stretto.errors import ConformanceFailed

Program = Callable[[int, dist.ProcessGroup], Any]
"""What one rank does, given its rank and its group. Picklable, so that it can run in a process of its own."""


class Conformance:
    """A kit: subclass it, say what is to be checked, and let a test runner collect the subclass.

    A check raises `ConformanceFailed`, an `AssertionError` that says what was expected and what was found, or lets
    through whatever the checked thing raises. Nothing here needs a test runner.
    """

    @classmethod
    def checks(cls) -> list[str]:
        """Return the names of this kit's checks."""
        return [name for name in dir(cls) if name.startswith("test_")]

    def failures(self) -> dict[str, str]:
        """Run every check and return the message of each that fails, by the check's name."""
        found = {}
        for name in self.checks():
            try:
                getattr(self, name)()
            except Exception as error:  # whatever the checked thing raises is a failure of its check
                found[name] = f"{type(error).__name__}: {error}"
        return found


class RunRanks(Protocol):
    """Runs a program on many ranks."""

    def __call__(self, world_size: int, program: Program) -> Sequence[Any]:
        """Return what `program(rank, group)` returned, in rank order; raise what any of them raised."""
        ...


def expect(what: str, expected: object, found: object) -> None:
    """Raise unless `found` equals `expected`."""
    if found != expected:
        raise ConformanceFailed(f"{what}: expected {expected}, found {found}")


def expect_nothing(findings: Sequence[str]) -> None:
    """Raise where something was found, with the first few."""
    if findings:
        shown, left = findings[:3], len(findings) - 3
        raise ConformanceFailed("; ".join(shown) + (f"; and {left} more" if left > 0 else ""))


def expect_nothing_on_ranks(findings: Sequence[Sequence[str]]) -> None:
    """Raise where some rank found something; `findings` are in rank order."""
    of = f"of {len(findings)}"
    expect_nothing([f"rank {rank} {of}: {text}" for rank, texts in enumerate(findings) for text in texts])


def difference(what: str, expected: Tensor, found: Tensor) -> list[str]:
    """Return what distinguishes two tensors, NaN and the sign of zero included; empty where nothing does."""
    if (expected.shape, expected.dtype) != (found.shape, found.dtype):
        return [
            f"{what}: expected {expected.dtype} of shape {tuple(expected.shape)}, "
            f"found {found.dtype} of shape {tuple(found.shape)}"
        ]
    wrong = (_bits(expected) != _bits(found)).any(dim=-1).nonzero().flatten()
    if not len(wrong):
        return []
    first = int(wrong[0])
    values = [tensor.flatten()[first].item() for tensor in (expected, found)]
    return [
        f"{what}: {len(wrong)} of {found.numel()} elements of {found.dtype} differ; "
        f"at index {first} expected {values[0]!r}, found {values[1]!r}"
    ]


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, one row per element."""
    return tensor.detach().contiguous().view(-1, 1).view(torch.uint8)
