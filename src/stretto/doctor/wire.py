"""The wire: collectives and links carry what is known beforehand, so that whatever arrives otherwise is seen.

Every value is a small whole number that follows from who sends it, to whom, where it lies and in which round. Sums of
them are exact in float32 whatever the order, so that the right result of every collective is known on every rank.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch import distributed as dist

from stretto.doctor.report import Link

_NUMEL = 4096
"""Elements that a rank sends to each other rank in a collective."""


@dataclasses.dataclass(slots=True)
class Tally:
    """What one rank has seen of one collective."""

    rounds: int = 0
    damaged: int = 0
    """Rounds in which this rank received something wrong."""
    links: set[Link] = dataclasses.field(default_factory=set)
    """On which that was, where a row has one sender."""


@dataclasses.dataclass(slots=True)
class Flow:
    """What one rank has received from another."""

    seconds: float = 0.0
    bytes: int = 0
    damaged: int = 0
    """Payloads that did not arrive as they were sent."""


class Wire:
    """One rank's end of the tests over a group; all ranks call the same methods in the same order.

    Args:
        group: Whose collectives and links are tested; tensors in the host's memory.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.world_size = group.rank(), group.size()

    def run_collectives(self, round_index: int, tallies: Mapping[str, Tally]) -> None:
        """Run every collective once and compare what it brings with what is right."""
        for name, collective in COLLECTIVES.items():
            tally = tallies[name]
            tally.rounds += 1
            right, damaged_links = collective(self, round_index)
            tally.damaged += not right
            tally.links |= damaged_links

    def send_around(self, distance: int, megabytes: float, round_index: int, flows: dict[int, Flow]) -> None:
        """Send a payload `distance` ranks on, and compare the one that arrives from as far behind.

        Args:
            distance: From 1; all ranks send at once, each to another.
            megabytes: Length of the payload, in units of 2^20 bytes.
            round_index: Which payload.
            flows: By sender; added to.
        """
        receiver, sender = (
            (self.rank + distance) % self.world_size,
            (self.rank - distance) % self.world_size,
        )
        numel = int(megabytes * 2**18)
        payload, arrived = self._values(self.rank, receiver, round_index, numel), torch.zeros(numel)
        to_send, to_take = ([0] * self.world_size for _ in range(2))
        to_send[receiver] = to_take[sender] = numel
        self.group.barrier().wait()
        started = time.perf_counter()
        self.group.alltoall_base(arrived, payload, to_take, to_send).wait()
        flow = flows.setdefault(sender, Flow())
        flow.seconds += time.perf_counter() - started
        flow.bytes += arrived.nbytes
        flow.damaged += not _equal(arrived, self._values(sender, self.rank, round_index, numel))

    def all_reduce(self, round_index: int) -> tuple[bool, set[Link]]:
        """Sum whole vectors."""
        found = self._row(self.rank, round_index)
        self.group.allreduce([found]).wait()
        expected = torch.stack([self._row(rank, round_index) for rank in self._ranks]).sum(0)
        return _equal(found, expected), set()

    def reduce_scatter(self, round_index: int) -> tuple[bool, set[Link]]:
        """Sum a part on every rank."""
        own = torch.cat([self._values(self.rank, owner, round_index) for owner in self._ranks])
        found = torch.zeros(_NUMEL)
        self.group.reduce_scatter_single(found, own, dist.ReduceScatterOptions()).wait()
        expected = torch.stack([self._values(rank, self.rank, round_index) for rank in self._ranks]).sum(0)
        return _equal(found, expected), set()

    def all_gather(self, round_index: int) -> tuple[bool, set[Link]]:
        """Bring every rank's part to all."""
        found = torch.zeros(self.world_size * _NUMEL)
        self.group.all_gather_single(found, self._row(self.rank, round_index)).wait()
        return self._compare_rows(found, lambda sender: self._row(sender, round_index))

    def broadcast(self, round_index: int) -> tuple[bool, set[Link]]:
        """Bring one rank's values to all, from another one each round."""
        options = dist.BroadcastOptions()
        options.rootRank = root = round_index % self.world_size
        expected = self._row(root, round_index)
        found = expected.clone() if self.rank == root else torch.zeros(_NUMEL)
        self.group.broadcast([found], options).wait()
        right = _equal(found, expected)
        return right, set() if right else {(root, self.rank)}

    def all_to_all(self, round_index: int) -> tuple[bool, set[Link]]:
        """Bring every rank its own part of every rank's values."""
        own = torch.cat([self._values(self.rank, receiver, round_index) for receiver in self._ranks])
        found = torch.zeros(self.world_size * _NUMEL)
        self.group.alltoall_base(found, own, [], []).wait()
        return self._compare_rows(found, lambda sender: self._values(sender, self.rank, round_index))

    @property
    def _ranks(self) -> range:
        return range(self.world_size)

    def _compare_rows(self, found: Tensor, expected: Callable[[int], Tensor]) -> tuple[bool, set[Link]]:
        """Compare what has arrived from every sender."""
        rows = found.view(self.world_size, -1)
        damaged = {
            (sender, self.rank) for sender in self._ranks if not _equal(rows[sender], expected(sender))
        }
        return not damaged, damaged

    def _row(self, rank: int, round_index: int) -> Tensor:
        """Return what a rank has for all."""
        return self._values(rank, self.world_size, round_index)

    def _values(self, sender: int, receiver: int, round_index: int, numel: int = _NUMEL) -> Tensor:
        """Return whole numbers between -64 and 64 that only this sender, receiver and round have."""
        start = 7 * sender + 31 * receiver + 127 * round_index
        return (
            torch.arange(start, start + numel)
            .mul_(0x9E3779B1)
            .bitwise_right_shift_(9)
            .remainder_(129)
            .sub_(64)
            .float()
        )


COLLECTIVES: Mapping[str, Callable[[Wire, int], tuple[bool, set[Link]]]] = MappingProxyType(
    {
        "all-reduce": Wire.all_reduce,
        "reduce-scatter": Wire.reduce_scatter,
        "all-gather": Wire.all_gather,
        "broadcast": Wire.broadcast,
        "all-to-all": Wire.all_to_all,
    }
)
"""Every collective that the library and stock methods use."""


def _equal(found: Tensor, expected: Tensor) -> bool:
    """Compare bits: a zero with the wrong sign is damage too."""
    return torch.equal(found.view(torch.int32), expected.view(torch.int32))
