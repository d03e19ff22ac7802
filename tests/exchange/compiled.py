"""What kernels become for a GPU: divisions that round to nearest, no fused multiply-add, nothing flushed to zero.

    python -m tests.exchange.compiled

Needs Triton, and no GPU.
"""

import importlib
import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stretto.exchange.integers import IntegerWire
from tests.exchange.fused import FUSED

INEXACT = re.compile(r"\b(?:fma|mad\.rn|div\.full|div\.approx|rcp|sqrt\.approx|ex2)\b|\.ftz\b")
POINTERS = {"packed": "*u8", "count": "i32", "first": "i32", "row_blocks": "i32"}
HOPPER = GPUTarget("cuda", 90, 32)


def assembly(kernel: Any, exact: dict[str, Any], numbers: dict[str, Any], **types: str) -> str:
    """Return the PTX of a kernel for these numbers."""
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in numbers else {**POINTERS, **types}.get(name, "*fp32") for name in names
    }
    constants = {(names.index(name),): value for name, value in numbers.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return str(triton.compile(source, target=HOPPER, options=exact).asm["ptx"])


def main() -> None:
    """Exit with what is inexact, if anything is."""
    kernels = importlib.import_module("stretto.exchange.kernels")
    found = {}
    for wire in FUSED:
        if isinstance(wire, IntegerWire):
            form, word = wire.format, f"*i{wire.word_bits}"
            for kernel in (kernels._pack_integers, kernels._unpack_integers, kernels._lose_integers):
                numbers = {name: value for name, value in form.items() if name in kernel.arg_names}
                found[str(kernel), wire.name] = assembly(kernel, kernels._EXACT, numbers, packed=word)
        else:
            bits = {"bits": wire.arguments[0]}
            constants = {**wire._numbers, "cells": 1024}
            most = {"most": constants.pop("steps")}
            found["pack", wire.name] = assembly(kernels._pack_levels, kernels._EXACT, constants)
            found["unpack", wire.name] = assembly(kernels._unpack_levels, kernels._EXACT, bits)
            found["scale", wire.name] = assembly(kernels._scale, kernels._EXACT, bits)
            found["shrink", wire.name] = assembly(kernels._shrink, kernels._EXACT, most)
    wrong = {key: sorted(set(INEXACT.findall(text))) for key, text in found.items() if INEXACT.search(text)}
    raise SystemExit(f"inexact: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()
