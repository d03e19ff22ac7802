"""A loop may ask for the next batch before it has counted the one in hand: its updates are those of a plain loop."""

import collections
import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import stretto
from stretto.errors import OutOfTurn
from stretto.strategies import STRATEGIES, DiLoCo, Strategy
from stretto_lab.virtual import VirtualCluster
from tests.bits import unequal
from tests.draws import draws
from tests.engine.test_feed import Unsized

EVERY: dict[str, Strategy] = {name: kind() for name, kind in STRATEGIES.items()}
EVERY |= {"local": stretto.LocalSGD(0.5), "diloco": DiLoCo(interval=2)}


@dataclasses.dataclass(frozen=True)
class Loop:
    """How a loop takes its batches; the same on all ranks but for its lengths."""

    ahead: int
    """Batches that it holds back before it trains with the first."""
    asks_between: bool
    """Whether it asks for the next batch between forward and backward pass."""
    chunks: int
    """Micro-batches of a batch."""


def ask(batches: Iterator[Tensor], held: collections.deque[Tensor]) -> None:
    if (batch := next(batches, None)) is not None:
        held.append(batch)


def job(group: dist.ProcessGroup | None, strategy: Strategy, micro_batches: Any = 2) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)  # its graph keeps no parameter: autograd notices no write
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, stretto.DataParallel(model, optimizer, strategy, micro_batches=micro_batches, group=group)


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("name", EVERY)
def test_a_loop_that_looks_ahead_makes_the_updates_of_a_plain_loop(name: str) -> None:
    def run(rank: int, group: dist.ProcessGroup, loop: Loop) -> tuple[Any, ...]:
        model, parallel = job(group, EVERY[name])
        generator = torch.Generator().manual_seed(rank)
        told: list[stretto.Update] = []
        shown, seen = [], []
        for epoch, leaves in enumerate(leaves_after):
            batches = [torch.randn(2 * rows[i % 3], 3, generator=generator) for i in range(lengths[rank])]
            data = batches if is_sized else Unsized(batches)
            feed = iter(parallel.feed(data, updates=ends[epoch], until=until, on_update=told.append))
            held: collections.deque[Tensor] = collections.deque()
            for _ in range(loop.ahead + 1):
                ask(feed, held)
            while held:
                batch = held.popleft()
                for index, part in enumerate(batch.chunk(loop.chunks)):
                    loss = model(part).square().mean()
                    if loop.asks_between and not index:
                        ask(feed, held)
                    parallel.backward(loss, samples=None if loop.chunks == 1 else len(part))
                seen.append(float(batch[0, 0]))
                if not loop.asks_between:
                    ask(feed, held)
                if leaves is not None and len(seen) == leaves:
                    break
            with torch.no_grad():
                shown.append(model.weight.clone())
            if leaves is not None:
                break
        told += parallel.finish()
        updates = [(update.step, update.micro_batches, update.samples, update.loss) for update in told]
        return seen, updates, shown, model.weight.detach().clone()

    for seed in draws(40, 4):
        draw = random.Random(f"{name} {seed}")
        world_size, is_sized, rows = draw.randint(1, 3), draw.random() < 0.5, draw.choices(range(1, 4), k=3)
        until = draw.choice(("any", "all"))
        loop = Loop(draw.randint(0, 3), draw.random() < 0.5, draw.choice((1, 1, 2)))
        # A batch's micro-batches are known from the first one on that the loop has counted as it asks.
        least, first_end = (6, 20) if loop.chunks > 1 else (1, loop.ahead)
        if until == "all":
            lengths = [draw.randint(least, least + 8) for _ in range(world_size)]
            ends, leaves_after = (None, None), (None, None)  # ranks would leave in other rounds
        else:
            lengths = [draw.randint(least, least + 8)] * world_size
            ends = draw.choice(((None, None), (max(2, first_end), 25), (None, max(4, first_end))))
            leaves_after = draw.choice(((None, None), (None, None), (None, draw.randint(2, 12))))
        case = f"{name}, seed {seed}: {loop} {world_size} {lengths} {until} {ends} {leaves_after} sized={is_sized}"
        plain = Loop(0, False, loop.chunks)
        expected = (
            VirtualCluster(world_size).run(lambda rank, group, loop=plain: run(rank, group, loop)).values
        )
        found = VirtualCluster(world_size).run(lambda rank, group, loop=loop: run(rank, group, loop)).values
        for one, other in zip(found, expected, strict=True):
            assert one[0] == other[0], f"{case}: other batches"
            assert str(one[1]) == str(other[1]), f"{case}: updates {one[1]} for {other[1]}"
            if leaves_after[-1] is None:  # a loop that is left has taken more batches than it has counted
                assert unequal(one[2], other[2]) == [], f"{case}: shown after a pass"
            assert torch.equal(one[3], other[3]), f"{case}: another outcome"


@pytest.mark.parametrize("name", ["zero1", "acco", "dpu", "average"])
def test_where_another_rank_ends_the_pass_batches_that_are_out_are_counted(name: str) -> None:
    def run(rank: int, group: dist.ProcessGroup) -> tuple[int, int, Tensor]:
        model, parallel = job(group, EVERY[name])
        told: list[stretto.Update] = []
        num_counted = 0
        held: collections.deque[Tensor] = collections.deque()
        feed = iter(parallel.feed([torch.randn(2, 3)] * (5 + 4 * rank), on_update=told.append))
        ask(feed, held)
        while held:
            loss = model(held.popleft()).square().mean()
            ask(feed, held)
            parallel.backward(loss)
            num_counted += 1
        parallel.finish()
        return num_counted, sum(update.micro_batches[rank] for update in told), model.weight.detach().clone()

    (first, in_first, weight), (second, in_second, same) = VirtualCluster(2).run(run).values
    assert (first, second) == (in_first, in_second)
    assert torch.equal(weight, same)


def test_what_cannot_be_is_told_in_the_words_of_the_loop() -> None:
    model, parallel = job(None, stretto.ZeRO1(), stretto.Clock(minimum=1, maximum=2))
    feed = iter(parallel.feed([torch.ones(1, 3)] * 8, updates=2))
    next(feed)
    with pytest.raises(OutOfTurn, match=r"before it counted .* under a Clock"):
        next(feed)
    model, parallel = job(None, stretto.ACCO())
    last = None
    for number, batch in enumerate(parallel.feed([torch.ones(1, 3)] * 9)):
        if number == 5:
            last = batch
        else:
            parallel.backward(model(batch).square().mean())
    with pytest.raises(
        OutOfTurn, match=r"a micro-batch is counted after its feed\(\) ended with 1 batches not counted"
    ):
        parallel.backward(model(last).square().mean())


@pytest.mark.parametrize("name", EVERY)
def test_a_loop_that_skips_its_first_batches_ends_with_what_comes_next(name: str) -> None:
    found = []
    for skipped in (0, 3):
        model, parallel = job(None, EVERY[name])
        for number, _ in enumerate(parallel.feed([torch.ones(2, 3)] * (7 + skipped))):
            torch.manual_seed(number - skipped)
            if number >= skipped:
                parallel.backward(model(torch.randn(2, 3)).square().mean())
        with parallel.settled():
            found.append(model.weight.detach().clone())
        parallel.finish()
    assert torch.equal(*found)


def test_the_samples_of_a_batch_are_its_own() -> None:
    model, parallel = job(None, stretto.ZeRO1(), 1)
    told: list[stretto.Update] = []
    feed = iter(parallel.feed([torch.ones(rows, 3) for rows in (1, 2, 3)], on_update=told.append))
    batch = next(feed)
    while batch is not None:
        loss = model(batch).sum()
        batch = next(feed, None)
        parallel.backward(loss)
    assert [update.samples for update in told] == [1, 2, 3]
