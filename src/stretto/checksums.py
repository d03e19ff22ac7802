"""Fingerprints of tensors: one that tells whether they changed, one that also says where.

A tensor's bytes as 64-bit words.

`locate`: sums over rows and columns of a tensor's words, which say where a change is and undo it.

The bytes are read as 64-bit words w, laid out in rows of `_COLUMNS`, and added modulo 2⁶⁴:

    R_i = Σ_j w_ij        C_j = Σ_i w_ij

A change of one word by d shows as R_i' - R_i = d in one row and C_j' - C_j = d in one column, so that it is found
and taken back to the bit. The sums are integer torch operations, computed where the data live, with the same value
on every device. Changes of several words can cancel: four corners of a rectangle by +d, -d, +d, -d leave no trace.

`digest`: one 64-bit number that changes when any byte, its place or the length does.

A checksum: what is kept of a tensor to tell later whether it changed, and to mend it.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import Tensor

WORD_BYTES = 8


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes in the order of its elements, `(nbytes,)` uint8; a view where it is contiguous."""
    if tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous():
        return tensor
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def words_of(content: Tensor) -> Tensor:
    """Return `content`, uint8, as int64 words: a view, or a copy where it has to be filled up with zeros."""
    is_whole = content.numel() % WORD_BYTES == 0 and content.data_ptr() % WORD_BYTES == 0
    if is_whole and content.storage_offset() % WORD_BYTES == 0:
        return content.view(torch.int64)
    padded = content.new_zeros(-(-content.numel() // WORD_BYTES) * WORD_BYTES)
    padded[: content.numel()] = content
    return padded.view(torch.int64)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one size hold the same bytes.

    By words, because `torch.equal` takes seven times as long by bytes.
    """
    return torch.equal(words_of(bytes_of(one)), words_of(bytes_of(other)))


_COLUMNS = 4096
"""Words in a row: 32 KiB, so that the sums of 64 MiB are 0.07 % of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    """A word that differs from what it was."""

    word: int
    """Index of the 64-bit word within the tensor's bytes."""
    change: int
    """Found minus expected, as a signed 64-bit number."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Located:
    """The sums of one tensor."""

    rows: Tensor
    """`(rows,)` int64."""
    columns: Tensor
    """`(columns,)` int64."""
    num_bytes: int
    """Of the tensor: what lies behind the last byte counts as zero."""

    def equals(self, other: "Located") -> bool:
        """Return whether no difference shows."""
        return (
            self.num_bytes == other.num_bytes
            and torch.equal(self.rows, other.rows)
            and torch.equal(self.columns, other.columns)
        )

    def explanations(self, found: "Located") -> Iterator[list[Damage]]:
        """Yield what may have made `found` of this: words in one column, or in a run, likeliest first.

        Several explanations may have the same sums: whoever mends by one has to compare digests afterwards. Nothing is
        yielded where the sums agree, or where no such damage fits them.
        """
        if self.num_bytes != found.num_bytes:
            return
        by_row, by_column = found.rows - self.rows, found.columns - self.columns
        rows, columns = by_row.nonzero()[:, 0].tolist(), by_column.nonzero()[:, 0].tolist()
        if len(columns) == 1:
            width = self.columns.numel()
            yield [Damage(row * width + columns[0], int(by_row[row])) for row in rows]
        elif columns and len(rows) <= 2:
            yield from _runs(by_row, by_column, columns, _first_rows(rows, by_row.numel()))

    def to_bytes(self) -> bytes:
        """Return the sums and the length as bytes."""
        content: bytes = torch.cat([self.rows, self.columns]).cpu().numpy().tobytes()
        return content + self.num_bytes.to_bytes(8, "little")


def locate(tensor: Tensor) -> Located:
    """Return the sums of a tensor of any dtype, shape and strides, read in the order of its elements.

    Any change within one 64-bit word is certain to show; see docs/guards.md for the miss rates of others.
    """
    content = bytes_of(tensor)
    words = words_of(content)
    width = min(_COLUMNS, max(1, words.numel()))
    num_whole = words.numel() // width
    whole = words[: num_whole * width].view(num_whole, width)
    rows, columns = whole.sum(1), whole.sum(0)
    rest = words[num_whole * width :]
    if rest.numel():
        rows = torch.cat([rows, rest.sum().reshape(1)])
        columns[: rest.numel()] += rest
    return Located(rows, columns, content.numel())


def _first_rows(changed: list[int], num_rows: int) -> Iterable[int]:
    """Return in which rows a run may begin that has changed the sums of these; see Note [Runs]."""
    if len(changed) == 2:
        return changed[:1] if changed[1] == changed[0] + 1 else ()
    return [row for row in (changed[0], changed[0] - 1) if row >= 0] if changed else range(num_rows)


def _runs(
    by_row: Tensor, by_column: Tensor, columns: list[int], first_rows: Iterable[int]
) -> Iterator[list[Damage]]:
    """Yield the runs of words with these changes of sums.

    Note [Runs]
        Damage tends to strike neighbours. A run of less than a row lies in one row, or in the last columns of one and
        the first of the next. Its changes are those of the columns, if it has one word in each; in either part they
        must add up to the change of the row. That may be none at all: a sign turned in two words by +2⁶³ and +2⁶³.
    """
    width = by_column.numel()
    changes = by_column[columns]
    late = torch.cat([changes.flip(0).cumsum(0).flip(0), changes.new_zeros(1)])  # from each changed column on
    early = late[0] - late
    for row in first_rows:
        below = by_row[row + 1] if row + 1 < by_row.numel() else by_row.new_zeros(())
        for split in ((late == by_row[row]) & (early == below)).nonzero()[:, 0].tolist():
            if split < len(columns):
                yield [
                    Damage((row + (index < split)) * width + column, change)
                    for index, (column, change) in enumerate(zip(columns, changes.tolist(), strict=True))
                ]


def mend(tensor: Tensor, damage: list[Damage]) -> None:
    """Take back the changes in `damage`, in place; the tensor must be contiguous.

    The words are mended as bytes, since a tensor may end in the middle of a word.
    """
    content = tensor.detach().view(-1).view(torch.uint8)
    for found in damage:
        start = found.word * 8
        held = content[start : start + 8]
        word = words_of(held.clone()).clone()
        word -= found.change
        held.copy_(word.view(torch.uint8)[: held.numel()])


def digest(tensor: Tensor, seed: int = 0) -> int:
    """Return xxh3 of a tensor's bytes; of its `locate` sums where the bytes are not in the host's memory.

    Two different contents have one digest with a chance of about 2⁻⁶⁴; on a device the measured miss classes of
    `locate` come on top (docs/guards.md). Values of one device type are comparable with each other only.

    Args:
        tensor: Of any dtype, shape and strides; read in the order of its elements.
        seed: What the values are, as a number: equal bytes under different seeds have different digests, so that
            a stale or misplaced value cannot pass for the right one.
    """
    if tensor.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(bytes_of(tensor).numpy().data, seed=seed)
    sums = locate(tensor)
    return xxhash.xxh3_64_intdigest(sums.to_bytes(), seed=seed)


def hexadecimal(value: int) -> str:
    """Return a digest as records show it."""
    return f"{value:016x}"


_BYTES_TRIED = 2**34
"""Read at most to tell which of several explanations is the right one: seconds, where the alternative is a restart."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Checksum:
    """Digest and sums of a tensor as it was."""

    digest: int
    located: Located

    @classmethod
    def of(cls, tensor: Tensor) -> "Checksum":
        """Take the checksum of a tensor as it is."""
        return cls(digest(tensor), locate(tensor))

    def mends(self, tensor: Tensor) -> bool:
        """Bring a damaged tensor back to the bit, in place, and return whether that succeeded.

        It does where all damaged words lie in one column of the sums, or in a run of less than a row. Where it does
        not, the tensor is as it was.
        """
        if not tensor.is_contiguous():
            return False
        tries = max(1, _BYTES_TRIED // max(1, tensor.nbytes))
        for damage in itertools.islice(self.located.explanations(locate(tensor)), tries):
            mend(tensor, damage)
            if digest(tensor) == self.digest:
                return True
            mend(tensor, [Damage(found.word, -found.change) for found in damage])
        return False
