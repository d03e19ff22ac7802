"""Departures on a device that runs behind its host: no collective is complete as long as a backward pass is queued."""

import random
from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from stretto import DDP, DataParallel, Options, ZeRO1
from stretto.errors import PeerFailed
from stretto.groups import SoloGroup
from stretto.groups.collectives import Call
from stretto.groups.wrapped import WrappedGroup
from stretto.strategies import Strategy
from stretto_lab.virtual import VirtualCluster
from tests.bits import unequal
from tests.draws import part
from tests.wires import OF_GRADIENTS

_OF_GRADIENTS = ("all_to_all", "all_reduce", "reduce_scatter")


class BehindWork(Work):
    """A collective that is not complete as long as the host is in a backward pass."""

    def __init__(self, work: Work, group: "BehindGroup") -> None:
        super().__init__()
        self._work = work
        self._group = group

    def is_completed(self) -> bool:
        return not self._group.is_in_backward

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return bool(self._work.wait())


class BehindGroup(WrappedGroup):
    """A group whose works order streams, on a device that is busy with the backward pass."""

    may_wait_again = True
    orders_streams = True
    is_in_backward = False

    def __init__(self, inner: ProcessGroup, begun: list[str]) -> None:
        super().__init__(inner, None, "behind")
        self.begun = begun

    def perform(self, call: Call) -> Work:
        self.begun.append(call.operation.name)
        return BehindWork(super().perform(call), self)

    def private(self) -> "BehindGroup":
        return self  # nobody else uses it


def shares_that_left(
    strategy: Strategy, layers: int, world_size: int, **options: object
) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Train with about a layer per bucket, and once more with nothing hidden.

    Returns:
        Of rank 0: in each update the share of buckets that had left before the last gradient came; the parameters at
        the end; those of the job that hides nothing.
    """

    def program(rank: int, group: ProcessGroup, hides: bool) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(layers)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        behind = BehindGroup(group, [])
        settings = Options(bucket_bytes=4 * 32 * 32, hide_reductions=hides, **options)
        parallel = DataParallel(model, optimizer, strategy, micro_batches=1, group=behind, options=settings)
        shares, early = [], []

        def last_gradient_has_come(_: Tensor) -> None:
            early.append(of_gradients(behind.begun))
            behind.is_in_backward = False

        model[0].weight.register_post_accumulate_grad_hook(last_gradient_has_come)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(4):
            behind.begun.clear()
            behind.is_in_backward = True
            parallel.backward(model(torch.randn(4, 32, generator=generator)).square().mean())
            shares.append(early[-1] / of_gradients(behind.begun))
        parallel.finish()
        return shares, [parameter.detach().clone() for parameter in model.parameters()]

    cluster = VirtualCluster(world_size)
    shares, hidden = cluster.run(lambda rank, group: program(rank, group, hides=True)).values[0]
    return shares, hidden, cluster.run(lambda rank, group: program(rank, group, hides=False)).values[0][1]


def of_gradients(begun: list[str]) -> int:
    return sum(name in _OF_GRADIENTS for name in begun)


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("settings", part([{"wire": wire} for wire in OF_GRADIENTS]), ids=str)
@pytest.mark.parametrize("strategy", [DDP(), ZeRO1()], ids=lambda strategy: strategy.name)
def test_nine_in_ten_buckets_leave_before_any_is_known_to_have_arrived(
    strategy: Strategy, settings: dict[str, str]
) -> None:
    draws = random.Random(f"{strategy} {settings}")
    layers = draws.randint(20, 30)
    shares, hidden, unhidden = shares_that_left(strategy, layers, draws.choice([2, 3]), **settings)
    assert min(shares) >= 0.9
    assert unequal(hidden, unhidden) == []


class FailedWork(Work):
    """A collective that streams were ordered after, and that has failed by the time the host asks."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work
        self._is_queued = False

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._is_queued:
            raise RuntimeError("communicator was aborted")
        self._is_queued = True
        return bool(self._work.wait())


class FailingGroup(WrappedGroup):
    """A group whose works order streams, and whose gathers of parameters fail afterwards, once it is told to."""

    orders_streams = True
    may_wait_again = False
    fails = False

    def perform(self, call: Call) -> Work:
        work = super().perform(call)
        is_gather = call.operation.name == "all_gather" and call.inputs[0].is_floating_point()
        return FailedWork(work) if self.fails and is_gather else work

    def private(self) -> "FailingGroup":
        return self


def test_a_job_does_not_end_before_the_host_knows_of_what_it_followed_last() -> None:
    group = FailingGroup(SoloGroup(), None, "failing")
    model = nn.Linear(4, 4)
    parallel = DataParallel(
        model, torch.optim.SGD(model.parameters(), lr=0.1), ZeRO1(), group=group, wire="bf16"
    )
    parallel.backward(model(torch.ones(1, 4)).sum())
    group.fails = True
    parallel.backward(model(torch.ones(1, 4)).sum())
    with pytest.raises(PeerFailed, match=r"gather of bucket 0.*aborted"):
        parallel.finish()
