"""The order of the data: one for all world sizes. That it resumes anywhere is checked in tests/testing."""

import random
import sys
import threading
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto import DataParallel, Total, errors
from stretto_lab.recipes.batches import MicroBatches, reshard
from stretto_lab.recipes.blocks import Packed, Streams
from stretto_lab.recipes.task import Loss, MeanLoss
from stretto_lab.recipes.text import Subwords
from stretto_lab.virtual import VirtualCluster, VirtualGroup
from tests.draws import draws, seeds
from tests.processes import Command

SAMPLES, SIZE, SEED = 23, 3, 5


class Numbers:
    """The samples are their own indices."""

    def __len__(self) -> int:
        return SAMPLES

    def batch(self, indices: Tensor) -> list[int]:
        return indices.tolist()


class Endless(Numbers):
    """Samples that are read for ever, as from a disk that hangs."""

    def batch(self, indices: Tensor) -> list[int]:
        sys.stdout.write("reading\n")
        sys.stdout.flush()
        threading.Event().wait()
        return []


def read_for_ever() -> None:
    next(iter(MicroBatches(Endless(), SIZE, rank=0, world_size=1, seed=SEED, workers=2)))


@pytest.mark.timeout(60)  # it would wait as long as they read
def test_processes_that_read_ahead_end_with_their_rank_whatever_ends_it() -> None:
    with Command(function=read_for_ever) as rank:
        assert [rank.stdout.readline() for _ in range(2)] == ["reading\n"] * 2
        rank.kill()
        assert rank.communicate() == ("", "")


def loader(rank: int = 0, world_size: int = 1, seed: int = SEED) -> MicroBatches[list[int]]:
    return MicroBatches(Numbers(), SIZE, rank=rank, world_size=world_size, seed=seed)


def take(source: MicroBatches[list[int]], count: int) -> list[list[int]]:
    return list(islice(source, count))


def take_before(end: int, source: MicroBatches[list[int]], count: int) -> list[list[int]]:
    return [batch for _ in range(count) if source.position < end for batch in take(source, 1)]


def test_another_seed_gives_another_order() -> None:
    assert take(loader(seed=SEED + 1), 20) != take(loader(), 20)


def test_ranks_that_are_unequally_far_keep_their_own_places_at_the_same_world_size() -> None:
    stopped = [loader(rank, 2) for rank in range(2)]
    take(stopped[0], 7)
    take(stopped[1], 3)
    states = [rank.state_dict() for rank in stopped]
    assert [reshard(states, rank, 2)["consumed"] for rank in range(2)] == [7, 3]


@pytest.mark.parametrize("seed", seeds(100))
def test_whoever_comes_and_goes_every_micro_batch_is_taken_once(seed: int) -> None:
    rng = random.Random(seed)
    end, taken = 60, []
    loaders = [loader(rank, 3) for rank in range(3)]
    for _ in range(rng.randint(1, 5)):
        for one in loaders:
            taken += take_before(end, one, rng.randint(0, 6))
        states, ranks = [one.state_dict() for one in loaders], rng.randint(1, 6)
        update = rng.choice([None, rng.randint(ranks, 3 * ranks)])
        loaders = [loader(rank, ranks) for rank in range(ranks)]
        for rank, one in enumerate(loaders):
            one.load_state_dict(reshard(states, rank, ranks, update))
    for one in loaders:
        taken += take_before(end, one, end)
    assert sorted(taken) == sorted(take(loader(), end))


@pytest.mark.parametrize("seed", seeds(50))
def test_an_update_has_the_same_samples_on_any_number_of_ranks(seed: int) -> None:
    rng = random.Random(seed)
    total = Total(rng.randint(5, 9))
    expected, states = iter(loader()), [loader().state_dict()]
    for _ in range(rng.randint(2, 4)):
        ranks = rng.randint(1, 5)
        loaders = [loader(rank, ranks) for rank in range(ranks)]
        for rank, one in enumerate(loaders):
            one.load_state_dict(reshard(states, rank, ranks, total.micro_batches))
        for _ in range(rng.randint(1, 4)):
            update = [batch for rank, one in enumerate(loaders) for batch in take(one, total.of(rank, ranks))]
            assert sorted(update) == sorted(islice(expected, total.micro_batches))
        states = [one.state_dict() for one in loaders]


def test_a_state_of_another_order_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match=r"saved with seed 6, now seed 5"):
        loader().load_state_dict(loader(seed=6).state_dict())
    with pytest.raises(
        errors.ConfigError, match=r"saved with world_size 2, rank 1, now world_size 1, rank 0"
    ):
        loader().load_state_dict(loader(1, 2).state_dict())


def test_states_of_some_ranks_only_are_refused() -> None:
    states = [loader(rank, 3).state_dict() for rank in range(3)]
    for wrong in (states[:2], states[::-1], [states[0], loader(1, 3, seed=6).state_dict(), states[2]]):
        with pytest.raises(errors.ConfigError, match="of all ranks of one run in rank order"):
            reshard(wrong, 0, 3)


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(errors.ConfigError, match="24 samples cannot be drawn from 23"):
        MicroBatches(Numbers(), 24, rank=0, world_size=1, seed=0)
    with pytest.raises(errors.ConfigError, match="rank 2 is not one of the 2 ranks"):
        loader(2, 2)
    with pytest.raises(errors.ConfigError, match="must not be negative, found -1"):
        loader(seed=-1)


class Written:
    """Documents of one to five blocks, each of which says whose it is and which."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, indices: list[int]) -> dict[str, list[str]]:
        texts = ("".join(f"{index:03}.{block:03} " for block in range(1 + index % 5)) for index in indices)
        return {"text": [text[:-1] for text in texts]}


def packed(rank: int, ranks: int) -> Packed:
    streams = Streams(Written(), "text", Subwords.trained((), 257))
    return Packed(streams, length=8, size=1, rank=rank, world_size=ranks, seed=SEED)


@pytest.mark.parametrize("seed", seeds(30))
def test_a_parcel_that_was_begun_is_gone_on_with_by_whoever_gets_it(seed: int) -> None:
    rng = random.Random(seed)
    blocks: list[tuple[int, ...]] = []

    def take_blocks(one: Packed, count: int) -> None:
        blocks.extend(tuple(window.inputs[0].tolist()) for window in islice(one, count))

    loaders = [packed(rank, 3) for rank in range(3)]
    for ranks in (rng.randint(1, 5), rng.randint(1, 5), 1):
        for one in loaders:
            take_blocks(one, rng.randint(0, 4))
        states = [one.state_dict() for one in loaders]
        loaders = [packed(rank, ranks) for rank in range(ranks)]
        for rank, one in enumerate(loaders):
            one.load_state_dict(reshard(states, rank, ranks))
    epoch = sum(1 + index % 5 for index in range(60))
    take_blocks(loaders[0], epoch - len(blocks))
    assert len(set(blocks)) == epoch


def test_ranks_that_share_an_evaluation_all_get_the_number_of_one_to_the_bit() -> None:
    for seed in draws(40):
        draw = random.Random(seed)
        batches = [torch.tensor(draw.gauss(0, 10 ** draw.randrange(9))) for _ in range(draw.randrange(1, 9))]
        ranks, weights, looked = draw.randrange(1, 5), [draw.choice([0.1, 1 / 3, 7.0]) for _ in batches], []

        def loss(model: nn.Module, batch: torch.Tensor, weights: Any = weights, looked: Any = looked) -> Loss:
            looked.append(len(looked))
            return Loss(model(batch.view(1, 1)).sum(), weights[int(batch.abs() * 97) % len(weights)], 1)

        def program(rank: int, group: VirtualGroup, mean: MeanLoss) -> tuple[float, float]:
            torch.manual_seed(1)
            model = nn.Linear(1, 1)
            job = DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), group=group)
            return mean(model, job), mean(model) if rank == 0 else 0.0

        found = VirtualCluster(ranks).run(partial(program, mean=MeanLoss(batches, loss))).values
        assert {one for one, _ in found} == {found[0][1]}, seed
        assert len(looked) == 2 * len(batches), f"{seed}: {len(looked)} evaluations"
