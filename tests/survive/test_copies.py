"""States in memory and training: copies travel beside it, and are rare enough."""

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import stretto as st
from stretto.groups import Link, SoloGroup
from stretto.survive import keeping
from stretto.survive.copies import Arrived, Copies
from stretto.survive.generations import Memory
from stretto.survive.keeping import SHARE
from stretto.survive.shares import Generation
from stretto_lab.virtual import Compute, Network, VirtualCluster, VirtualGroup
from tests.survive.test_virtually import STRATEGIES
from tests.survive.virtually import survive

WIDTH = 200
LINK = Link.parse("100mbit")
MICRO_BATCH_NS = 10**9


def job_over(group: object) -> tuple[st.DataParallel, Callable[[], None]]:
    """Return a job, and what takes it one update further."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    parallel = st.DataParallel(model, torch.optim.AdamW(model.parameters()), st.ZeRO1(), group=group)

    def update() -> None:
        parallel.backward(model(torch.randn(2, WIDTH)).square().mean())

    return parallel, update


def test_training_goes_on_while_copies_travel() -> None:
    """Keeping a state takes a hundredth of the time in which its copies travel; an update later they are there."""

    def program(rank: int, group: VirtualGroup) -> tuple[float, float, list[int], list[int]]:
        (parallel, update), memory = job_over(group), Memory("here", is_first=True)
        copies = Copies(parallel, group)
        update()
        began = group.now_ns
        memory.keep(parallel, copies, None)
        kept, before = group.now_ns, sorted(memory._shares[Generation(0, 1)])
        update()
        copies.go_on()
        after = sorted(memory._shares[Generation(0, 1)])
        num_bytes = len(memory._shares[Generation(0, 1)][parallel.rank].content)
        parallel.finish()
        return (kept - began) / 1e9, LINK.occupied_seconds(num_bytes), before, after

    cluster = VirtualCluster(2, network=Network(link=LINK), compute=Compute(micro_batch_ns=MICRO_BATCH_NS))
    for rank, (standing, travelling, before, after) in enumerate(cluster.run(program).values):
        assert standing < travelling / 100
        assert (before, after) == ([rank], [0, 1])


@pytest.mark.parametrize("arrives", [False, True])
def test_a_state_counts_once_its_copies_are_there(arrives: bool) -> None:
    """One of two ranks is gone; the other goes on from the last state of which it has both shares."""

    def program(rank: int, group: VirtualGroup) -> Memory:
        (parallel, update), memory = job_over(group), Memory("here", is_first=True)
        copies = Copies(parallel, group)
        for _ in range(2):
            copies.complete()
            update()
            memory.keep(parallel, copies, None)
        if arrives:
            copies.complete()
        parallel.finish()
        return memory

    memory, _ = VirtualCluster(2).run(program).values
    parallel, _ = job_over(SoloGroup())
    restored = memory.load(parallel, Copies(parallel, SoloGroup()))
    assert restored is not None
    assert restored.step == (2 if arrives else 1)


class Spoilt(Copies):
    """Copies of which one bit turns on its way."""

    def give(
        self, content: bytes | memoryview, lengths: Sequence[int], to: Sequence[int], arrived: Arrived
    ) -> None:
        """See `Copies.give`."""

        def spoilt(source: int, copied: memoryview) -> None:
            copied[len(copied) // 2] ^= 1
            arrived(source, copied)

        super().give(content, lengths, to, spoilt)


def test_a_damaged_copy_is_not_taken_and_the_state_before_stays_until_a_later_one_is_there_twice() -> None:
    def program(rank: int, group: VirtualGroup) -> list[dict[int, list[int]]]:
        (parallel, update), memory = job_over(group), Memory("here", is_first=True)
        sound, spoilt = Copies(parallel, group), Spoilt(parallel, group)
        held: list[dict[int, list[int]]] = []
        for copies in (sound, spoilt, spoilt, sound, sound):
            update()
            memory.keep(parallel, copies, None)
            copies.complete()
            held.append({one.step: sorted(shares) for one, shares in memory._shares.items()})
        parallel.finish()
        return held

    for rank, held in enumerate(VirtualCluster(2).run(program).values):
        assert held == [
            {1: [0, 1]},
            {1: [0, 1], 2: [rank]},
            {1: [0, 1], 3: [rank]},
            {1: [0, 1], 4: [0, 1]},
            {4: [0, 1], 5: [0, 1]},
        ]


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("seed", range(len(STRATEGIES)))
def test_states_take_a_hundredth_of_what_ranks_send(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the job's own ledger says of a state that has all, with means of replicas, and of the updates since."""
    monkeypatch.setattr(keeping, "_MOST_SECONDS", math.inf)  # on a busy machine updates are long
    rng = random.Random(seed)
    strategy, ranks = STRATEGIES[seed], rng.randint(2, 4)
    wire, width = rng.choice(["fp32", "bf16", "int8"]), rng.choice([8, 64])
    intervals: list[tuple[int, int, int, float]] = []

    def train(term: st.Term) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        parallel = st.DataParallel(model, optimizer, strategy, wire=wire, group=term.group, micro_batches=2)
        term.go_on(parallel)
        kept: list[tuple[int, int, int]] = []  # the update, and the job's bytes before and after keeping

        def on_update(update: st.Update) -> None:
            before = parallel.sent_bytes
            term.keep(parallel)
            if term._keeping._costs.step < update.step:  # nothing was due, or ranks step alone
                return
            kept.append((update.step, before, parallel.sent_bytes))
            if len(kept) == 2:
                (first, *of_first), (second, until, _) = kept
                per_update = (until - of_first[1]) / (second - first)
                chosen = term._keeping._due - second, (of_first[1] - of_first[0]) / per_update
                intervals.append((first, second - first, *chosen))
                parallel.stop()

        with parallel:
            for _ in parallel.feed(iter(int, 1), on_update=on_update):
                parallel.backward(model(torch.randn(4, width)).square().mean())
            parallel.finish()

    survive(VirtualCluster(ranks), train, every=None)
    assert len(intervals) == ranks
    for first, second, interval, updates_worth in intervals:
        assert first == second  # a state at the beginning has no moments, and nothing is chosen by it
        assert interval * SHARE >= updates_worth
