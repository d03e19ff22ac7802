"""Large tensors travel in several broadcasts, and arrive whole."""

import torch
import torch.distributed as dist
from torch import nn

import stretto as st
from stretto.exchange.broadcast import LARGEST_BROADCAST
from stretto.groups.collectives import Call
from stretto.groups.private import private_group
from stretto.groups.wrapped import WrappedGroup
from tests.processes import run_ranks

WIDTHS = (1, 511, 512, 513, 1100)
"""The weights of the last two are larger than one broadcast."""


class Recording(WrappedGroup):
    """Notes the bytes of every broadcast."""

    may_wait_again = True

    def __init__(self) -> None:
        super().__init__(private_group(dist.group.WORLD), None, "recording")
        self.broadcasts: list[int] = []

    def perform(self, call: Call) -> dist.Work:
        """Note it, and let the inner group perform it."""
        if call.operation.name == "broadcast":
            self.broadcasts.append(call.inputs[0].nbytes)
        return super().perform(call)

    def private(self) -> "Recording":
        """Return another such group."""
        return Recording()


def started(rank: int) -> tuple[list[int], list[torch.Tensor]]:
    torch.manual_seed(rank)
    model = nn.ModuleList([nn.Linear(width, width) for width in WIDTHS])
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    parallel = st.DataParallel(model, optimizer, group=Recording())
    parallel.finish()
    return parallel.job.exchange.group.broadcasts, [p.detach() for p in model.parameters()]


def test_starting_values_travel_in_parts_and_arrive_to_the_bit() -> None:
    (sizes, sent), (_, arrived) = run_ranks(2, started)
    assert max(sizes) <= LARGEST_BROADCAST < sum(sizes)
    torch.manual_seed(0)
    expected = [p.detach() for width in WIDTHS for p in nn.Linear(width, width).parameters()]
    for one, other, first in zip(sent, arrived, expected, strict=True):
        assert torch.equal(one, first)
        assert torch.equal(other, first)
