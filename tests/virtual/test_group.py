"""Beside the laws of every group: the collectives of stock methods mean what torch's mean, and parts of a group."""

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from stretto.errors import CollectivesDisagree, CommunicationError, ConfigError
from stretto.groups.collectives import method_of
from stretto_lab.virtual import VirtualCluster, VirtualGroup
from tests.bits import unequal
from tests.processes import run_ranks

WORLD_SIZE = 3


def own(rank: int, numel: int = 6) -> Tensor:
    return torch.arange(numel, dtype=torch.float32) + 10 * rank


def collectives(rank: int, group: dist.ProcessGroup) -> dict[str, list[Tensor]]:
    """Perform the collectives that the laws of a group leave out, and return what they gave."""
    found: dict[str, list[Tensor]] = {}

    def keep(name: str, work: dist.Work, *outputs: Tensor) -> None:
        work.wait()
        found[name] = list(outputs)

    for name, reduction in (("max", dist.ReduceOp.MAX), ("min", dist.ReduceOp.MIN)):
        options = dist.AllreduceOptions()
        options.reduceOp = reduction
        total = own(rank)
        keep(f"all_reduce {name}", group.allreduce([total], options), total)
        number = own(rank).max()
        keep(f"all_reduce {name} of a number", group.allreduce([number], options), number)
    pairs = [[torch.empty(6), torch.empty(2)] for _ in range(WORLD_SIZE)]
    work = group.allgather_coalesced(pairs, [own(rank), own(rank, 2)])
    keep("all_gather of pairs", work, *[tensor for pair in pairs for tensor in pair])
    options = dist.GatherOptions()
    options.rootRank = 2
    gathered = [torch.empty(6) for _ in range(WORLD_SIZE)] if rank == 2 else []
    keep("gather", group.gather([gathered] if rank == 2 else [], [own(rank)], options), *gathered)
    options = dist.ScatterOptions()
    options.rootRank = 0
    one = torch.empty(6)
    keep("scatter", group.scatter([one], [[own(r) for r in range(3)]] if rank == 0 else [], options), one)
    keep("barrier", group.barrier())
    return found


def real_collectives(rank: int) -> dict[str, list[Tensor]]:
    return collectives(rank, dist.group.WORLD)


def test_collectives_give_what_gloo_gives() -> None:
    real = run_ranks(WORLD_SIZE, real_collectives)
    virtual = VirtualCluster(WORLD_SIZE).run(collectives).values
    for rank in range(WORLD_SIZE):
        assert virtual[rank].keys() == real[rank].keys()
        for name in real[rank]:
            assert unequal(virtual[rank][name], real[rank][name]) == [], (rank, name)


def test_reductions_scattered_are_parts_of_the_reduction() -> None:
    def program(rank: int, group: VirtualGroup) -> Tensor:
        listed = torch.empty(2)
        group.reduce_scatter([listed], [list(own(rank).split(2))]).wait()
        return listed

    values = VirtualCluster(WORLD_SIZE).run(program).values
    assert torch.equal(torch.cat(values), sum(own(rank) for rank in range(WORLD_SIZE)))


def test_sums_are_in_rank_order() -> None:
    large, small = 2.0**24, 1.0

    def program(rank: int, group: VirtualGroup) -> float:
        group.charge_ns(10 - rank)  # the last rank comes first
        total = torch.tensor([[large, small, small][rank]])
        group.allreduce([total]).wait()
        return float(total)

    # (2^24 + 1) + 1 loses both ones in float32; 2^24 + (1 + 1) would not.
    assert VirtualCluster(3).run(program).values == (large,) * 3


def test_outputs_that_do_not_fit_and_what_is_not_modelled_are_refused() -> None:
    def program(rank: int, group: VirtualGroup) -> None:
        with pytest.raises(CommunicationError, match="expected 18 for the former"):
            method_of(group, "all_gather_single")(torch.empty(17), own(rank))
        with pytest.raises(ConfigError, match="not send and recv"):
            group.send([own(rank)], 0, 0)
        with pytest.raises(ConfigError, match="reduces by sum, average"):
            group.allreduce([own(rank)], dist.ReduceOp.BXOR)

    VirtualCluster(WORLD_SIZE).run(program)


def test_parts_of_a_group_sum_over_their_own_ranks_and_number_them_from_0() -> None:
    """The second half issues more collectives than the first one, on a second group of the same ranks too."""

    def program(rank: int, group: VirtualGroup) -> tuple[int, int, float, float]:
        members = range(2) if rank < 2 else range(2, 5)
        half, other = group.part(members), group.part(members)
        alone = half.part([half.rank()])
        if rank >= 2:
            other.barrier().wait()
        total, own = torch.tensor([float(rank)]), torch.tensor([float(rank)])
        half.allreduce([total]).wait()
        alone.allreduce([own]).wait()
        return half.rank(), half.size(), float(total), float(own)

    first = [(0, 2, 1.0, 0.0), (1, 2, 1.0, 1.0)]
    second = [(0, 3, 9.0, 2.0), (1, 3, 9.0, 3.0), (2, 3, 9.0, 4.0)]
    assert list(VirtualCluster(5).run(program).values) == first + second


def test_a_disagreement_in_a_part_names_its_ranks_as_the_run_numbers_them() -> None:
    def program(rank: int, group: VirtualGroup) -> None:
        if rank:
            group.part([1, 2]).allreduce([own(rank, numel=rank)]).wait()

    with pytest.raises(CollectivesDisagree) as caught:
        VirtualCluster(WORLD_SIZE).run(program)
    assert "collective 0 of the group.0 of ranks 1, 2" in str(caught.value)
    assert [row.rank for row in caught.value.rows if "came with all_reduce" in row.doing] == [1, 2]


def stock(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
    """Train with PyTorch's own DistributedDataParallel."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        wrapped(inputs).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def real_stock(rank: int) -> list[Tensor]:
    return stock(rank, dist.group.WORLD)


def test_stock_ddp_runs_and_gives_the_bits_of_gloo() -> None:
    # Two ranks: a sum of two terms has one order, also in Gloo's ring.
    real = run_ranks(2, real_stock)
    for virtual, expected in zip(VirtualCluster(2).run(stock).values, real, strict=True):
        assert unequal(virtual, expected) == []
