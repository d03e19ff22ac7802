"""The faulty group damages what collectives bring, also under PyTorch's own data parallelism."""

from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from stretto.groups.collectives import method_of
from stretto_lab.faults import Fault, FaultPlan, FaultyGroup, Injector
from tests.bits import unequal
from tests.docs.pages import DOCS, code_blocks
from tests.processes import run_ranks


def faulty_group(plan: FaultPlan) -> FaultyGroup:
    """Return a group that the plan damages; a model that is made next has the same values on all ranks."""
    torch.manual_seed(0)
    return FaultyGroup(dist.new_group(), Injector(plan, dist.get_rank()))


def take_four_steps(model: nn.Module, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.Generator().manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=batches)).square().mean().backward()
        optimizer.step()


def stock_training(rank: int, plan: FaultPlan) -> tuple[list[torch.Tensor], list[bool]]:
    """Train with stock DDP on a faulty group; return parameters, and which applications changed bits."""
    group = faulty_group(plan)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8), process_group=group)
    take_four_steps(model, rank)
    final = [parameter.detach().clone() for parameter in model.parameters()]
    return final, [application.changed for application in group.injector.applications]


def clean_and_struck(rank: int) -> list[tuple[list[torch.Tensor], list[bool]]]:
    fault = Fault(site="all-reduced values", rank=1, instant=2, pattern="sign", seed=2)
    return [stock_training(rank, FaultPlan()), stock_training(rank, FaultPlan((fault,)))]


def test_stock_ddp_goes_on_with_replicas_that_differ_and_says_nothing() -> None:
    (clean, struck), (other_clean, other_struck) = run_ranks(2, clean_and_struck)
    assert unequal(clean[0], other_clean[0]) == []
    assert (struck[1], other_struck[1]) == ([], [True])
    assert not all(torch.equal(a, b) for a, b in zip(struck[0], other_struck[0], strict=True))


COLLECTIVES = ("contribution", "gathered values", "broadcast values", "all-reduced values", "round report")


def every_collective(rank: int) -> dict[str, list[bool]]:
    """Call the collectives that sites are named after; return where this rank's results were damaged."""
    changed = {}
    for site in COLLECTIVES:
        group: Any = faulty_group(FaultPlan((Fault(site=site, rank=1, pattern="huge", lasts="sticky"),)))
        ones, four = torch.ones(4), torch.zeros(4)
        method_of(group, "all_to_all_single")(four, ones, [], []).wait()
        half = torch.zeros(2)
        method_of(group, "reduce_scatter_single")(half, ones).wait()
        damaged = {"contribution": bool((four != 1).any() and (half != 2).any())}
        method_of(group, "all_gather_single")(torch.zeros(8), ones).wait()
        eight = torch.zeros(8)
        method_of(group, "all_gather_single")(eight, ones).get_future().wait()
        damaged["gathered values"] = site == "gathered values" and bool(group.injector.applications)
        group.broadcast([ones], dist.BroadcastOptions()).wait()
        damaged["broadcast values"] = bool((ones != 1).any())
        two = torch.ones(4)
        group.allreduce([two]).wait()
        damaged["all-reduced values"] = bool((two != 2).any())
        record = torch.zeros(16, dtype=torch.int8)
        method_of(group, "all_gather_single")(record, torch.ones(8, dtype=torch.int8)).wait()
        damaged["round report"] = bool((record != 1).any())
        changed[site] = [name for name, is_damaged in damaged.items() if is_damaged]
    return changed


def test_every_site_damages_its_own_collective_on_its_own_rank() -> None:
    healthy, struck = run_ranks(2, every_collective)
    assert healthy == {site: [] for site in COLLECTIVES}
    assert struck == {site: [site] for site in COLLECTIVES}


def run_page(rank: int) -> bool:
    names: dict[str, Any] = {"torch": torch}
    for block in code_blocks(DOCS / "guards.md", "tests/faults/test_group.py"):
        exec(compile(block, "guards.md", "exec"), names)
    values = [torch.ones(6) for _ in range(4)]
    for tensor in values:
        names["group"].allreduce([tensor]).wait()
    return [bool((tensor != 2).any()) for tensor in values] == [False, False, rank == 1, False]


def test_the_page_damages_the_third_all_reduce_of_rank_1() -> None:
    assert run_ranks(2, run_page) == [True, True]
