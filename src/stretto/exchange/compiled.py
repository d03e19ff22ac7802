"""Rotated wires on a CPU: one C function per direction, bit-identical to PyTorch's operations.

`stretto.exchange.fused` imports this file where a tensor on a host is packed, if there is a C compiler. It compiles for
the processor it runs on, in a folder that is removed at once: there is nothing to install, to keep, or to be stale.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_COMPILER = shutil.which("cc")
if _COMPILER is None:
    raise ImportError("no C compiler")
_OPTIONS = [
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
]
# Lets only one of the process's threads, such as virtual ranks, compile.
_ONE = threading.Lock()
_BLOCK = 64
Numbers = Mapping[str, float]
"""Constants of a format in C: `bits`, `steps`, `golden`, `cells_of_norm`."""


def pack_rotated(
    values: Tensor,
    content: Tensor,
    drawn: tuple[Tensor, Tensor, int],
    levels: Tensor,
    rows: int,
    numbers: Numbers,
) -> None:
    """Pack rows of values into bytes; see `stretto.exchange.kernels`."""
    turn, offsets, first = drawn
    tensors = values.to(torch.float32), content, turn, offsets, levels
    count = ctypes.c_long(values.numel() // _BLOCK // rows)
    _compiled(**numbers).pack(*map(_address, tensors), ctypes.c_long(rows), count, ctypes.c_uint32(first))


def unpack_rotated(
    content: Tensor, values: Tensor, drawn: tuple[Tensor, Tensor, Tensor], levels: Tensor, numbers: Numbers
) -> None:
    """Unpack bytes into rows of values; see `stretto.exchange.kernels`."""
    uniform, signs, _ = drawn
    count = ctypes.c_long(len(values) // len(signs))
    tensors = content, values, uniform, signs, levels
    _compiled(**numbers).unpack(*map(_address, tensors), ctypes.c_long(len(signs)), count)


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _compiled(**numbers: float) -> Any:
    with _ONE:
        return _library(**numbers)


@functools.cache
def _library(**numbers: float) -> Any:
    """Return the functions of `rotated.c` for a format."""
    constants = [f"-D{name.upper()}={value!r}" for name, value in numbers.items()]
    source = Path(__file__).with_name("rotated.c")
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder, "rotated.so"))
        command = [str(_COMPILER), *_OPTIONS, *constants, str(source), "-lm", "-o", library]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return ctypes.CDLL(library)
