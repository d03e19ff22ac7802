"""A process group that damages results as they arrive; stock DDP runs on it as on any group."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from stretto.groups.collectives import Call
from stretto.groups.followed import FollowedWork
from stretto.groups.private import part_of, private_group
from stretto.groups.wrapped import WrappedGroup
from stretto_lab.faults.injector import Injector
from stretto_lab.faults.plan import Site

_SITES: Mapping[str, Site] = MappingProxyType(
    {
        "all_reduce": "all-reduced values",
        "reduce": "all-reduced values",
        "broadcast": "broadcast values",
        "all_gather": "gathered values",
        "reduce_scatter": "contribution",
        "all_to_all": "contribution",
    }
)
"""The site of the values that each collective receives; other collectives are not damaged."""


class FaultyGroup(WrappedGroup):
    """A process group over an inner one; an injector may damage the results of its collectives.

    Args:
        inner: Performs the collectives.
        injector: Of this rank.
    """

    may_wait_again = True

    def __init__(self, inner: dist.ProcessGroup, injector: Injector) -> None:
        super().__init__(inner, None, "faulty")
        self.injector = injector

    def perform(self, call: Call) -> dist.Work:
        """Let the inner group perform the call; the injector may damage its outputs once they have arrived."""
        work = call.on(self._inner)
        site = _site_of(call)
        if site is None or not self.injector.is_interested(site):
            return work
        return FollowedWork(work, lambda: self.injector.offer(site, call.outputs))

    def private(self) -> "FaultyGroup":
        return FaultyGroup(private_group(self._inner), self.injector)

    def part(self, members: Sequence[int]) -> "FaultyGroup":
        """Return a group of some of the ranks over the same part of the inner group; both share one injector."""
        return FaultyGroup(part_of(self._inner, members), self.injector)

    def __getattr__(self, name: str) -> Any:
        """Return the inner group's other attributes, such as a virtual cluster's clock."""
        if name == "_inner":  # not there yet
            raise AttributeError(name)
        return getattr(self._inner, name)


def _site_of(call: Call) -> Site | None:
    site = _SITES.get(call.operation.name)
    # Records of the round report travel as int8; values never do.
    if site == "gathered values" and all(tensor.dtype == torch.int8 for tensor in call.inputs):
        return "round report"
    return site
