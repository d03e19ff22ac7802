"""No gradient is computed twice: a batch meets the same parameters once, whatever the plan, strategy and job."""

import itertools
import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto import Auto, Bernoulli, DataParallel, EchoLoader, EchoOptions, Even, Options, Ready, checkpoint
from stretto.checksums import digest
from stretto.echo import Cosine, Linear, Plan
from stretto.engine import Clock
from stretto.errors import ConfigError
from stretto.strategies import ACCO, DDP, STRATEGIES, Strategy
from stretto_lab.virtual import Compute, VirtualCluster, VirtualGroup, VirtualStore, parse_network
from tests.draws import draws

CASES = 120
BLOCKS = 4
STEP_NS = 10_000_000


@dataclass
class Case:
    """A job whose every part is drawn at random; the same for the same seed."""

    seed: int
    draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draw = draw = random.Random(self.seed)
        kinds = [kind for name, kind in STRATEGIES.items() if name != "average"]  # which is a diloco
        self.strategy = kinds[self.seed % len(kinds)]()
        self.ranks = draw.randrange(1, 4)
        # Ranks decide for themselves.
        self.plans = [self._plan() for _ in range(self.ranks)]
        self.micro_batches: int | Clock = draw.randrange(2, 6)
        if self.strategy.overlaps and draw.random() < 0.3:
            self.micro_batches = Clock(minimum=draw.randrange(1, 3), maximum=draw.randrange(3, 7))
        self.saved_at = draw.randrange(1, 5) if draw.random() < 0.5 else None
        self.lengths = [draw.randrange(3, 30) for _ in range(self.ranks)]
        says = [None, ValueError("undefined"), RuntimeError("unknown"), draw.randrange(1, 40)]
        self.says = [draw.choice([length, *says]) for length in self.lengths]
        """What each rank's loader says of its length."""
        self.slowness = draw.choice([0.5, 1.5, 2.5, 4.0])
        self.until: Any = draw.choice(["any", "all"])
        self.still_updates = draw.choice([0, 0, 1, 3, 10**9])
        """At the beginning, with a learning rate of zero."""
        self.poisoned = draw.choice([0.0, 0.0, 0.1, 0.3])
        """Share of batches whose loss is not a number."""
        if self.saved_at is not None and self.strategy.name in ("local", "diloco"):
            # Ranks that step alone can save together only where they come to the same updates.
            self.poisoned, self.lengths = 0.0, self.lengths[:1] * self.ranks
        self.epochs, self.updates = draw.randrange(1, 3), None
        if draw.random() < 0.2:
            self.lengths, self.updates = [10**6] * self.ranks, draw.randrange(4, 12)
        resume: Any = draw.choice(["refetch", "drop"])
        self.options = EchoOptions(
            seed=draw.randrange(9),
            ahead=draw.randrange(1, 4),
            resume=resume,
        )

    def _plan(self) -> Plan:
        draw = self.draw
        plans: list[Plan] = [
            Even(draw.choice([1.0, 1.5, 2.0, 2.5, 4.0])),
            Even(Linear(1, 4, 12)),
            Bernoulli(draw.choice([0.2, 0.5, 0.9]), draw.choice([None, 3])),
            Bernoulli(Cosine(1, 0.25, 12)),
            Ready(pool=draw.choice([1, 3, 12]), max_uses=draw.choice([2, 4, 64])),
            Auto(window=4, skip=1),
        ]
        return draw.choice(plans)

    def durations(self, rank: int) -> Iterator[float]:
        """Yield the seconds of every read."""
        draw = random.Random(100 * self.seed + rank)
        while True:
            yield draw.uniform(0.2, 1.8) * self.slowness * STEP_NS / 1e9


class Passes:
    """A loader with a state, no two batches of which are equal, whatever passes are left in the middle.

    Of its length it says what it is told to say.
    """

    def __init__(self, length: int, says: int | Exception | None) -> None:
        self.length, self.says = length, says
        self.passes = self.position = 0
        self._is_loaded = False

    def __len__(self) -> int:
        if not isinstance(self.says, int):
            raise self.says or TypeError("no length")
        return self.says

    def __iter__(self) -> Iterator[Tensor]:
        if not self._is_loaded:
            self.passes, self.position = self.passes + 1, 0
        self._is_loaded = False
        return self._rest()

    def _rest(self) -> Iterator[Tensor]:
        while self.position < self.length:
            self.position += 1
            yield torch.tensor([1000 * self.passes + self.position])

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes, self.position = state["passes"], state["position"]
        self._is_loaded = True


Seen = list[tuple[int, int]]
"""For every micro-batch of a rank: the digest of the parameters, and the batch."""


def train(
    case: Case, folder: Path, rank: int, group: VirtualGroup, *, resume: bool
) -> tuple[Seen, int, bool]:
    """Return what a rank has computed, up to the checkpoint or from there on, how many uses were echoes, and whether
    fresh batches were left at the checkpoint."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step >= case.still_updates))
    numbers = Passes(case.lengths[rank], case.says[rank])
    loader = EchoLoader(
        VirtualStore(numbers, group, case.durations(rank)), case.plans[rank], options=case.options
    )
    poisoned = random.Random(rank)
    is_poisoned = [poisoned.random() < case.poisoned for _ in range(1000)]
    parallel = DataParallel(
        model, optimizer, case.strategy, micro_batches=case.micro_batches, scheduler=scheduler, group=group,
        options=Options(nonfinite="skip", allow_unused=True),
    )  # fmt: skip
    seen: Seen = []
    kept, has_more = [10**9], [False]

    def on_update(update: Any) -> None:
        if not resume and update.step == case.saved_at:
            checkpoint.save(parallel, folder, loader=loader)
            kept[0] = len(seen)
            has_more[0] = loader.fresh_batches < case.lengths[rank]

    if resume:
        checkpoint.load(parallel, folder, loader=loader)
    echoes = 0
    for epoch in range(case.epochs):
        updates = None if case.updates is None else case.updates * (epoch + 1)
        if updates is not None and parallel.steps >= updates:
            continue
        for batch in parallel.feed(loader, updates=updates, until=case.until, on_update=on_update):
            number = int(batch)
            echoes += not loader.is_fresh
            loss = (model(torch.tensor([[1.0, number % 7]])) - number % 3).square().mean()
            # Only now: the first forward pass shows what training goes on with.
            seen.append((digest(torch.cat([one.flatten() for one in model.parameters()])), number))
            parallel.backward(loss * float("nan") if is_poisoned[number % 1000] else loss)
    parallel.finish()
    return seen[: kept[0]], echoes, has_more[0]


def doubles(seen: Seen) -> list[tuple[int, int]]:
    """Return what was computed again."""
    return sorted({one for one in seen if seen.count(one) > 1})


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_batch_meets_the_same_parameters_twice(block: int, tmp_path: Path) -> None:
    echoes, seeds = 0, draws(CASES)[block::BLOCKS]
    for seed in seeds:
        case = Case(seed)
        folder = tmp_path / str(seed)
        cluster = VirtualCluster(
            case.ranks, parse_network("1gbit,5ms"), Compute(micro_batch_ns=STEP_NS), seed=seed
        )
        results = cluster.run(partial(train, case, folder, resume=False)).values
        seen = [list(found) for found, _, _ in results]
        if all(has_more for _, _, has_more in results):
            again = cluster.run(partial(train, case, folder, resume=True)).values
            for rank in range(case.ranks):
                seen[rank] += again[rank][0]
        for rank in range(case.ranks):
            assert doubles(seen[rank]) == [], (case, case.plans, case.micro_batches, rank)
        echoes += sum(count for _, count, _ in results)
    assert echoes > 2 * len(seeds)  # the law would hold without an echo too


def trained(
    strategy: Strategy, plan: Plan, micro_batches: int | Clock
) -> tuple[list[int], Tensor, EchoLoader[Any]]:
    """Train one virtual rank on eight batches; return the batches used, the weights, and the loader."""

    def program(rank: int, group: VirtualGroup) -> tuple[list[int], Tensor, EchoLoader[Any]]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = EchoLoader(VirtualStore(Passes(8, 8), group, iter(float, 1)), plan)
        parallel = DataParallel(model, optimizer, strategy, micro_batches=micro_batches, group=group)
        used = []
        for batch in parallel.feed(loader):
            used.append(int(batch) - 1001)
            parallel.backward((model(torch.tensor([[1.0, float(batch % 7)]])) - batch % 3).square().mean())
        parallel.finish()
        return used, model.weight.detach().clone(), loader

    return (
        VirtualCluster(1, parse_network("1gbit,25ms"), Compute(micro_batch_ns=STEP_NS)).run(program).values[0]
    )


@pytest.mark.parametrize("strategy", [DDP(), ACCO()], ids=lambda one: one.name)
def test_an_update_uses_the_batches_of_the_one_before_in_their_order(strategy: Strategy) -> None:
    used, echoed, _ = trained(strategy, Even(2), 4)
    assert used == [0, 1, 2, 3] * 2 + [4, 5, 6, 7] * 2
    assert not torch.equal(echoed, trained(strategy, Even(1), 2)[1])  # what uses within an update amounted to


class Sized:
    """Updates of given sizes, at parameters that a test names."""

    micro_batches, is_fixed = 1, False

    def __init__(self, sizes: list[int], parameters: list[int]) -> None:
        self._parameters = [one for size, one in zip(sizes, parameters, strict=True) for _ in range(size)]
        self._begins = [slot == 0 for size in sizes for slot in range(size)]

    def begins(self, slot: int) -> bool:
        return self._begins.pop(0)

    def parameters(self) -> int:
        return self._parameters.pop(0)


def test_updates_of_unequal_length_take_fresh_batches_beside_held_ones_or_leave_some_out() -> None:
    loader = EchoLoader(range(99), Even(4))
    used = list(itertools.islice(loader.over(Sized([4, 2, 3, 5, 1], [0, 1, 2, 3, 4])), 15))
    assert used == [*(0, 1, 2, 3), *(0, 1), *(0, 1, 4), *(0, 1, 4, 5, 6), 7]
    assert (loader.updates, loader.mixed_updates) == (5, 2)
    with pytest.raises(TypeError, match="not known beforehand"):
        len(loader)


def test_where_nothing_has_changed_fresh_batches_are_taken_and_the_plan_goes_on_from_there() -> None:
    loader = EchoLoader(range(99), Even(2))
    used = list(itertools.islice(loader.over(Sized([2] * 6, [7, 7, 8, 8, 7, 9])), 12))
    # 2 and 3 have met 7 and 8 by the fourth update; by the fifth, 4 and 5 have not met 7.
    assert used == [*(0, 1), *(2, 3), *(2, 3), *(4, 5), *(4, 5), *(6, 7)]


def use(seed: int, *, knows: bool) -> Seen:
    """Train one rank on an `EchoLoader` whose loader says a length or none; return what every batch met."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    length, micro_batches = draw.randrange(3, 10), draw.randrange(1, 4)
    says = draw.choice([length, length - 1, draw.randrange(1, 14)])
    rates = draw.choices([0.0, 1.0], k=99)  # after an update at rate zero the same parameters come again
    kind = STRATEGIES[draw.choice(["ddp", "zero1", "dpu", "wp"])]
    plan = draw.choice([Even(2.0), Even(2.5), Even(3.0), Bernoulli(0.5)])
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates.__getitem__)
    parallel = DataParallel(model, optimizer, kind(), micro_batches=micro_batches, scheduler=scheduler)
    loader, seen = EchoLoader(Passes(length, says if knows else None), plan), Seen()
    for _ in range(2):
        for batch in parallel.feed(loader):
            loss = model(batch / 1000).square().mean()  # a take-off may change what is shown until here
            seen.append((digest(model.bias, digest(model.weight)), int(batch)))
            parallel.backward(loss)
    parallel.finish()
    assert {number for _, number in seen} == {
        1000 * one + other for one in (1, 2) for other in range(1, length + 1)
    }, seed
    return seen


@pytest.mark.long
def test_whatever_a_loader_says_of_its_length_the_same_batches_meet_the_same_parameters_and_once() -> None:
    for seed in draws(100):
        without = use(seed, knows=False)
        assert doubles(without) == [], seed
        assert use(seed, knows=True) == without, seed


@pytest.mark.parametrize("told", [None, 1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, Clock(maximum=3)], ids=str)
def test_a_loop_without_feed_computes_nothing_twice_or_is_told_what_to_write(
    told: int | None, micro_batches: int | Clock
) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy = ACCO() if isinstance(micro_batches, Clock) else DDP()
    parallel = DataParallel(model, optimizer, strategy, micro_batches=micro_batches)
    loader, seen = EchoLoader(list(Passes(8, 8)), Even(3), options=EchoOptions(micro_batches=told)), Seen()
    fits = (told or 1) == micro_batches
    if isinstance(micro_batches, int) and not fits:  # also behind a loop with feed
        for batch in parallel.feed([torch.ones(1)] * micro_batches):
            parallel.backward(model(batch).square().mean())
    with nullcontext() if fits else pytest.raises(ConfigError, match=r"parallel\.feed\(loader\)"):
        for batch in loader:
            seen.append((digest(model.bias, digest(model.weight)), int(batch)))
            parallel.backward(model(batch / 1000).square().mean())
    assert doubles(seen) == []
    assert len(seen) == (24 if fits else 1)


@pytest.mark.parametrize("feeds_it", [True, False])
def test_an_iterator_that_is_kept_from_before_does_not_trouble_feed(feeds_it: bool) -> None:
    model = nn.Linear(1, 1)
    parallel = DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.01), micro_batches=2)
    loader = EchoLoader([torch.ones(1)] * 4, Even(2))
    kept = iter(loader)
    next(kept)
    for batch in parallel.feed(loader if feeds_it else [torch.ones(1)] * 8):
        parallel.backward(model(batch).square().mean())
    assert parallel.steps == 4


def fed(
    rank: int, group: VirtualGroup, length: int, micro_batches: int, plan: Plan, options: EchoOptions
) -> int:
    """Echo `length` batches on rank 0 and none of many on the others; return how many came."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    parallel = DataParallel(model, optimizer, micro_batches=micro_batches, group=group)
    loader: Any = Passes(999, 999) if rank else EchoLoader(Passes(length, length), plan, options=options)
    count = 0
    for batch in parallel.feed(loader):
        count += 1
        parallel.backward(model(batch / 1000).square().mean())
    parallel.finish()
    return count


def test_the_end_of_a_loader_that_knows_its_length_costs_the_other_ranks_no_round() -> None:
    for seed in draws(100):
        draw = random.Random(seed)
        length, micro_batches = draw.randrange(3, 12), draw.randrange(1, 5)
        plan = draw.choice([Even(2.0), Even(2.5), Even(3.0), Bernoulli(0.5)])
        options = EchoOptions(seed=seed)
        program = partial(fed, length=length, micro_batches=micro_batches, plan=plan, options=options)
        first, other = VirtualCluster(2, parse_network("1gbit,5ms")).run(program).values
        assert other == -(-first // micro_batches) * micro_batches, seed
