"""`feed` hands out each batch once, and ends where it should: with the data, or at an exact number of updates."""

import itertools
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import stretto
from stretto import checkpoint
from stretto.strategies import STRATEGIES, Strategy
from stretto_lab.virtual import VirtualCluster
from tests.draws import part
from tests.loops.habits import job

EVERY = [pytest.param(kind(), id=name) for name, kind in STRATEGIES.items()]


class Unsized:
    """A loader that does not know its length."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


UNEQUAL = (
    *(kind() for name, kind in STRATEGIES.items() if name not in ("average", "local", "diloco")),
    stretto.PAFTSync(interval=3, overlap=True),
    stretto.LocalSGD(0.25),
    stretto.DiLoCo(4),
    stretto.DiLoCo(4, delay=2),
    stretto.DiLoCo(4, fragments=2, delay=1, keep_progress=True),
)


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("guards", [(), (stretto.AtRest(),)], ids=["bare", "guarded"])
@pytest.mark.parametrize("strategy", part(UNEQUAL), ids=str)
def test_ranks_end_a_feed_at_the_same_update_whatever_the_lengths_of_their_data(
    strategy: Strategy, guards: tuple[stretto.Guard, ...]
) -> None:
    def program(rank: int, group: dist.ProcessGroup) -> tuple[int, int, Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=updates)
        parallel = stretto.DataParallel(
            model, optimizer, strategy, scheduler=scheduler, micro_batches=2, group=group, guards=guards
        )
        batches = [torch.randn(4, 3) for _ in range(lengths[rank])]
        for batch in parallel.feed(loader(batches), updates=updates, until=until):
            parallel.backward(model(batch).square().mean())
        steps = parallel.steps
        with parallel.settled():
            shown = model.weight.detach().clone()
        parallel.finish()
        assert torch.equal(shown, model.weight)
        return steps, scheduler.last_epoch, shown

    draws = random.Random(0)
    for _ in range(10):
        updates, until = draws.randint(1, 6), draws.choice(("any", "all"))
        lengths = [2 * draws.randint(1, 7) for _ in range(2)]
        loader = draws.choice((list, Unsized))
        case = f"updates={updates}, until={until}, lengths={lengths}, {loader.__name__}"
        (steps, turned, shown), other = VirtualCluster(2).run(program).values
        shortest, longest = (min(updates, length // 2) for length in sorted(lengths))
        assert (shortest if until == "any" else longest) <= steps <= longest, case
        assert other[:2] == (steps, turned) == (steps, steps), case
        assert torch.equal(other[2], shown), case


class Says(Unsized):
    """A loader that says a length."""

    def __init__(self, batches: list[Tensor], length: int) -> None:
        super().__init__(batches)
        self.length = length

    def __len__(self) -> int:
        return self.length


class Endless(Says):
    """A loader that says the length of a pass, and never ends."""

    def __iter__(self) -> Iterator[Tensor]:
        return itertools.cycle(self.batches)


@pytest.mark.parametrize("strategy", EVERY)
def test_an_endless_loader_is_fed_until_the_updates_are_there_whatever_it_says(strategy: Strategy) -> None:
    def program(rank: int, group: dist.ProcessGroup) -> tuple[int, int]:
        parallel = job(nn.Linear(3, 2), strategy, group=group)
        seen = 0
        for batch in parallel.feed(Endless([torch.ones(1, 3)] * 5, (3, 8)[rank]), updates=6):
            seen += 1
            parallel.backward(parallel.model(batch).sum())
        parallel.finish()
        return seen, parallel.steps

    assert VirtualCluster(2).run(program).values == ((12, 6), (12, 6))


def test_no_batch_is_asked_for_that_no_update_holds() -> None:
    for strategy, length in itertools.product((kind() for kind in STRATEGIES.values()), range(1, 9)):
        parallel = job(nn.Linear(3, 2), strategy)
        source = iter([torch.ones(1, 3)] * 20)
        for updates in (3, 5):
            for batch in parallel.feed(Own(source, length), updates=updates):
                parallel.backward(parallel.model(batch).sum())
        parallel.finish()
        assert len(list(source)) == 10, (strategy, length)


class Own:
    """A loader whose iterator goes on where another one stopped."""

    def __init__(self, source: Iterator[Tensor], length: int) -> None:
        self.source, self.length = source, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Tensor]:
        return self.source


def test_a_batch_asked_for_ahead_is_the_first_of_the_next_pass_over_the_same_iterator() -> None:
    parallel = job(nn.Linear(3, 2), micro_batches=1)
    source = iter([torch.full((1, 3), float(number)) for number in range(8)])
    seen = []
    for stop in (3, 8):
        for batch in parallel.feed(Own(source, 3)):
            seen.append(float(batch[0, 0]))
            parallel.backward(parallel.model(batch).sum())
            if len(seen) == stop:
                break
    parallel.finish()
    assert seen == list(range(8))


@pytest.mark.parametrize("strategy", [stretto.ZeRO1(), stretto.ACCO(), stretto.Average(2)], ids=str)
def test_a_rank_that_leaves_its_loop_alone_is_named_on_the_others(
    strategy: Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    def program(rank: int, group: dist.ProcessGroup, leaving: list[int], lengths: list[int]) -> None:
        parallel = job(nn.Linear(3, 2), strategy, group=group)
        for number, batch in enumerate(parallel.feed([torch.ones(1, 3)] * lengths[rank])):
            parallel.backward(parallel.model(batch).sum())
            if rank in leaving and number == 5:
                break
        parallel.finish()

    for leaving, lengths in (([1], [12] * 3), ([], [12, 8, 10]), ([0, 1, 2], [12] * 3)):
        caplog.clear()
        VirtualCluster(3).run(partial(program, leaving=leaving, lengths=lengths))
        told = [one for one in caplog.messages if "have left their loops" in one]
        assert len(told) == 2 * (leaving == [1]), (leaving, lengths, caplog.messages)
        assert all(f"ranks {leaving}" in one and "call parallel.stop()" in one for one in told)


def test_a_job_that_has_never_had_a_batch_is_told_and_one_from_a_checkpoint_passes_by(tmp_path: Path) -> None:
    with pytest.raises(
        stretto.errors.ConfigError, match=r"rank 0, after step 0.*no batch.*at least one per rank"
    ):
        list(job(nn.Linear(3, 2)).feed([]))
    parallel = job(nn.Linear(3, 2))
    for batch in parallel.feed([torch.ones(1, 3)] * 2):
        parallel.backward(parallel.model(batch).sum())
    checkpoint.save(parallel, tmp_path)
    parallel.finish()
    parallel = job(nn.Linear(3, 2))
    checkpoint.load(parallel, tmp_path)
    assert list(parallel.feed([])) == []
    for batch in parallel.feed([torch.ones(1, 3)]):
        parallel.backward(parallel.model(batch).sum())
    with pytest.raises(stretto.errors.ConfigError, match="no batch"):
        list(parallel.feed([]))
