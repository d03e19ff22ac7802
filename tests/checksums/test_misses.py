"""How often changes of several words hide from the sums: the rates that docs/guards.md states."""

import pytest
import torch
from torch import Tensor

from stretto.checksums import Sums
from tests.checksums.sums import are_alike

DRAWS = 2_000
WORDS = 4096 * 4 + 37


def equal_flips(words: Tensor, chance: torch.Generator) -> None:
    """Flip the same bit of two words."""
    places = torch.randperm(WORDS, generator=chance)[:2]
    words[places] ^= 1 << int(torch.randint(62, (), generator=chance))


def run_of_four(words: Tensor, chance: torch.Generator) -> None:
    """Flip one drawn bit in each of four neighbours."""
    start = int(torch.randint(WORDS - 4, (), generator=chance))
    words[start : start + 4] ^= 1 << torch.randint(62, (4,), generator=chance)


def swap(words: Tensor, chance: torch.Generator) -> None:
    """Exchange two words."""
    places = torch.randperm(WORDS, generator=chance)[:2]
    words[places] = words[places.flip(0)]


def zeroed_chunk(words: Tensor, chance: torch.Generator) -> None:
    """Lose 4 KiB."""
    start = int(torch.randint(WORDS - 512, (), generator=chance))
    words[start : start + 512] = 0


def duplicated_chunk(words: Tensor, chance: torch.Generator) -> None:
    """Write 4 KiB over other 4 KiB."""
    source, target = (int(torch.randint(WORDS - 512, (), generator=chance)) for _ in range(2))
    words[target : target + 512] = words[source : source + 512].clone()


@pytest.mark.parametrize("change", [equal_flips, run_of_four, swap, zeroed_chunk, duplicated_chunk])
def test_no_draw_is_missed(change: object) -> None:
    chance = torch.Generator().manual_seed(11)
    original = torch.randn(2 * WORDS, generator=chance).view(torch.int64)
    sums, missed, unchanged = Sums.of(original), 0, 0
    words = original.clone()
    for _ in range(DRAWS):
        change(words, chance)  # type: ignore[operator]  # one of the functions above
        unchanged += torch.equal(words, original)
        missed += are_alike(Sums.of(words), sums)
        words.copy_(original)
    assert unchanged < DRAWS / 100
    assert missed == unchanged
