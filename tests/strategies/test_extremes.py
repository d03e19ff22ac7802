"""An interval of any length may be asked for: one that the run does not reach is like any other of that kind."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stretto import DataParallel, DiLoCo, LocalSGD, PAFTDyn, PAFTSync, checkpoint
from stretto.errors import ConfigError
from stretto.randomness import coin
from stretto.strategies import Strategy
from stretto.strategies.contract import AllReduce, Average, Launch, Look, Moment, Reduce, Script, Step
from stretto.strategies.ledger import ledger_of
from stretto_lab.virtual import VirtualCluster, VirtualGroup
from tests.bits import unequal

UPDATES = 6
LONG: dict[str, Callable[[int], Strategy]] = {
    "diloco": DiLoCo,
    "diloco in fragments": lambda updates: DiLoCo(updates, fragments=updates // 5),
    "diloco, delayed": lambda updates: DiLoCo(updates, delay=updates - 1),
    "local": lambda updates: LocalSGD(0, max_gap=updates),
    "local by rate": lambda updates: LocalSGD(1 / updates),
    "paft-sync": PAFTSync,
    "paft-sync, overlapping": lambda updates: PAFTSync(updates, overlap=True),
    "paft-dyn": lambda updates: PAFTDyn(first=updates, maximum=updates),
}
"""Strategies that average every so many updates."""


def trained(strategy: Strategy, save_at: int, folder: Path, rank: int, group: VirtualGroup) -> Tensor:
    """Return the weights at the end, once straight or, where a checkpoint is there, from there on."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parallel = DataParallel(model, optimizer, strategy, group=group)
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(4, 3, generator=generator) for _ in range(UPDATES)]
    begun = 0
    if checkpoint.latest(folder) is not None:
        begun = checkpoint.load(parallel, folder).step
    for batch in batches[begun:]:
        update = parallel.backward((model(batch) - 1).square().mean())
        if update is not None and update.step == save_at and not begun:
            checkpoint.save(parallel, folder)
    parallel.finish()
    return model.weight.detach().clone()


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("name", LONG)
def test_an_interval_longer_than_the_run_is_as_long_as_any_other(name: str, tmp_path: Path) -> None:
    draws = random.Random(name)
    world_size, save_at = draws.randint(1, 3), draws.randint(1, UPDATES - 1)
    lengths = [UPDATES + 2, 1001, draws.randint(1002, 10**6), 10**30]
    if name == "diloco in fragments":  # an interval of another length ends other fragments in time
        lengths = [4000, draws.randint(4001, 4999)]
    results = []
    for length in lengths:
        program = partial(trained, LONG[name](length), save_at, tmp_path / str(length))
        straight, resumed = (VirtualCluster(world_size).run(program).values for _ in range(2))
        for before, after in zip(straight, resumed, strict=True):
            assert torch.equal(before, after), (length, world_size, save_at)
        results.append(straight)
    for other in results[1:]:
        assert unequal(results[0], other) == [], (lengths, world_size)


def test_departures_of_fragments_are_spread_evenly_over_any_interval() -> None:
    draws = random.Random(0)
    for _ in range(200):
        interval = draws.randint(1, 300)
        fragments = draws.randint(1, interval)
        strategy = DiLoCo(interval, fragments)
        due = [(index, found) for index in range(interval) for found in launched(strategy, index)]
        assert due == [((one + 1) * interval // fragments - 1, one) for one in range(fragments)]


def launched(strategy: DiLoCo, round_index: int) -> list[int]:
    """Which fragments leave in this round of a rank that has data."""
    script = strategy.update()
    next(script)
    script.send(None)
    assert isinstance(script.send(None), Look)
    try:
        effect = script.send(Moment(round_index, 1, is_finishing=False))
    except StopIteration:
        return []
    assert isinstance(effect, Launch)
    return [effect.fragment]


def test_more_fragments_than_a_job_can_have_buckets_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="1000 in all"):
        DiLoCo(interval=10**6, fragments=10**6)


def test_a_coin_takes_any_seed() -> None:
    seeds = [0, 1, -1, 2**63, 2**64 - 1, 10**30, -(10**30)]
    for seed in seeds:
        heads = sum(coin(seed, "test", counter, 0.5) for counter in range(400))
        assert 130 < heads < 270  # seven standard deviations


class LooksAtAShard(Strategy):
    name, overlaps, staleness = "looks-at-a-shard", False, 0

    def update(self) -> Script:
        gradient = yield Reduce()
        yield Step(gradient)
        yield Look()


class Surprises(Strategy):
    """Averages from an update on that no dry run comes to, and has said nothing of it."""

    name, overlaps, staleness = "surprises", False, 0

    def __init__(self) -> None:
        self.updates = 0

    def update(self) -> Script:
        self.updates += 1
        gradient = yield AllReduce()
        yield Step(gradient)
        if self.updates > 40:
            yield Average()


def train(parallel: DataParallel, model: nn.Module) -> None:
    for _ in range(50):
        parallel.backward(model(torch.ones(1, 1)).sum())


def test_an_effect_that_no_job_has_a_performer_for_is_named() -> None:
    with pytest.raises(ConfigError, match="Look and averages need replicas"):
        ledger_of(LooksAtAShard())
    model = nn.Linear(1, 1)
    parallel = DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), Surprises())
    with pytest.raises(ConfigError, match="surprises asks for Average in update"):
        train(parallel, model)


def test_averages_of_which_none_would_come_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rate=0\): expected some averages"):
        LocalSGD(rate=0)
    with pytest.raises(ConfigError, match=r"rate=1.5\): expected averages per update, from 0 to 1"):
        LocalSGD(rate=1.5)
    with pytest.raises(ConfigError, match=r"max_gap=0\): expected at least 1 update"):
        LocalSGD(rate=1, max_gap=0)
    assert LocalSGD(rate=1).max_gap is None
