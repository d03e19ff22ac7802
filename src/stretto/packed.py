"""Values as bytes, which can be read back without executing code from the bytes.

Pickle lets bytes call any function. Packed bytes contain only numbers, text, bytes and streams of bytes, lists,
dictionaries, tensors and NumPy arrays, and named tuples of the program's own modules. Other classes are refused when
they are written, unless the program has registered them with `torch.serialization.add_safe_globals`.

Note [Bytes]
    PyTorch pickles bytes as text, which takes half as much again, and is slow to write and to read. So an object with
    more than a few bytes is stored as a tensor.

Note [Named tuples]
    A named tuple is sent as a dictionary of its class's name and its values. Where it is read, the class is looked up
    among the modules that the program has imported, must be a named tuple, and none of its methods is called.
"""

import io
import pickle
import re
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stretto.errors import UnsafeValue

_ARRAYS: list[Any] = [
    np.ndarray,
    np.dtype,
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]  # how NumPy pickles an array
    np._core.multiarray.scalar,  # type: ignore[attr-defined]  # and a number
    *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdFDSU"},
]
_BYTES = "stretto: bytes"
"""Key of the dictionary that stands for a stream of bytes and for empty ones, which PyTorch would have to call, and for
many; see Note [Bytes]."""
_FEW_BYTES = 256
_EMPTY_ARRAY = "stretto: empty array"
"""Key of the dictionary that replaces an empty NumPy array, which PyTorch could also read only by a call."""
_NAMED_TUPLE = "stretto: named tuple"
"""Key of the dictionary that replaces a named tuple; see Note [Named tuples]."""
_ALWAYS_READABLE = (bytes, str, float, bool, type(None))
"""Types that can be read back without a trial."""
_PLAIN_DTYPES = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16,
    torch.int32, torch.int64,
}  # fmt: skip
_EXPECTED = "expected numbers, text, lists, dictionaries, tensors and arrays"
_REFUSED = re.compile(r"Unsupported (?:global: GLOBAL (\S+)|(?:class|global|operand)[^\n]*)|GLOBAL (\S+)")


def pack(value: Any, what: str) -> bytes:
    """Return `value` as bytes that `unpack` can read.

    Args:
        value: The object.
        what: Its name in messages.

    Raises:
        UnsafeValue: It contains an object that only pickle could read.
    """
    stream = io.BytesIO()
    try:
        torch.save(_plain(value), stream)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UnsafeValue(f"{what} cannot be written ({error}): {_EXPECTED}") from error
    packed = stream.getvalue()
    if not _is_readable(value):
        unpack(packed, what)
    return packed


def unpack(packed: bytes | memoryview, what: str, place: str | Callable[[Any, str], Any] = "cpu") -> Any:
    """Return the object that `pack` has packed.

    Args:
        packed: Bytes from anywhere.
        what: Their name in messages.
        place: Device for tensors, as `map_location` of `torch.load`.

    Raises:
        UnsafeValue: The bytes contain code to execute, or are not a packed value.
    """
    try:
        with torch.serialization.safe_globals(_ARRAYS):
            if sum(file.file_size for file in zipfile.ZipFile(io.BytesIO(packed)).infolist()) > len(packed):
                raise ValueError("it would take more memory than it has bytes")
            return _as_it_was(torch.load(io.BytesIO(packed), map_location=place, weights_only=True))
    except Exception as error:  # damaged bytes can raise anything
        raise UnsafeValue(
            f"{what} is refused ({_reason(error)}): {_EXPECTED}; allow other classes with "
            "torch.serialization.add_safe_globals"
        ) from error


def _is_readable(value: Any) -> bool:
    """Return whether the written bytes can certainly be read, without reading them."""
    kind = type(value)
    if kind is torch.Tensor:
        is_as_usual = value.layout is torch.strided and value.device.type in ("cpu", "cuda")
        has_more = value.requires_grad or bool(value.__dict__) or value.is_conj() or value.is_neg()
        return is_as_usual and value.dtype in _PLAIN_DTYPES and not has_more
    if kind is int:
        return bool(value.bit_length() < 64)  # the longest cannot be read
    if kind is dict:
        return all(type(key) is str and _is_readable(one) for key, one in value.items())
    return kind in _ALWAYS_READABLE or (kind in (list, tuple) and all(map(_is_readable, value)))


def _plain(value: Any) -> Any:
    if type(value) is io.BytesIO or (type(value) is bytes and not 0 < len(value) <= _FEW_BYTES):
        content: Any = value.getvalue() if isinstance(value, io.BytesIO) else value
        if len(content) > _FEW_BYTES:
            content = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return {_BYTES: type(value).__name__, "content": content if len(content) else None}
    if type(value) is np.ndarray and value.size == 0 and value.dtype.kind in "biufc":
        return {_EMPTY_ARRAY: [value.dtype.str, list(value.shape)]}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        values = [_plain(one) for one in value]
        return {_NAMED_TUPLE: [type(value).__module__, type(value).__qualname__], "values": values}
    if type(value) is dict:
        return {key: _plain(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value


def _as_it_was(value: Any) -> Any:
    if type(value) is dict and _BYTES in value:
        content = value["content"]
        if isinstance(content, torch.Tensor):
            content = content.cpu().numpy().tobytes()
        content = content or b""
        return io.BytesIO(content) if value[_BYTES] == "BytesIO" else content
    if type(value) is dict and _EMPTY_ARRAY in value:
        dtype, shape = value[_EMPTY_ARRAY]
        return np.empty(0, dtype).reshape(shape)
    if type(value) is dict and _NAMED_TUPLE in value:
        kind = _named_tuple(*value[_NAMED_TUPLE])
        values = [_as_it_was(one) for one in value["values"]]
        if len(values) != len(kind._fields):  # type: ignore[attr-defined]  # a named tuple has it
            raise ValueError(f"{len(values)} values for {kind.__qualname__}")
        return tuple.__new__(kind, values)
    if type(value) is dict:
        return {key: _as_it_was(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_as_it_was, value))
    return value


def _named_tuple(module: str, name: str) -> type[tuple[Any, ...]]:
    """Return a class that the program has already imported; importing it here would run its module."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(
            part
        )  # getattr of the name itself may run code of a module
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        raise ValueError(f"Unsupported class {module}.{name}")
    return found


def _reason(error: Exception) -> str:
    """Extract the name of the refused class from PyTorch's long message."""
    found = _REFUSED.search(str(error))
    if found is None:
        return (str(error).splitlines() or [type(error).__name__])[0][:200]
    return found[1] or found[2] or found[0]
