"""Kernels for GPUs have the bits of torch's operations, and round as a processor does when they are compiled."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stretto.exchange import WIRES, PackedWire
from stretto.flat import ALIGNMENT
from tests.exchange.fused import FUSED

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="no Triton, which comes with PyTorch for CUDA"
)


def in_a_process(module: str, **environment: str) -> None:
    """Run a module by itself: Triton decides where it is imported whether it compiles or interprets."""
    ended = subprocess.run(
        [sys.executable, "-m", module], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr


@needs_triton
@pytest.mark.timeout(900)
def test_a_kernel_has_the_bits_of_torchs_operations() -> None:
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    in_a_process("tests.exchange.fused", **interpreted)


@needs_triton
def test_a_compiled_kernel_contracts_flushes_and_approximates_nothing() -> None:
    in_a_process("tests.exchange.compiled")


def test_every_format_of_the_library_that_packs_has_kernels() -> None:
    packed = {name for name, wire in WIRES.items() if isinstance(wire, PackedWire)}
    assert packed == {wire.name for wire in FUSED}


@pytest.mark.parametrize("wire", FUSED, ids=lambda wire: f"{type(wire).__name__} {wire.name}")
def test_every_value_that_is_not_a_number_packs_alike(wire: PackedWire) -> None:
    values = torch.zeros(2, ALIGNMENT)
    values[:, 3] = torch.tensor([0x7FC12345, -0x3FFFFF]).to(torch.int32).view(torch.float32)
    content = torch.zeros(wire.num_bytes(values.numel()), dtype=torch.uint8)
    wire.write(values.view(-1), content)
    first, second = content.view(2, -1)
    assert torch.equal(first, second)
