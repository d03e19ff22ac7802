"""A virtual cluster's process group: every collective, checked strictly, in virtual time."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from stretto.engine.runtime import Runtime, Work
from stretto.errors import CommunicationError, OutOfTurn
from stretto.groups.collective_group import CollectiveGroup
from stretto.groups.collectives import Call
from stretto_lab.virtual.collectives import CollectiveMatcher, Rendezvous
from stretto_lab.virtual.runtime import RankTime, VirtualRuntime


class VirtualGroup(CollectiveGroup):
    """One rank's view of a group of a virtual cluster.

    Args:
        matcher: Matches its calls with the calls of the other ranks.
        time: The rank's virtual clock.
    """

    may_wait_again = True

    def __init__(self, matcher: CollectiveMatcher, time: RankTime) -> None:
        description = f"{matcher.name} of a virtual cluster"
        super().__init__(matcher.ranks.index(time.rank), len(matcher.ranks), matcher.name, description)
        self._matcher = matcher
        self._time = time

    def perform(self, call: Call) -> dist.Work:
        """Start a collective; the last rank's call performs it."""
        _check_tensors(call)
        return VirtualWork(self._matcher, self._matcher.enter(call), call)

    @property
    def now_ns(self) -> int:
        """Virtual nanoseconds since the start of the run."""
        return self._time.schedule.now_ns

    def charge(self, work: Work, elements: int = 0) -> None:
        """Add the compute model's time for a piece of work; `DataParallel` calls this."""
        self._time.charge(work, elements)

    def charge_ns(self, duration_ns: int) -> None:
        """Add `duration_ns` of busy time for the program's work outside `DataParallel`."""
        self._time.charge_ns("program", duration_ns)

    def wait_until(self, at_ns: int) -> None:
        """Let this rank be idle until `at_ns`, if that is in the future.

        Raises:
            OutOfTurn: The calling thread does not belong to the rank.
        """
        if not self._time.schedule.current.is_here:
            raise OutOfTurn(
                f"rank {self.rank()}: virtual time passes only on the rank's own threads: expected an "
                "EchoLoader directly around a VirtualStore, and no other thread that reads it"
            )
        self._time.schedule.sleep_until(at_ns)

    def lane_runtime(self, *, overlaps: bool) -> Runtime:
        """Return the runtime for the communication lane of a job on this group, for `DataParallel`.

        Args:
            overlaps: Whether the lane runs at the same time as the program.
        """
        return VirtualRuntime(self._time, overlaps=overlaps)

    def private(self) -> "VirtualGroup":
        """Return another group of the same ranks; every rank must call it, in the same order."""
        return VirtualGroup(self._matcher.sibling(self.rank()), self._time)

    def part(self, members: Sequence[int]) -> "VirtualGroup":
        """Return a group of some of these ranks; every member must call it, in the same order.

        Its collectives wait for its own ranks only, and use only their links.
        """
        return VirtualGroup(self._matcher.sibling(self.rank(), members), self._time)

    def abort(self) -> None:
        """Leave the group after an error: the other ranks no longer wait."""
        self._matcher.leave(self.rank())

    def shutdown(self) -> None:
        """Do nothing."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: a collective that cannot complete raises at once, without a timeout."""

    def get_group_store(self) -> NoReturn:
        """Refuse: failure detection needs no store here, and waits on a store would take real time.

        Raises:
            RuntimeError: Always, as PyTorch's groups without a store do.
        """
        raise RuntimeError("a virtual cluster's group has no store")

    def getBackendName(self) -> str:
        return "virtual"


def _check_tensors(call: Call) -> None:
    """Check that the tensors of one rank's call fit each other.

    Raises:
        CommunicationError: They do not fit.
    """
    method, name = call.method, call.operation.name
    if method.single and (found := len(getattr(call, method.single))) != 1:
        raise CommunicationError(f"{method.name}: expected one entry per rank, found {found}")
    if method.is_listed or method.is_in_place or call.has_splits:
        return
    for output, input in zip(call.outputs, call.inputs, strict=True):
        whole, part, numel = output, input, input.numel()
        if name == "all_gather":
            numel *= call.world_size
        elif name == "reduce_scatter":
            whole, part, numel = input, output, output.numel() * call.world_size
        if whole.numel() != numel or whole.dtype != part.dtype:
            raise CommunicationError(
                f"rank {call.rank}: {name} over {call.world_size} ranks with tensors of {whole.numel()} elements "
                f"of {whole.dtype} and {part.numel()} of {part.dtype}: expected {numel} for the former, in one dtype"
            )


class VirtualWork(dist.Work):
    """The handle of a collective; waiting for it takes only virtual time.

    A timeout has no effect: a collective that cannot complete is an error at once.
    """

    def __init__(self, matcher: CollectiveMatcher, rendezvous: Rendezvous, call: Call) -> None:
        super().__init__()
        self._matcher = matcher
        self._rendezvous = rendezvous
        self._rank = call.rank
        self._outputs = call.outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Let virtual time pass until the collective is complete.

        Raises:
            CollectivesDisagree: Ranks called different collectives.
            Deadlock: Not all ranks will ever call it.
            PeerFailed: A rank raised.
        """
        self._matcher.wait(self._rank, self._rendezvous)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` takes no time."""
        over_ns = self._rendezvous.over_ns
        return over_ns is not None and self._matcher.context.schedule.now_ns >= over_ns

    def is_success(self) -> bool:
        """Whether it is complete: a failed collective fails the whole run."""
        return self.is_completed()

    def exception(self) -> Exception | None:
        """None: a failed collective fails the whole run."""
        return None

    def result(self) -> list[Tensor]:
        """The output tensors."""
        return self._outputs

    def get_future(self) -> Future[Any]:
        """Wait, and return a completed future of the output tensors.

        PyTorch waits for futures in C++, where virtual time cannot pass. So a caller that asks for a future waits here:
        stock DDP computes the right values on a virtual cluster, but overlaps nothing.
        """
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self._outputs)
        return future
