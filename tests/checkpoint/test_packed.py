"""Values as bytes: what is packed comes back, whatever it is, and bytes take no more room than they have."""

import collections
import io
import random
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from stretto.errors import UnsafeValue
from stretto.packed import _FEW_BYTES, pack, unpack
from tests.draws import draws

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
    for _ in draws(1000):
        value = drawn(rng)
        try:
            packed = pack(value, "a value")
        except UnsafeValue:
            assert "2**5000" in str(value).replace(str(2**5000), "2**5000"), value
            continue
        assert like(unpack(packed, "a value"), value), value
        came_back += 1
    assert came_back > 0.8 * len(draws(1000))


@pytest.mark.parametrize("content", [bytes(100_000), bytes(range(256)) * 400])
def test_bytes_take_as_much_room_as_they_have(content: bytes) -> None:
    assert len(pack({"state": [content]}, "a value")) < len(content) + PACKED_MORE_BYTES
    assert len(pack(io.BytesIO(content), "a value")) < len(content) + PACKED_MORE_BYTES


class Pair(NamedTuple):
    """Two values."""

    one: Any
    two: Any


class Armed(Pair):
    """A named tuple that does something when it is made."""

    def __new__(cls, *values: Any) -> "Armed":
        raise AssertionError("made by calling the class")


def test_named_tuples_of_the_program_come_back_and_no_other_class_is_looked_up() -> None:
    value = {"batches": [Pair(torch.ones(2), Pair(1, "a"))], "armed": tuple.__new__(Armed, (1, 2))}
    back = unpack(pack(value, "value"), "value")
    assert type(back["batches"][0]) is Pair
    assert back["batches"][0].two == Pair(1, "a")
    assert type(back["armed"]) is Armed
    for module, name in (("os", "mkdir"), ("builtins", "list"), ("antigravity", "x"), (__name__, "Path")):
        planted = io.BytesIO()
        torch.save({"stretto: named tuple": [module, name], "values": ["x"]}, planted)
        with pytest.raises(UnsafeValue, match="value is refused"):
            unpack(planted.getvalue(), "value")
    assert "antigravity" not in sys.modules


def test_what_programs_usually_keep_comes_back() -> None:
    value = {
        "numbers": (1, 2.5, None, True, 10**30),
        "text": "a\x1bb",
        "bytes": b"\0\xff",
        "containers": [{1, 2}, collections.OrderedDict(a=1), collections.Counter("aab")],
        "tensors": {"x": torch.arange(3).bfloat16(), "dtype": torch.float16, "size": torch.Size([2])},
        "arrays": [np.arange(3, dtype=np.int16), np.float32(2), np.array(["ab"]), np.array([True])],
        "random": (np.random.get_state(), random.getstate()),
    }
    assert repr(unpack(pack(value, "it"), "it")) == repr(value)


def test_an_integer_that_could_not_be_read_again_is_refused_when_it_is_packed() -> None:
    assert unpack(pack(2**2000, "it"), "it") == 2**2000
    with pytest.raises(UnsafeValue, match="it is refused"):
        pack(2**2100, "it")
