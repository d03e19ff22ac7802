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
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import Tensor

_WORD_BYTES = 8
_COLUMNS = 4096
"""Words in a row: 32 KiB, so that the sums of 64 MiB are 0.07 % of it."""
_BYTES_TRIED = 2**34
"""How much a repair reads at most to find the right one of several explanations: some seconds of work, where giving up
means a restart."""


def digest(tensor: Tensor, seed: int = 0) -> int:
    """Return xxh3 of a tensor's bytes, as a number below 2^64; it depends on every byte, its place, and the length.

    Two different tensors have the same digest with a chance of about 2^-64. For a tensor that is not in the host's
    memory it is xxh3 of the tensor's `Sums`, which miss some changes (docs/guards.md); so only digests from one
    type of device can be compared.

    Args:
        tensor: Of any dtype, shape and strides.
        seed: A number for what the tensor is. Equal bytes have different digests under different seeds, so that an
            old or misplaced tensor is not taken for the right one.
    """
    if tensor.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(_bytes_of(tensor).numpy().data, seed=seed)
    return xxhash.xxh3_64_intdigest(Sums.of(tensor).to_bytes(), seed=seed)


def hexadecimal(value: int) -> str:
    """Return a digest in the form in which records show it: 16 digits."""
    return f"{value:016x}"


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one size hold the same bytes.

    They are compared as words: `torch.equal` takes seven times as long for bytes.
    """
    return torch.equal(_words_of(_bytes_of(one)), _words_of(_bytes_of(other)))


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, `(nbytes,)` uint8: a view if the tensor is contiguous."""
    if tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous():
        return tensor
    values = tensor.detach().contiguous()
    return values.as_strided((values.numel(),), (1,)).view(
        torch.uint8
    )  # an expanded element has stride 0 still


def _words_of(content: Tensor) -> Tensor:
    """Return uint8 values as int64 words: a view if length and address allow it, else a copy with zeros at its end."""
    is_whole = content.numel() % _WORD_BYTES == 0 and content.data_ptr() % _WORD_BYTES == 0
    if is_whole and content.storage_offset() % _WORD_BYTES == 0:
        return content.view(torch.int64)
    padded = content.new_zeros(-(-content.numel() // _WORD_BYTES) * _WORD_BYTES)
    padded[: content.numel()] = content
    return padded.view(torch.int64)


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
        words = _words_of(content)
        width = min(_COLUMNS, max(1, words.numel()))
        num_whole = words.numel() // width
        table, rest = words[: num_whole * width].view(num_whole, width), words[num_whole * width :]
        rows, columns = table.sum(1), table.sum(0)
        if rest.numel():
            rows = torch.cat([rows, rest.sum().reshape(1)])
            columns[: rest.numel()] += rest
        return cls(rows, columns, content.numel())

    def equals(self, other: "Sums") -> bool:
        """Return whether lengths and all sums are the same."""
        return (
            self.num_bytes == other.num_bytes
            and torch.equal(self.rows, other.rows)
            and torch.equal(self.columns, other.columns)
        )

    def to_bytes(self) -> bytes:
        """Return the sums and the length as bytes."""
        content: bytes = torch.cat([self.rows, self.columns]).cpu().numpy().tobytes()
        return content + self.num_bytes.to_bytes(8, "little")

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

    digest: int
    sums: Sums

    @classmethod
    def of(cls, tensor: Tensor) -> "Checksum":
        """Take the checksum of a tensor as it is now."""
        return cls(digest(tensor), Sums.of(tensor))

    def repairs(self, tensor: Tensor) -> bool:
        """Give a damaged tensor its old bits back, in place, and return whether that succeeded.

        It succeeds for damage to words of one column, or to a run of words shorter than a row, in a contiguous tensor.
        If it fails the tensor is left as it was.
        """
        if not tensor.is_contiguous():
            return False
        tries = max(1, _BYTES_TRIED // max(1, tensor.nbytes))
        for changes in itertools.islice(self.sums.explanations(Sums.of(tensor)), tries):
            repair(tensor, changes)
            if digest(tensor) == self.digest:
                return True
            repair(tensor, [Change(change.word, -change.amount) for change in changes])
        return False
