"""Averages that travel beside the next gradients: taken at θ_r, applied to the mean."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import stretto as st
from stretto import checkpoint
from stretto.engine.accumulation import GradientBuffer
from stretto.errors import OutOfTurn
from stretto.groups import Link
from stretto_lab.testing import differing
from stretto_lab.virtual import Compute, Network, VirtualCluster, VirtualGroup
from tests.draws import part
from tests.paft.noisy import flat, network, same, values
from tests.processes import run_program

RANKS, UPDATES, RATE = 3, 8, 0.05


def nudge(rank: int, step: int) -> float:
    """What parts the replicas: added to every master after an update."""
    return 1e-3 * (rank + 1) * (step + 1)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    output: Tensor = model(batch(rank, step))
    return output.square().mean()


@dataclasses.dataclass
class Run:
    """One rank's job on the virtual cluster."""

    model: nn.Module
    parallel: st.DataParallel
    shown: list[list[Tensor]]
    gaps: list[int]


def start(rank: int, group: dist.ProcessGroup, strategy: st.Strategy, micro_batches: int = 1) -> Run:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    options = st.Options(bucket_bytes=2**20)
    parallel = st.DataParallel(
        model, optimizer, strategy, micro_batches=micro_batches, group=group, options=options
    )
    return Run(model, parallel, [], [])


def go_on(run: Run, rank: int, updates: range) -> None:
    for step in updates:
        update = run.parallel.backward(loss(run.model, rank, step))
        assert update is not None
        run.shown.append(values(run.model))
        run.gaps.append(update.gap)
        run.parallel.job.sharded.masters[0].add_(nudge(rank, step))


def nudged(
    strategy: st.Strategy,
) -> Callable[[int, VirtualGroup], tuple[list[list[Tensor]], list[int], list[int]]]:
    def program(rank: int, group: VirtualGroup) -> tuple[list[list[Tensor]], list[int], list[int]]:
        run = start(rank, group, strategy)
        times = []
        for step in range(UPDATES):
            go_on(run, rank, range(step, step + 1))
            times.append(group.now_ns)
        run.parallel.finish()
        return [*run.shown, values(run.model)], run.gaps, times

    return program


def on_a_thread(rank: int, group: dist.ProcessGroup) -> list[list[Tensor]]:
    run = start(rank, group, st.PAFTSync(interval=3, overlap=True))
    go_on(run, rank, range(UPDATES))
    run.parallel.finish()
    return [*run.shown, values(run.model)]


def unite(masters: list[list[Tensor]]) -> None:
    """Make all replicas their mean, in rank order; the mean of equal ones is what they are."""
    if all(same(own, masters[0]) for own in masters):
        return
    third = torch.tensor(1 / 3)
    for parts in zip(*masters, strict=True):
        mean = (parts[0] * third + parts[1] * third) + parts[2] * third
        for value in parts:
            value.copy_(mean)


def show(models: list[nn.Module], masters: list[list[Tensor]]) -> None:
    with torch.no_grad():
        for model, own in zip(models, masters, strict=True):
            for parameter, master in zip(model.parameters(), own, strict=True):
                parameter.copy_(master)


def by_the_equation(interval: int, overlap: bool) -> list[list[list[Tensor]]]:
    """θ_{t+1} = mean(θ_t) - lr·g(θ_t) where an average is due, otherwise θ_t - lr·g(θ_t); by update and rank.

    Without an overlap the mean is taken behind the step.
    """
    models = [network() for _ in range(RANKS)]
    masters = [values(model) for model in models]
    seen = []
    for step in range(UPDATES):
        gradients = [
            torch.autograd.grad(loss(model, rank, step), list(model.parameters()))
            for rank, model in enumerate(models)
        ]
        if overlap and step and step % interval == 0:
            unite(masters)
        means = [((first + second) + third) / 3 for first, second, third in zip(*gradients, strict=True)]
        for own in masters:
            torch._foreach_add_(own, means, alpha=-RATE)
        if not overlap and (step + 1) % interval == 0:
            unite(masters)
        show(models, masters)
        seen.append([values(model) for model in models])
        for rank, own in enumerate(masters):
            torch._foreach_add_(own, nudge(rank, step))
    unite(masters)
    show(models, masters)
    return [*seen, [values(model) for model in models]]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("interval", [1, 3, 4])
def test_an_average_is_the_equation_to_the_bit(interval: int, overlap: bool) -> None:
    found = VirtualCluster(RANKS).run(nudged(st.PAFTSync(interval=interval, overlap=overlap))).values
    expected = by_the_equation(interval, overlap)
    for rank, (shown, gaps, _) in enumerate(found):
        steps = range(UPDATES)
        assert gaps == [step % interval + 1 if overlap else (step + 1) % interval for step in steps]
        assert differing([of_ranks[rank] for of_ranks in expected], shown, f"rank {rank}") == []


def test_real_ranks_whose_lane_is_a_thread_do_the_same_to_the_bit() -> None:
    found = run_program(RANKS, on_a_thread)
    for rank, shown in enumerate(found):
        expected = [of_ranks[rank] for of_ranks in by_the_equation(3, overlap=True)]
        assert differing(expected, shown, f"rank {rank}") == []


@pytest.mark.parametrize("micro_batch_ns", part([10_000, 50_000, 5_000_000]))
def test_it_is_hidden_behind_the_gradients(micro_batch_ns: int) -> None:
    """Without an average an update takes t + C, exposed t + C + A, overlapped max(t, A) + C."""

    def update_ns(strategy: st.Strategy) -> int:
        link = Link(bits_per_second=1e8, latency_seconds=3e-5)
        cluster = VirtualCluster(
            RANKS, network=Network(link=link), compute=Compute(micro_batch_ns=micro_batch_ns)
        )
        times = cluster.run(nudged(strategy)).values[0][2]
        differences = {later - earlier for earlier, later in itertools.pairwise(times[1:])}
        assert len(differences) == 1
        return differences.pop()

    plain, exposed, overlapped = (
        update_ns(s) for s in (st.DDP(), st.PAFTSync(interval=1), st.PAFTSync(interval=1, overlap=True))
    )
    average = exposed - plain
    assert average > 0
    assert overlapped == max(micro_batch_ns, average) + plain - micro_batch_ns


def test_settling_between_micro_batches_shows_the_average() -> None:
    def program(rank: int, group: VirtualGroup) -> tuple[Tensor, Tensor, Tensor]:
        run = start(rank, group, st.PAFTSync(interval=1, overlap=True), micro_batches=2)
        for step in range(2):
            run.parallel.backward(loss(run.model, rank, step))
        owner = run.parallel.job.sharded
        owner.masters[0].add_(nudge(rank, 0))
        masters = GradientBuffer(owner.layout)
        owner.publish(masters.flats)
        by_name = {
            slot.name: view.clone() for slot, view in zip(owner.layout.slots, masters.views, strict=True)
        }
        before = flat([by_name[name] for name, _ in run.model.named_parameters()])
        assert run.parallel.backward(loss(run.model, rank, 2)) is None
        shown = flat(values(run.model))
        with run.parallel.settled():
            settled = flat(values(run.model))
        assert torch.equal(flat(values(run.model)), shown)
        assert run.parallel.backward(loss(run.model, rank, 3)) is not None
        run.parallel.finish()
        return before, shown, settled

    found: Any = VirtualCluster(RANKS).run(program).values
    third = torch.tensor(1 / 3)
    mean = (found[0][0] * third + found[1][0] * third) + found[2][0] * third
    for _, shown, settled in found:
        assert torch.equal(settled, mean)
        assert not torch.equal(shown, mean)


def test_saving_beside_an_average_is_refused(tmp_path: Path) -> None:
    def program(rank: int, group: VirtualGroup) -> None:
        run = start(rank, group, st.PAFTSync(interval=1, overlap=True))
        go_on(run, rank, range(1))
        loss(run.model, rank, 1)  # the forward pass, with which the average takes off
        checkpoint.save(run.parallel, tmp_path)

    with pytest.raises(OutOfTurn, match="a checkpoint in the middle of an update"):
        VirtualCluster(RANKS).run(program)
