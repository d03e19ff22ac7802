"""Checksums of tensors: a digest shows whether a tensor changed; sums of rows and columns show where, and by how
much.

Every function here reads a tensor's bytes, in the order of its elements. `digest` hashes them to one 64-bit number.
`Sums` reads them as 64-bit words, writes the words into a table with 4096 columns, and adds up each row and each
column:

    w00  w01  w02 | R0          R_i = sum over j of w_ij
    w10  w11  w12 | R1          C_j = sum over i of w_ij
    --------------+---          (modulo 2^64)
     C0   C1   C2 |

If the word w12 grows by d, then R1 and C2 grow by d and no other sum changes. So the sums show where the change is, and
subtracting d from that word restores it exactly. Several changes can cancel: +d, -d, +d, -d in the corners of a
rectangle change no sum. The digest sees those too, so a `Checksum` keeps both.

The sums are integer operations of torch: they run where the tensor is, and are equal on every device.

Note [Digests on devices]
    In the host's memory a digest is xxh3 of the bytes, a number. On a device it is a hash of the `Sums`, and stays
    there as a tensor: many can be computed, kept and compared without a wait, and `on_host` copies all requested
    digests at once. Tensors of equal size are read together, up to 64 MiB at a time, so a model with many layers or
    buckets needs hardly more kernels than a small one.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from stretto.mixed import mixed

HOSTS = ("cpu",)
"""Types of devices whose memory the host reads directly."""
WORD_BYTES = 8
_COLUMNS = 4096
"""Words in a row: 32 KiB, so the sums of 64 MiB are 0.07 % of its size."""
_BYTES_TOGETHER = 2**26
"""Bytes read together on a device: enough to keep it busy. This takes as much additional memory meanwhile."""
_BYTES_IN_CACHE = 2**18
"""Bytes read together on the host."""
_NUMPY = frozenset({torch.float32, torch.float64, torch.int64, torch.uint8})
"""Dtypes that NumPy also has: their memory needs no view as bytes. Other dtypes are rare."""


class Seeds(NamedTuple):
    """Seeds of rows: `first`, `first + step` and so on, modulo 2^64.

    A seed identifies a row. Equal bytes have different digests under different seeds, so a stale or misplaced row is
    not mistaken for the right one.
    """

    first: int = 0
    step: int = 0

    def of(self, row: int) -> int:
        return (self.first + row * self.step) % 2**64


_UNSEEDED = Seeds()
Digest = int | Tensor
"""A number below 2^64; on a device `()` int64. See Note [Digests on devices]."""
Digests = list[int] | Tensor
"""Numbers below 2^64; on a device `(n,)` int64."""


def is_on_host(tensor: Tensor) -> bool:
    """Return whether the host reads a tensor's memory directly."""
    return tensor.device.type in HOSTS


def digest(tensor: Tensor, seed: int = 0) -> int:
    """Return xxh3 of a tensor's bytes, a number below 2^64 that depends on every byte, its place, and the length.

    Two different tensors have the same digest with a probability of about 2^-64. For a tensor on a device, the digest
    is a hash of the tensor's `Sums`, which miss some changes (docs/guards.md), and the host waits for it. Only digests
    from the same type of device can be compared.

    Args:
        tensor: A tensor of any dtype, shape and strides.
        seed: A number that identifies the tensor; see `Seeds`.
    """
    if is_on_host(tensor):
        return _xxh3(tensor, seed)
    return on_host([digests_of_rows(bytes_of(tensor)[None], Seeds(seed))])[0]


def digest_of_all(tensors: Sequence[Tensor]) -> int:
    """Return one digest of several tensors in this order, below 2^64; the host waits once for each device."""
    return xxhash.xxh3_64_intdigest(np.array(on_host(digests(tensors)), "<u8").tobytes())


def digests(tensors: Sequence[Tensor]) -> list[Digest]:
    """Return the digest of each tensor."""
    found: list[Digest] = [_xxh3(tensor) if is_on_host(tensor) else 0 for tensor in tensors]
    for places, content in _together([tensor for tensor in enumerate(tensors) if not is_on_host(tensor[1])]):
        for place, one in zip(places, digests_of_rows(content), strict=True):
            found[place] = one
    return found


def digests_of_rows(content: Tensor, seeds: Seeds = _UNSEEDED) -> Digests:
    """Return the digest of each row, on the device of the rows.

    Args:
        content: `(rows, bytes)` uint8; rows may be apart.
        seeds: Seeds of the rows.
    """
    if is_on_host(content):
        rows = enumerate(content.numpy())
        return [xxhash.xxh3_64_intdigest(row.data, seeds.of(number)) for number, row in rows]
    return mixed(torch.cat(_sums_of(content), 1), content.size(1), *seeds)


def on_host(numbers: Sequence[Digest | Digests]) -> list[int]:
    """Return digests, or any 64 bits, as numbers below 2^64; the host waits once for each device.

    Args:
        numbers: Numbers or tensors; tensors are int64 or bool, of any shape, and their elements follow each other.
    """
    by_device: dict[torch.device, dict[int, Tensor]] = defaultdict(dict)
    found: dict[int, list[int]] = {}
    for place, one in enumerate(numbers):
        if isinstance(one, Tensor):
            by_device[one.device][place] = one
        else:
            found[place] = one if isinstance(one, list) else [one]
    for tensors in by_device.values():
        together = torch.hstack(list(tensors.values())).long().cpu()
        joined: list[int] = together.numpy().view(np.uint64).tolist()
        ends = itertools.accumulate(one.numel() for one in tensors.values())
        for (place, one), end in zip(tensors.items(), ends, strict=True):
            found[place] = joined[end - one.numel() : end]
    return [one for place in range(len(numbers)) for one in found[place]]


def hexadecimal(value: int) -> str:
    """Return a digest as 16 hexadecimal digits, the form in records."""
    return f"{value:016x}"


def same_bytes(one: Tensor, other: Tensor) -> bool | Tensor:
    """Return whether two tensors of one size hold the same bytes; on a device, `()` bool there.

    On the host digests are compared: `torch.equal` takes twice as long.
    """
    if is_on_host(one):
        return _xxh3(one) == _xxh3(other)
    return (words_of(bytes_of(one)) == words_of(bytes_of(other))).all()


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, `(nbytes,)` uint8: a view if the tensor is contiguous."""
    # An expanded element has stride 0 still.
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def words_of(content: Tensor) -> Tensor:
    """Return uint8 values as int64 words: a view if length and address allow it, else a copy padded with zeros.

    Args:
        content: `(bytes,)`, or `(rows, bytes)`.
    """
    *apart, length = content.shape
    begins = content.data_ptr() | int(content.storage_offset()) | (int(content.stride(0)) if apart else 0)
    if (length | begins) % WORD_BYTES == 0:
        return content.view(torch.int64)
    padded = content.new_zeros(*apart, -(-length // WORD_BYTES), dtype=torch.int64)
    padded.view(torch.uint8)[..., :length] = content
    return padded


def _together(tensors: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Yield tensors of equal size and dtype together: their indices, and their bytes `(tensors, bytes)`."""
    alike: dict[tuple[torch.device, torch.dtype, torch.Size], list[tuple[int, Tensor]]] = defaultdict(list)
    for place, tensor in tensors:
        alike[tensor.device, tensor.dtype, tensor.shape].append((place, tensor))
    for members in alike.values():
        _, first = members[0]
        most = _BYTES_IN_CACHE if is_on_host(first) else _BYTES_TOGETHER
        count = max(1, most // max(1, first.nbytes))
        for start in range(0, len(members), count):
            places, values = zip(*members[start : start + count], strict=True)
            if len(values) == 1:
                yield places, bytes_of(values[0])[None]
            else:
                stacked = torch.stack(values).detach()
                yield places, stacked.reshape(len(values), first.numel()).view(torch.uint8)


def _xxh3(tensor: Tensor, seed: int = 0) -> int:
    if tensor.requires_grad:
        tensor = tensor.detach()
    held = tensor.contiguous() if tensor.dtype in _NUMPY else bytes_of(tensor)
    return xxhash.xxh3_64_intdigest(held.numpy().data, seed)


def _sums_of(content: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row and column sums of bytes, `(..., bytes)`, as in `Sums`: `(..., rows)` and `(..., columns)`."""
    words = words_of(content)
    *apart, length = words.shape
    width = min(_COLUMNS, max(1, length))
    whole = length // width * width
    rest = words[..., whole:] if whole < length else None
    table = (words if rest is None else words[..., :whole]).view(*apart, whole // width, width)
    rows, columns = table.sum(-1), table.sum(-2)
    if rest is not None:
        rows = torch.cat([rows, rest.sum(-1, keepdim=True)], -1)
        columns[..., : length - whole] += rest
    return rows, columns


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Row and column sums of one tensor's words. They always detect a change within one word."""

    rows: Tensor
    """`(rows,)` int64."""
    columns: Tensor
    """`(columns,)` int64; fewer than 4096 only if the tensor has fewer words."""
    num_bytes: int
    """Length of the tensor. The last row is filled up with zeros."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Sums":
        """Return the sums of a tensor of any dtype, shape and strides."""
        content = bytes_of(tensor)
        return cls(*_sums_of(content), content.numel())


class Checksum(NamedTuple):
    """Digest and sums of a tensor at one moment, which later show whether it has changed, and where."""

    digest: Digest
    together: Sums
    """Sums of tensors that were read together, by row; split only on request."""
    row: int

    @property
    def sums(self) -> Sums:
        """Sums of this tensor."""
        return Sums(self.together.rows[self.row], self.together.columns[self.row], self.together.num_bytes)

    @classmethod
    def of(cls, tensor: Tensor) -> "Checksum":
        """Return the checksum of a tensor now."""
        (found,) = checksums([tensor])
        return found


def checksums(tensors: Sequence[Tensor]) -> list[Checksum]:
    """Return the checksum of each tensor now, without waiting for a device."""
    found = {}
    for places, content in _together(enumerate(tensors)):
        (rows, columns), length = _sums_of(content), content.size(1)
        together, is_here = Sums(rows, columns, length), is_on_host(content)
        numbers = digests_of_rows(content) if is_here else mixed(torch.cat([rows, columns], 1), length)
        for row, (place, one) in enumerate(zip(places, numbers, strict=True)):
            found[place] = Checksum(one, together, row)
    return [found[place] for place in range(len(tensors))]


def compared(taken: Sequence[Checksum], tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the earlier and the present digest of each tensor, which differ if it has changed; the host waits once
    per device.
    """
    numbers = on_host([*(one.digest for one in taken), *digests(tensors)])
    return list(zip(numbers[: len(taken)], numbers[len(taken) :], strict=True))
