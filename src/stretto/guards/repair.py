"""Repair of damaged tensors: the sums in their checksums show which words have changed, and by how much."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from stretto.checksums import WORD_BYTES, Checksum, Sums, digest, on_host, words_of

# Most bytes that a repair reads to find the right explanation: some seconds of work, whereas giving up means a restart.
_BYTES_TRIED = 2**34


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A change of one word."""

    word: int
    """Which 64-bit word of the tensor's bytes, from 0."""
    amount: int
    """New value minus old value, as a signed 64-bit number."""


def explanations(expected: Sums, found: Sums) -> Iterator[list[Change]]:
    """Yield sets of changes that change sums into `found`, the likeliest first.

    It finds only two kinds: words of one column, and runs of neighbouring words that are shorter than a row. Nothing is
    yielded if the sums are equal, or if neither kind fits. Several sets may fit the same sums, so a repair by one of
    them must compare digests afterwards.
    """
    if expected.num_bytes != found.num_bytes:
        return
    row_changes, column_changes = found.rows - expected.rows, found.columns - expected.columns
    rows, columns = row_changes.nonzero()[:, 0].tolist(), column_changes.nonzero()[:, 0].tolist()
    if len(columns) == 1:
        width = expected.columns.numel()
        yield [Change(row * width + columns[0], int(row_changes[row])) for row in rows]
    elif columns:
        for first_row in _first_rows(rows, expected.rows.numel()):
            yield from _runs(row_changes, column_changes, columns, first_row)


def _first_rows(changed: list[int], num_rows: int) -> Iterable[int]:
    """Return the rows in which a run can begin, if the sums of the rows `changed` have changed; see Note [Runs]."""
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
    """Yield the runs that begin in `row` and explain these changes of sums; `columns` have changed.

    Note [Runs]
        Damage often hits neighbouring words. A run that is shorter than a row is in one row, or at the end of one row
        and the beginning of the next. It has at most one word in each column, so each column's change is the change
        of one word. The code must find the split of the columns: columns from the split on are in `row`, columns
        before it in the next row. The split must give both rows the change that their sums show. That change may be
        zero although words changed: two flipped sign bits add 2^63 each, together 2^64.
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
    """Undo changes, in place; the tensor must be contiguous."""
    content = tensor.detach().view(-1).view(torch.uint8)
    for change in changes:
        # Through a copy: the tensor may end within the word, and may begin at any address.
        held = content[change.word * WORD_BYTES :][:WORD_BYTES]
        word = words_of(held.clone()).clone()
        word -= change.amount
        held.copy_(word.view(torch.uint8)[: held.numel()])


def repairs(checksum: Checksum, tensor: Tensor) -> bool:
    """Restore a damaged tensor to the bits of its checksum, in place, and return whether that succeeded.

    It succeeds for damage to words of one column, or to a run of words shorter than a row, in a contiguous tensor. If
    it fails, the tensor is not changed.
    """
    if not tensor.is_contiguous():
        return False
    (expected,) = on_host([checksum.digest])
    tries = max(1, _BYTES_TRIED // max(1, tensor.nbytes))
    for changes in itertools.islice(explanations(checksum.sums, Sums.of(tensor)), tries):
        repair(tensor, changes)
        if digest(tensor) == expected:
            return True
        repair(tensor, [Change(change.word, -change.amount) for change in changes])
    return False
