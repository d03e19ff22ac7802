"""Checksums of tensors: a digest tells whether a tensor changed; sums of rows and columns tell where, and repair it.

Every function here reads a tensor's bytes, in the order of its elements. `digest` makes one 64-bit number of them.
`Sums` reads them as 64-bit words, writes the words into a table with 4096 columns, and adds up each row and each
column:

    w00  w01  w02 | R0          R_i = sum over j of w_ij
    w10  w11  w12 | R1          C_j = sum over i of w_ij
    --------------+---          (modulo 2^64)
     C0   C1   C2 |

If the word w12 grows by d, then R1 and C2 grow by d and no other sum changes. So the sums show where the change is, and
subtracting d from that word takes it back to the bit. Several changes can cancel: +d, -d, +d, -d in the corners of a
rectangle change no sum. The digest sees those too, so a `Checksum` keeps both.

The sums are integer operations of torch: they run where the tensor lies, and are equal on every device.

Note [Where digests lie]
    In the host's memory a digest is xxh3 of the bytes, a number. On a device it is a hash of the `Sums`, and stays
    there as a tensor: many can be taken, kept and compared while nothing waits, and `on_host` brings all that somebody
    has to know at once. Tensors that are alike are read there together, up to 64 MiB at a time: a model of many layers
    or buckets takes hardly more kernels than one of few.
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

HOSTS = ("cpu",)
"""Types of devices whose memory the host reads by itself."""
_WORD_BYTES = 8
_COLUMNS = 4096
"""Words in a row: 32 KiB, so that the sums of 64 MiB are 0.07 % of it."""
_BYTES_TOGETHER = 2**26
"""How much is read together on a device: enough to keep it busy. As much of its memory is taken meanwhile."""
_BYTES_IN_CACHE = 2**18
"""How much is read together on the host."""
_NUMPY = frozenset({torch.float32, torch.float64, torch.int64, torch.uint8})
"""Dtypes that NumPy has too: of such tensors it hands on the memory without a view of the bytes. Others are rare."""
_BYTES_TRIED = 2**34
"""How much a repair reads at most to find the right one of several explanations: some seconds of work, where giving up
means a restart."""
_PLACE, *_FACTORS = 0x1E3779B97F4A7C15, 0x36E8FEB86659FD93, 0x20761D6478BD642F
"""Of the hash on devices: odd, below 2^63, with bits that look drawn."""


class Seeds(NamedTuple):
    """Seeds of rows: `first`, `first + step` and so on, modulo 2^64.

    A seed says what a row is. Equal bytes have different digests under different seeds, so that an old or misplaced
    row is not taken for the right one.
    """

    first: int = 0
    step: int = 0

    def of(self, row: int) -> int:
        """Return the seed of a row."""
        return (self.first + row * self.step) % 2**64

    def on(self, device: torch.device, rows: int) -> Tensor:
        """Return the seeds of so many rows, `(rows,)` int64; they are made there, so that nothing is sent."""
        return torch.arange(rows, device=device).mul_(_signed(self.step)).add_(_signed(self.first))


_UNSEEDED = Seeds()
Digest = int | Tensor
"""A number below 2^64; on a device `()` int64. See Note [Where digests lie]."""
Digests = list[int] | Tensor
"""Numbers below 2^64; on a device `(n,)` int64."""


def is_on_host(tensor: Tensor) -> bool:
    """Return whether the host reads a tensor's memory by itself."""
    return tensor.device.type in HOSTS


def digest(tensor: Tensor, seed: int = 0) -> int:
    """Return xxh3 of a tensor's bytes, as a number below 2^64; it depends on every byte, its place, and the length.

    Two different tensors have the same digest with a chance of about 2^-64. For a tensor that is not in the host's
    memory it is a hash of the tensor's `Sums`, which miss some changes (docs/guards.md), and the host waits for it; so
    only digests from one type of device can be compared.

    Args:
        tensor: Of any dtype, shape and strides.
        seed: A number for what the tensor is; see `Seeds`.
    """
    if is_on_host(tensor):
        return _xxh3(tensor, seed)
    return on_host([digests_of_rows(_bytes_of(tensor)[None], Seeds(seed))])[0]


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
    """Return the digest of each row, where they lie.

    Args:
        content: `(rows, bytes)` uint8; rows may lie apart.
        seeds: Of the rows.
    """
    if is_on_host(content):
        rows = enumerate(content.numpy())
        return [xxhash.xxh3_64_intdigest(row.data, seeds.of(number)) for number, row in rows]
    return _hashed(*_sums_of(content), content.size(1), seeds)


def on_host(numbers: Sequence[Digest | Digests]) -> list[int]:
    """Return digests, or any 64 bits, as numbers below 2^64; the host waits once for each device.

    Args:
        numbers: Tensors are int64 or bool, of any shapes; elements come one after the other.
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
        if len(tensors) == len(numbers):
            return joined
        ends = itertools.accumulate(one.numel() for one in tensors.values())
        for (place, one), end in zip(tensors.items(), ends, strict=True):
            found[place] = joined[end - one.numel() : end]
    return [one for place in range(len(numbers)) for one in found[place]]


def hexadecimal(value: int) -> str:
    """Return a digest in the form in which records show it: 16 digits."""
    return f"{value:016x}"


def same_bytes(one: Tensor, other: Tensor) -> bool | Tensor:
    """Return whether two tensors of one size hold the same bytes; on a device, `()` bool there.

    On the host digests are compared: `torch.equal` takes twice as long.
    """
    if is_on_host(one):
        return _xxh3(one) == _xxh3(other)
    return (_words_of(_bytes_of(one)) == _words_of(_bytes_of(other))).all()


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, `(nbytes,)` uint8: a view if the tensor is contiguous."""
    if tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous():
        return tensor
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _words_of(content: Tensor) -> Tensor:
    """Return uint8 values as int64 words: a view if length and address allow it, else a copy with zeros at its end.

    Args:
        content: `(bytes,)`, or `(rows, bytes)`.
    """
    *apart, length = content.shape
    begins = content.data_ptr() | int(content.storage_offset()) | (int(content.stride(0)) if apart else 0)
    if (length | begins) % _WORD_BYTES == 0:
        return content.view(torch.int64)
    padded = content.new_zeros(*apart, -(-length // _WORD_BYTES), dtype=torch.int64)
    padded.view(torch.uint8)[..., :length] = content
    return padded


def _together(tensors: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Yield tensors that are alike together: their places, and their bytes, `(tensors, bytes)`.

    Args:
        tensors: With their places.
    """
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
                yield places, _bytes_of(values[0])[None]
            else:
                stacked = torch.stack(values).detach()
                yield places, stacked.reshape(len(values), first.numel()).view(torch.uint8)


def _xxh3(tensor: Tensor, seed: int = 0) -> int:
    held = tensor.detach().contiguous() if tensor.dtype in _NUMPY else _bytes_of(tensor)
    return xxhash.xxh3_64_intdigest(held.numpy().data, seed)


def _signed(number: int) -> int:
    """Return a number modulo 2^64 as int64 holds it."""
    return (number + 2**63) % 2**64 - 2**63


def _sums_of(content: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of bytes, `(..., bytes)`, as `Sums` says: `(..., rows)` and `(..., columns)`."""
    words = _words_of(content)
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


def _hashed(rows: Tensor, columns: Tensor, num_bytes: int, seeds: Seeds) -> Tensor:
    """Return a number of each tensor's sums, `(tensors,)`; the same for the same sums, length and seed."""
    sums = torch.cat([rows, columns], 1)
    # What a sum is mixed with is its place, so that two that have changed places show.
    mixed = _mixed(sums.add_(Seeds(_PLACE, _PLACE).on(sums.device, sums.size(1)))).sum(1)
    return _mixed(mixed.add_(_signed(num_bytes * _PLACE)).add_(seeds.on(sums.device, len(sums))))


def _mixed(words: Tensor) -> Tensor:
    """Mix each word's bits, in place: different words stay different, and every bit changes many."""
    for factor in _FACTORS:
        words.bitwise_xor_((words >> 32).bitwise_and_(2**32 - 1)).mul_(factor)
    return words.bitwise_xor_((words >> 32).bitwise_and_(2**32 - 1))


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A change of one word."""

    word: int
    """Which 64-bit word of the tensor's bytes, from 0."""
    amount: int
    """New value minus old value, as a signed 64-bit number."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Row and column sums of one tensor's words. A change within one word is certain to show."""

    rows: Tensor
    """`(rows,)` int64."""
    columns: Tensor
    """`(columns,)` int64; fewer than 4096 only if the tensor has fewer words."""
    num_bytes: int
    """Length of the tensor. The last row is filled up with zeros."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Sums":
        """Take the sums of a tensor of any dtype, shape and strides."""
        content = _bytes_of(tensor)
        return cls(*_sums_of(content), content.numel())

    def equals(self, other: "Sums") -> bool:
        """Return whether lengths and all sums are the same."""
        return (
            self.num_bytes == other.num_bytes
            and torch.equal(self.rows, other.rows)
            and torch.equal(self.columns, other.columns)
        )

    def explanations(self, found: "Sums") -> Iterator[list[Change]]:
        """Yield sets of changes that turn these sums into `found`, the likeliest first.

        Only two kinds are looked for: words of one column, and runs of neighbouring words that are shorter than a row.
        Nothing is yielded if the sums are equal, or if neither kind fits. Several sets may fit the same sums, so
        whoever repairs by one has to compare digests afterwards.
        """
        if self.num_bytes != found.num_bytes:
            return
        row_changes, column_changes = found.rows - self.rows, found.columns - self.columns
        rows, columns = row_changes.nonzero()[:, 0].tolist(), column_changes.nonzero()[:, 0].tolist()
        if len(columns) == 1:
            width = self.columns.numel()
            yield [Change(row * width + columns[0], int(row_changes[row])) for row in rows]
        elif columns:
            for first_row in _first_rows(rows, self.rows.numel()):
                yield from _runs(row_changes, column_changes, columns, first_row)


def _first_rows(changed: list[int], num_rows: int) -> Iterable[int]:
    """Return the rows in which a run may begin that changed the sums of the rows `changed`; see Note [Runs]."""
    match changed:
        case []:
            return range(num_rows)
        case [row]:
            return [row, row - 1] if row else [row]
        case [row, next_row] if next_row == row + 1:
            return [row]
        case _:
            return []


def _runs(
    row_changes: Tensor, column_changes: Tensor, columns: list[int], row: int
) -> Iterator[list[Change]]:
    """Yield the runs that begin in `row` and explain these changes of sums; `columns` are those that changed.

    Note [Runs]
        Damage often hits neighbouring words. A run that is shorter than a row lies in one row, or at the end of one row
        and the beginning of the next. It has at most one word in each column, so each column's change is the change
        of one word. What is open is where to split the columns: those from the split on lie in `row`, those before it
        in the next row. The split must give both rows the change that their sums show. That change may be zero although
        words changed: two flipped sign bits add 2^63 each, together 2^64.
    """
    width = column_changes.numel()
    changes = column_changes[columns]
    # By split: what the columns from there on add to `row`, and what the others add to the next row.
    in_row = torch.cat([changes.flip(0).cumsum(0).flip(0), changes.new_zeros(1)])
    in_next = in_row[0] - in_row
    next_change = row_changes[row + 1] if row + 1 < row_changes.numel() else row_changes.new_zeros(())
    for split in ((in_row == row_changes[row]) & (in_next == next_change)).nonzero()[:, 0].tolist():
        if split < len(columns):  # otherwise all of the run lies in the next row
            yield [
                Change((row + (index < split)) * width + column, amount)
                for index, (column, amount) in enumerate(zip(columns, changes.tolist(), strict=True))
            ]


def repair(tensor: Tensor, changes: Iterable[Change]) -> None:
    """Take changes back, in place; the tensor must be contiguous."""
    content = tensor.detach().view(-1).view(torch.uint8)
    for change in changes:
        # Through a copy: the tensor may end within the word, and may begin at any address.
        held = content[change.word * _WORD_BYTES :][:_WORD_BYTES]
        word = _words_of(held.clone()).clone()
        word -= change.amount
        held.copy_(word.view(torch.uint8)[: held.numel()])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Checksum:
    """Digest and sums of a tensor at one moment: they tell later whether it has changed, and repair it."""

    digest: Digest
    sums: Sums

    @classmethod
    def of(cls, tensor: Tensor) -> "Checksum":
        """Take the checksum of a tensor as it is now."""
        (found,) = checksums([tensor])
        return found

    def repairs(self, tensor: Tensor) -> bool:
        """Give a damaged tensor its old bits back, in place, and return whether that succeeded.

        It succeeds for damage to words of one column, or to a run of words shorter than a row, in a contiguous tensor.
        If it fails the tensor is left as it was.
        """
        if not tensor.is_contiguous():
            return False
        (expected,) = on_host([self.digest])
        tries = max(1, _BYTES_TRIED // max(1, tensor.nbytes))
        for changes in itertools.islice(self.sums.explanations(Sums.of(tensor)), tries):
            repair(tensor, changes)
            if digest(tensor) == expected:
                return True
            repair(tensor, [Change(change.word, -change.amount) for change in changes])
        return False


def checksums(tensors: Sequence[Tensor]) -> list[Checksum]:
    """Take the checksum of each tensor as it is now; nothing waits for a device."""
    found = {}
    for places, content in _together(enumerate(tensors)):
        (rows, columns), length = _sums_of(content), content.size(1)
        numbers = (
            digests_of_rows(content) if is_on_host(content) else _hashed(rows, columns, length, _UNSEEDED)
        )
        sums = zip(rows.unbind(), columns.unbind(), strict=True)
        for place, one, (of_rows, of_columns) in zip(places, numbers, sums, strict=True):
            found[place] = Checksum(one, Sums(of_rows, of_columns, length))
    return [found[place] for place in range(len(tensors))]


def compared(taken: Sequence[Checksum], tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return of each tensor the digest when its checksum was taken, and that of now; they differ if it has changed.

    The host waits once for each device.
    """
    numbers = on_host([*(one.digest for one in taken), *digests(tensors)])
    return list(zip(numbers[: len(taken)], numbers[len(taken) :], strict=True))
