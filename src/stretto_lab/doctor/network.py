"""Checks of the network: collectives and links carry values that the receiver knows, so that it sees any damage.

Every value is a small whole number that follows from its sender, receiver, place and round. Sums of such numbers are
exact in float32 in any order, so every rank knows the right result of every collective.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch import distributed as dist

from stretto.groups.collectives import method_of
from stretto.guards.strikes import Link

_NUMEL = 4096
"""Elements that a rank sends to each other rank in a collective."""


@dataclasses.dataclass(slots=True)
class CollectiveResult:
    """What one rank has seen of one collective."""

    rounds: int = 0
    damaged: int = 0
    """Rounds in which this rank received a wrong value."""
    links: set[Link] = dataclasses.field(default_factory=set)
    """The links that brought it, for collectives in which a value has one sender."""


@dataclasses.dataclass(slots=True)
class LinkResult:
    """What one rank has received from another."""

    seconds: float = 0.0
    bytes: int = 0
    damaged: int = 0
    """Payloads that did not arrive as they were sent."""


class Network:
    """The collectives and links of a group, as one rank checks them; all ranks make the same calls in the same order.

    Args:
        group: Performs the collectives.
        device: Where the tensors lie that it takes.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._rank, self._world_size = group.rank(), group.size()
        self._ranks = range(self._world_size)

    def check_collectives(self, round_index: int, results: Mapping[str, CollectiveResult]) -> None:
        """Run every collective once, compare what it brings with what is right, and add that to `results`."""
        for name, collective in COLLECTIVES.items():
            result = results[name]
            result.rounds += 1
            is_right, links = collective(self, round_index)
            result.damaged += not is_right
            result.links |= links

    def check_links(self, megabytes: float, round_index: int, results: dict[int, LinkResult]) -> None:
        """Send a payload to every other rank in turn, and compare the payloads that arrive.

        All ranks send at once: first each to the next rank, then to the one behind it, and so on.

        Args:
            megabytes: Length of a payload, in units of 2^20 bytes.
            round_index: Decides the values.
            results: By sender; added to.
        """
        numel = int(megabytes * 2**18)
        for distance in range(1, self._world_size):
            receiver = (self._rank + distance) % self._world_size
            sender = (self._rank - distance) % self._world_size
            payload, arrived = self._values(self._rank, receiver, round_index, numel), self._zeros(numel)
            numel_to, numel_from = [0] * self._world_size, [0] * self._world_size
            numel_to[receiver] = numel_from[sender] = numel
            self._group.barrier().wait()
            started = time.perf_counter()
            method_of(self._group, "all_to_all_single")(arrived, payload, numel_from, numel_to).wait()
            arrived[-1].item()  # a device's work has ended only now
            result = results.setdefault(sender, LinkResult())
            result.seconds += time.perf_counter() - started
            result.bytes += arrived.nbytes
            result.damaged += not _equal(arrived, self._values(sender, self._rank, round_index, numel))

    # Each collective returns whether its result is right, and the damaged links if they are known.

    def _all_reduce(self, round_index: int) -> tuple[bool, set[Link]]:
        found = self._values_for_all(self._rank, round_index)
        self._group.allreduce([found]).wait()
        expected = torch.stack([self._values_for_all(rank, round_index) for rank in self._ranks]).sum(0)
        return _equal(found, expected), set()

    def _reduce_scatter(self, round_index: int) -> tuple[bool, set[Link]]:
        own = torch.cat([self._values(self._rank, owner, round_index) for owner in self._ranks])
        found = self._zeros(_NUMEL)
        method_of(self._group, "reduce_scatter_single")(found, own, dist.ReduceScatterOptions()).wait()
        parts = [self._values(rank, self._rank, round_index) for rank in self._ranks]
        return _equal(found, torch.stack(parts).sum(0)), set()

    def _all_gather(self, round_index: int) -> tuple[bool, set[Link]]:
        found = self._zeros(self._world_size * _NUMEL)
        method_of(self._group, "all_gather_single")(
            found, self._values_for_all(self._rank, round_index)
        ).wait()
        return self._compare_by_sender(found, lambda sender: self._values_for_all(sender, round_index))

    def _broadcast(self, round_index: int) -> tuple[bool, set[Link]]:
        options = dist.BroadcastOptions()
        options.rootRank = root = round_index % self._world_size
        expected = self._values_for_all(root, round_index)
        found = expected.clone() if self._rank == root else self._zeros(_NUMEL)
        self._group.broadcast([found], options).wait()
        is_right = _equal(found, expected)
        return is_right, set() if is_right else {(root, self._rank)}

    def _all_to_all(self, round_index: int) -> tuple[bool, set[Link]]:
        own = torch.cat([self._values(self._rank, receiver, round_index) for receiver in self._ranks])
        found = self._zeros(self._world_size * _NUMEL)
        method_of(self._group, "all_to_all_single")(found, own, [], []).wait()
        return self._compare_by_sender(found, lambda sender: self._values(sender, self._rank, round_index))

    def _compare_by_sender(self, found: Tensor, expected: Callable[[int], Tensor]) -> tuple[bool, set[Link]]:
        parts = found.view(self._world_size, -1)
        damaged = {
            (sender, self._rank) for sender in self._ranks if not _equal(parts[sender], expected(sender))
        }
        return not damaged, damaged

    def _values_for_all(self, sender: int, round_index: int) -> Tensor:
        """Return what a rank sends to all alike."""
        return self._values(sender, self._world_size, round_index)

    def _values(self, sender: int, receiver: int, round_index: int, numel: int = _NUMEL) -> Tensor:
        """Return whole numbers from -64 to 64, others for every sender, receiver and round."""
        start = 7 * sender + 31 * receiver + 127 * round_index
        mixed = (
            torch.arange(start, start + numel, device=self._device).mul_(0x9E3779B1).bitwise_right_shift_(9)
        )
        return mixed.remainder_(129).sub_(64).float()

    def _zeros(self, numel: int) -> Tensor:
        return torch.zeros(numel, device=self._device)


COLLECTIVES: Mapping[str, Callable[[Network, int], tuple[bool, set[Link]]]] = MappingProxyType(
    {
        "all-reduce": Network._all_reduce,
        "reduce-scatter": Network._reduce_scatter,
        "all-gather": Network._all_gather,
        "broadcast": Network._broadcast,
        "all-to-all": Network._all_to_all,
    }
)
"""Every collective that the library and stock methods use."""


def _equal(found: Tensor, expected: Tensor) -> bool:
    """Compare bits: a zero with the wrong sign is damage too."""
    return torch.equal(found.view(torch.int32), expected.view(torch.int32))
