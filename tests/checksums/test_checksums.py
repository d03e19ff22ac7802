"""Digests see every byte; sums find the word that changed, and repair it."""

import itertools

import pytest
import torch
from torch import Tensor

from stretto.checksums import Checksum, Sums, digest, same_bytes
from stretto.guards.repair import explanations, repair, repairs
from tests.checksums.sums import are_alike

TENSORS = {
    "one word": torch.arange(2, dtype=torch.float32),
    "less than a word": torch.tensor([1.5]),
    "ends within a word": torch.arange(77, dtype=torch.float32),
    "16-bit": torch.arange(91, dtype=torch.float32).bfloat16(),
    "bytes": torch.arange(253, dtype=torch.uint8),
    "flags": torch.tensor([True, False, True]),
    "strided": torch.arange(60, dtype=torch.float32).view(6, 10).t(),
    "number": torch.tensor(3.0),
    "several rows": torch.arange(4096 * 3 + 5, dtype=torch.int64).neg() * 7919,
}


def with_byte(tensor: Tensor, byte: int, mask: int) -> Tensor:
    """Return a copy whose `byte`-th byte, in the order of elements, is xored with `mask`."""
    copy = tensor.clone(memory_format=torch.contiguous_format)
    copy.view(-1).view(torch.uint8)[byte] ^= mask
    return copy


@pytest.mark.parametrize("name", [name for name in TENSORS if name != "several rows"])
def test_every_bit_of_every_byte_shows_in_both_digests(name: str) -> None:
    tensor = TENSORS[name]
    healthy, sums = digest(tensor), Sums.of(tensor)
    for byte, bit in itertools.product(range(tensor.nbytes), range(8)):
        flipped = with_byte(tensor, byte, 1 << bit)
        assert digest(flipped) != healthy
        assert not are_alike(Sums.of(flipped), sums)


@pytest.mark.parametrize("name", TENSORS)
def test_a_damaged_word_is_found_and_repaired_to_the_bit(name: str) -> None:
    tensor = TENSORS[name]
    sums = Sums.of(tensor)
    stride = max(1, tensor.nbytes // 50)
    for byte in [*range(0, tensor.nbytes, stride), tensor.nbytes - 1]:
        damaged = with_byte(tensor, byte, 0xA5)
        (found,) = explanations(sums, Sums.of(damaged))
        assert [word.word for word in found] == [byte // 8]
        repair(damaged, found)
        assert digest(damaged) == digest(tensor)


@pytest.mark.parametrize(("first", "factor"), [(8190, -1), (8189, -1), (8188, -1), (101, -3)])
def test_a_run_is_repaired_also_around_the_end_of_a_row(first: int, factor: int) -> None:
    """Where only signs change, every word changes alike."""
    tensor = torch.randn(3 * 8192)
    damaged = tensor.clone()
    damaged[first : first + 5] *= factor
    assert repairs(Checksum.of(tensor), damaged)
    assert torch.equal(damaged, tensor)


def test_what_looks_like_a_run_around_the_end_of_a_row_and_is_none_is_not_repaired() -> None:
    tensor = torch.randn(3 * 8192)
    damaged = tensor.clone()
    damaged[0].neg_()
    damaged[2 * 8192 - 2].neg_()  # the same sums as of a run at the end of the first row
    before = damaged.clone()
    assert not repairs(Checksum.of(tensor), damaged)
    assert torch.equal(damaged, before)
    apart = tensor.clone()
    apart[5:7] += 1.0
    apart[8192 + 77] += 3.0
    assert list(explanations(Sums.of(tensor), Sums.of(apart))) == []


def test_a_run_whose_changes_cancel_in_the_sum_of_its_row_is_repaired() -> None:
    words = torch.arange(3 * 4096, dtype=torch.int64)
    damaged = words.clone()
    damaged[6000:6004] ^= -(2**63)
    assert torch.equal(Sums.of(damaged).rows, Sums.of(words).rows)
    assert repairs(Checksum.of(words), damaged)
    assert torch.equal(damaged, words)


def test_equal_tensors_show_no_damage_and_other_lengths_no_place() -> None:
    tensor = torch.randn(20000)
    assert list(explanations(Sums.of(tensor), Sums.of(tensor.clone()))) == []
    longer = torch.cat([tensor, torch.zeros(2)])
    assert not are_alike(Sums.of(tensor), Sums.of(longer))
    assert list(explanations(Sums.of(tensor), Sums.of(longer))) == []
    assert digest(tensor) != digest(longer)


def test_what_hides_from_the_sums_does_not_hide_from_the_digest() -> None:
    tensor = torch.zeros(2 * 4096, dtype=torch.int64)
    hidden = tensor.view(2, 4096).clone()
    hidden[0, 3] += 5
    hidden[0, 9] -= 5
    hidden[1, 3] -= 5
    hidden[1, 9] += 5
    assert are_alike(Sums.of(hidden.view(-1)), Sums.of(tensor))  # the documented miss
    assert digest(hidden.view(-1)) != digest(tensor)


def test_sums_are_those_of_the_definition() -> None:
    words = torch.randint(-(2**62), 2**62, (4096 * 2 + 9,))
    padded = [*words.tolist(), *[0] * (3 * 4096 - words.numel())]
    rows = [sum(padded[i * 4096 : (i + 1) * 4096]) % 2**64 for i in range(3)]
    columns = [sum(padded[j::4096]) % 2**64 for j in range(4096)]
    sums = Sums.of(words)
    assert [value % 2**64 for value in sums.rows.tolist()] == rows
    assert [value % 2**64 for value in sums.columns.tolist()] == columns


def test_zeros_of_either_sign_are_not_the_same_bytes() -> None:
    assert not same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_what_is_not_a_number_is_the_same_as_its_copy() -> None:
    values = torch.tensor([float("nan"), 1.0, 2.0])
    assert same_bytes(values, values.clone())


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 100])
def test_a_change_of_any_byte_tells_at_any_length_and_alignment(length: int, start: int) -> None:
    content = torch.arange(length + 1, dtype=torch.uint8)[start : start + length]
    for index in range(length):
        other = content.clone()
        other[index] ^= 1
        assert not same_bytes(content, other)
