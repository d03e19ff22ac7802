"""Values as bytes: what is packed comes back, whatever it is, and bytes take no more room than they have."""

import io
import random
from typing import Any

import numpy as np
import pytest
import torch

from stretto.errors import UnsafeValue
from stretto.packed import _FEW_BYTES, pack, pack_elements, unpack, unpack_elements

PACKED_MORE_BYTES = 2048
"""Names and lengths in the archive, for one value."""


def drawn(rng: random.Random, depth: int = 3) -> Any:
    """A value as programs keep them."""
    kinds = ["number", "text", "bytes", "stream", "tensor", "array"] + depth * ["list", "dict", "tuple"]
    kind = rng.choice(kinds)
    if kind == "number":
        return rng.choice([None, True, 0, -1, 2**63 - 1, -(2**63), 2**64, 2**300, 2**5000, 0.1, float("inf")])
    if kind == "text":
        return rng.choice(["", "word", "\0", "é" * 300])
    if kind in ("bytes", "stream"):
        content = rng.randbytes(rng.choice([0, 1, _FEW_BYTES, _FEW_BYTES + 1, 5000]))
        return content if kind == "bytes" else io.BytesIO(content)
    if kind == "tensor":
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
        tensor = torch.arange(rng.choice([0, 1, 12])).to(dtype)
        return rng.choice([tensor, tensor[::2], tensor.conj(), torch.ones(2, requires_grad=True)])
    if kind == "array":
        return np.arange(rng.choice([0, 1, 9]), dtype=rng.choice(["<f4", "<i8", "<c8"]))
    values = [drawn(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == "dict":
        return {rng.choice([str(number), number]): value for number, value in enumerate(values)}
    return values if kind == "list" else tuple(values)


def like(found: Any, value: Any) -> bool:
    """Whether a value is another one, types and all."""
    if type(found) is not type(value):
        return False
    if isinstance(value, dict):
        return list(found) == list(value) and all(like(found[key], value[key]) for key in value)
    if isinstance(value, (list, tuple)):
        return len(found) == len(value) and all(map(like, found, value))
    if isinstance(value, io.BytesIO):
        return bool(found.getvalue() == value.getvalue())
    if isinstance(value, torch.Tensor):
        return found.dtype == value.dtype and torch.equal(found, value)
    if isinstance(value, np.ndarray):
        return found.dtype == value.dtype and bool((found == value).all())
    return bool(found == value)


def test_whatever_is_packed_comes_back_and_what_would_not_is_refused() -> None:
    rng, came_back = random.Random(0), 0
    for _ in range(1000):
        value = drawn(rng)
        try:
            packed = pack(value, "a value")
        except UnsafeValue:
            assert "2**5000" in str(value).replace(str(2**5000), "2**5000"), value
            continue
        assert like(unpack(packed, "a value"), value), value
        came_back += 1
    assert came_back > 800


@pytest.mark.parametrize("content", [bytes(100_000), bytes(range(256)) * 400])
def test_bytes_take_as_much_room_as_they_have(content: bytes) -> None:
    assert len(pack({"state": [content]}, "a value")) < len(content) + PACKED_MORE_BYTES
    assert len(pack(io.BytesIO(content), "a value")) < len(content) + PACKED_MORE_BYTES


ELEMENTS = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64,
    torch.uint8, torch.bool,
)  # fmt: skip


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_elements_come_back_to_the_bit_in_their_order_beside_what_describes_them() -> None:
    rng, draws = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(300):
        value = {"names": [rng.randbytes(rng.choice([0, 3, 1000])) for _ in range(rng.randrange(3))]}
        runs = []
        for _ in range(rng.randrange(8)):
            dtype = rng.choice(ELEMENTS)
            rows = torch.randint(0, 2, (rng.choice([0, 1, 7, 64, 1000]), 2 * dtype.itemsize), generator=draws)
            run = rows.to(torch.uint8).view(dtype)
            runs.append(rng.choice([run, run[:, :1], run.T]))
        content = pack_elements(value, runs, "a share")
        described, elements = unpack_elements(rng.choice([content, bytes(content)]), "a share")
        assert described == value
        expected: dict[str, bytes] = {}
        for run in runs:
            expected[str(run.dtype)] = expected.get(str(run.dtype), b"") + bits(run)
        assert {dtype: bits(found) for dtype, found in elements.items()} == expected
        most = sum(run.nbytes for run in runs) + len(pack(value, "")) + PACKED_MORE_BYTES
        assert len(content) <= most


@pytest.mark.parametrize("cut", [0, 5, 100, -64])
def test_elements_that_were_cut_off_are_refused(cut: int) -> None:
    content = pack_elements(["names"], [torch.arange(100)], "a share")
    with pytest.raises(UnsafeValue, match="a share"):
        unpack_elements(content[:cut], "a share")
