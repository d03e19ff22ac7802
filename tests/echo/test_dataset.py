"""Samples echoed inside workers: read once, used often, dealt to ranks and workers before the echo."""

import math
from collections import Counter
from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from stretto import EchoDataset, errors


class Counted(Dataset[Tensor]):
    """Counts its reads."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.reads[index] += 1
        return torch.tensor(index)


@pytest.mark.parametrize(
    ("uses", "world_size", "shuffle"),
    [(1, 1, 7), (1.5, 3, 1), (2, 1, 1000), (2, 3, 7), (2.75, 1, 1), (2.75, 3, 1000)],
)
def test_every_sample_is_read_once_on_one_rank_and_used_the_floor_or_the_ceiling_of_uses(
    uses: float, world_size: int, shuffle: int
) -> None:
    seen: Counter[int] = Counter()
    for rank in range(world_size):
        data = Counted(50)
        echo = EchoDataset(data, uses, shuffle=shuffle, seed=3, rank=rank, world_size=world_size)
        handed_out = [int(sample) for sample in echo]
        assert len(handed_out) == len(echo)
        assert set(data.reads.values()) == {1}
        assert not seen.keys() & set(handed_out)
        seen.update(handed_out)
    assert sorted(seen) == list(range(50))
    assert set(seen.values()) <= {math.floor(uses), math.ceil(uses)}
    # Each rank rounds its own total down.
    assert 50 * Fraction(uses) - world_size <= seen.total() <= 50 * Fraction(uses)


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_workers_share_the_samples_of_a_rank(num_workers: int) -> None:
    echo = EchoDataset(Counted(23), 2.5, seed=1)
    uses = [use for worker in range(num_workers) for use in echo.order(worker, num_workers)]
    assert len(uses) == len(echo)
    assert len({use.index for use in uses}) == 23
    assert sum(use.is_last for use in uses) == 23


def test_a_loader_with_workers_gives_every_use() -> None:
    echo = EchoDataset(Counted(10), 2, seed=1)
    loader = DataLoader(echo, batch_size=4, num_workers=2)
    assert Counter(int(value) for batch in loader for value in batch) == dict.fromkeys(range(10), 2)


def test_every_use_has_an_augmentation_of_its_own() -> None:
    echo = EchoDataset(Counted(20), 3, transform=lambda sample: sample + torch.rand(1))
    values = [float(value) for value in echo]
    assert len(set(values)) == 60
    assert Counter(int(value) for value in values) == dict.fromkeys(range(20), 3)


def test_uses_are_spread_by_the_buffer() -> None:
    def gaps(shuffle: int) -> list[int]:
        order = [use.index for use in EchoDataset(Counted(400), 2, shuffle=shuffle).order(0, 1)]
        first: dict[int, int] = {}
        distances = [place - first.setdefault(index, place) for place, index in enumerate(order)]
        return [distance for distance in distances if distance]

    assert set(gaps(1)) == {1}
    # A held sample is drawn with probability 1 / 100 at each step: gaps are geometric of mean 100 until the samples
    # run out.
    assert 50 < sum(gaps(100)) / 400 < 150


def test_the_order_is_that_of_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        echo = EchoDataset(Counted(30), 2, seed=seed)
        echo.set_epoch(epoch)
        return [int(sample) for sample in echo]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


@pytest.mark.parametrize("wrong", [{"uses": 0.5}, {"shuffle": 0}, {"rank": 2, "world_size": 2}])
def test_numbers_out_of_range_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(errors.ConfigError, match="expected uses >= 1"):
        EchoDataset(Counted(3), **wrong)
