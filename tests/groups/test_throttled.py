"""Two ranks over Gloo behind a slow link. Times are bounded from below only; all clocks are of one machine."""

import functools
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto.errors import ConfigError
from stretto.groups.throttled import ThrottledGroup, register_throttled
from stretto.groups.wrapped import gloo_group
from stretto.link import Link
from tests.bits import unequal
from tests.processes import rank_outcomes, run_ranks


def run_throttled(link: str, function: Callable[..., Any], *args: Any) -> list[Any]:
    prepare = functools.partial(register_throttled, Link.parse(link))
    return run_ranks(2, function, *args, backend="throttled", prepare=prepare)


def world() -> dist.ProcessGroup:
    return dist.group.WORLD


def gloo_has_lists_for_all() -> bool:
    group = gloo_group(dist.HashStore(), 0, 1, dist.default_pg_timeout, None)
    try:
        group.alltoall([torch.empty(1)], [torch.ones(1)], dist.AllToAllOptions()).wait()
    except RuntimeError:
        return False
    return True


def all_collectives(rank: int) -> list[torch.Tensor]:
    """Every collective once, over ten floats per rank; the results in order."""
    generator = torch.Generator().manual_seed(rank)

    def new() -> torch.Tensor:
        return torch.randn(10, generator=generator)

    reduced, mean, broadcast, rooted = new(), new(), new(), new()
    dist.all_reduce(reduced)
    dist.all_reduce(mean, op=dist.ReduceOp.MAX)
    dist.broadcast(broadcast, src=1)
    dist.reduce(rooted, dst=0)
    gathered, scattered, exchanged, uneven = torch.empty(20), torch.empty(5), torch.empty(10), torch.empty(10)
    dist.all_gather_into_tensor(gathered, new())
    dist.reduce_scatter_tensor(scattered, new())
    dist.all_to_all_single(exchanged, new())
    splits = [3, 7] if rank == 0 else [7, 3]
    dist.all_to_all_single(uneven, new(), splits, splits)
    listed = [torch.empty(10), torch.empty(10)]
    dist.all_gather(listed, new())
    part, halves = torch.empty(5), list(new().chunk(2))
    dist.scatter(part, halves if rank == 0 else None, src=0)
    collected = [torch.empty(10), torch.empty(10)]
    dist.gather(new(), collected if rank == 1 else None, dst=1)
    parts = [torch.zeros(5), torch.zeros(5)]
    if gloo_has_lists_for_all():
        dist.all_to_all(parts, list(new().chunk(2)))
    dist.barrier()
    results = [reduced, mean, broadcast, gathered, scattered, exchanged, uneven, *listed, *parts, part]
    return results + ([rooted] if rank == 0 else collected)


def all_collectives_and_what_they_sent(rank: int) -> tuple[list[torch.Tensor], dict[str, int], int]:
    group = world()
    assert isinstance(group, ThrottledGroup)
    before = group.sent_bytes
    return all_collectives(rank), group.sent, group.sent_bytes - before


@pytest.mark.parametrize("link", ["none", "100mbit,1ms"])
def test_collectives_equal_plain_gloo_to_the_bit_and_are_counted(link: str) -> None:
    plain = run_ranks(2, all_collectives)
    throttled = run_throttled(link, all_collectives_and_what_they_sent)
    for expected, (results, _, _) in zip(plain, throttled, strict=True):
        assert len(results) == len(expected)
        assert unequal(results, expected) == []
    lists = 20 if gloo_has_lists_for_all() else 0
    symmetric = {"all_reduce": 40 + 40, "all_gather": 40 + 40, "reduce_scatter": 40, "barrier": 0}
    assert throttled[0][1] == symmetric | {  # 28: the seven floats that rank 0 has for rank 1
        "all_to_all": 20 + 28 + lists, "broadcast": 0, "reduce": 20, "gather": 40, "scatter": 20
    }  # fmt: skip
    assert throttled[1][1] == symmetric | {
        "all_to_all": 20 + 28 + lists, "broadcast": 40, "reduce": 20 + 20, "gather": 0, "scatter": 0
    }  # fmt: skip
    assert [(sent, total) for _, sent, total in throttled if total != sum(sent.values())] == []


def timed_all_reduces(rank: int) -> float:
    """Seconds of two all-reduces of 250 kB per rank, under way together on two groups."""
    other = dist.new_group(backend="throttled")
    tensors = [torch.ones(62_500), torch.ones(62_500)]
    begin = time.monotonic()
    works = [
        dist.all_reduce(tensors[0], async_op=True),
        dist.all_reduce(tensors[1], group=other, async_op=True),
    ]
    for work in works:
        work.wait()
    return time.monotonic() - begin


def test_groups_of_one_process_share_the_link() -> None:
    # On two ranks a ring all-reduce sends what it reduces: 8 · 250 kB / 20 Mbit/s = 0.1 s each, and 20 ms more.
    assert min(run_throttled("20mbit,20ms", timed_all_reduces)) >= 0.1 + 0.1 + 0.02


def late_rank(rank: int) -> tuple[float, float, bool]:
    """Rank 1 enters once rank 0 has waited in vain; return when this rank entered and was done."""
    store = world().get_group_store()
    if rank == 1:
        store.wait(["waited"])
    entered = time.monotonic()
    work = dist.all_reduce(torch.ones(12_500), async_op=True)
    if rank == 0:
        with pytest.raises(RuntimeError, match="a rank has not entered it"):
            work.wait(timedelta(milliseconds=10))
        assert not work.is_completed()
        store.set("waited", "")
    work.wait()
    return entered, time.monotonic(), work.is_completed()


def test_a_collective_begins_when_the_last_rank_has_entered() -> None:
    (_, early_done, early_completed), (late_entered, late_done, late_completed) = run_throttled(
        "4mbit", late_rank
    )
    assert early_done >= late_entered + 0.1  # 8 · 50 kB / 4 Mbit/s
    assert late_done >= late_entered + 0.1
    assert early_completed
    assert late_completed


def die_in_a_collective(rank: int) -> str:
    if rank == 1:
        os._exit(3)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    with pytest.raises(RuntimeError) as caught:
        work.wait(timedelta(seconds=50))
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(RuntimeError):
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4))
    return str(caught.value)


def test_errors_of_gloo_surface_in_wait() -> None:
    prepare = functools.partial(register_throttled, Link.parse("1mbit"))
    alive, dead = rank_outcomes(2, die_in_a_collective, backend="throttled", prepare=prepare)
    assert alive.error is None
    assert "peer" in alive.value
    assert dead.error is not None
    assert "exit code 3" in dead.error


def stock_works(rank: int) -> bool:
    return isinstance(dist.all_reduce(torch.ones(4), async_op=True), dist.Work) and world().link.is_free


def test_a_free_link_only_counts() -> None:
    assert run_throttled("none", stock_works) == [True, True]


def test_sending_to_one_rank_is_refused() -> None:
    for outcome in run_throttled("none", refused_send):
        assert "not send and recv" in outcome


def refused_send(rank: int) -> str:
    with pytest.raises(ConfigError) as caught:
        dist.send(torch.ones(1), 1 - rank)
    return str(caught.value)


def test_a_backend_of_torch_keeps_its_name() -> None:
    with pytest.raises(ConfigError, match="'gloo' is a backend of torch's own"):
        register_throttled(Link(), "gloo")
