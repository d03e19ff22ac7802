"""The virtual cluster: one program on many ranks of one process, in virtual time."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from torch import distributed as dist

from stretto.errors import ConfigError, Deadlock, PeerFailed
from stretto.fields import check_fields
from stretto_lab.virtual.clock import Schedule
from stretto_lab.virtual.collectives import CollectiveMatcher, RunContext
from stretto_lab.virtual.group import VirtualGroup
from stretto_lab.virtual.network import Network, Wires
from stretto_lab.virtual.runtime import Compute, RankTime
from stretto_lab.virtual.trace import Trace, rank_statuses

T = TypeVar("T")
Faults = Callable[[dist.ProcessGroup], dist.ProcessGroup]
"""Takes a rank's group and returns the group for its program: one that injects faults, for example."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Results(Generic[T]):
    """The outcome of one run."""

    values: tuple[T, ...]
    """Return values of the program, by rank."""
    elapsed_ns: int
    """Virtual nanoseconds from the start to the end of the last rank."""
    trace: Trace
    """Every rank's work, with times."""


@dataclasses.dataclass(frozen=True, slots=True)
class VirtualCluster:
    """Runs one program on `world_size` ranks, each a thread that alternates with the others.

        def program(rank: int, group: ProcessGroup) -> float:
            model, optimizer, loader = ...
            parallel = DataParallel(model, optimizer, ACCO(), group=group)
            ...

        results = VirtualCluster(64, network=NETWORKS["office"], seed=3).run(program)

    The code is the same as on real processes. Collectives take virtual time by the network model, work takes virtual
    time by the compute model, and everything else takes none. Equal clusters and equal programs give bit-identical
    results, also in another process. With another seed, ranks that are ready at the same instant run in another order.
    """

    world_size: int
    """Number of ranks."""
    network: Network = dataclasses.field(default_factory=Network)
    """The network model, which decides how long sending takes; by default no time."""
    compute: Compute = dataclasses.field(default_factory=Compute)
    """The compute model, which decides how long work takes."""
    seed: int = 0
    """Seed of the order of ranks that are ready at the same instant, and of the jitter of computing."""
    faults: Faults | None = None
    """Wraps every rank's group; None for no wrapper."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.world_size < 1 or self.seed < 0:
            raise ConfigError(
                f"VirtualCluster(world_size={self.world_size}, seed={self.seed}): expected at least one rank and a "
                "seed that is not negative"
            )
        self.network.check(self.world_size)

    def run(self, program: Callable[[int, Any], T]) -> Results[T]:
        """Call `program(rank, group)` for every rank and return when all have returned.

        Args:
            program: Ordinary training code on the group it is given. It must not wait for anything but collectives:
                a thread that blocks in real time blocks all.

        Raises:
            CollectivesDisagree: Ranks called different collectives; the message shows what each rank does.
            Deadlock: No rank can continue; the message shows what each rank does.
            BaseException: The first error of a rank's program. A note gives the seed that repeats it.
        """
        run = _Run(self, program)
        try:
            return run.complete()
        except Exception as error:
            name = f"{program.__module__}.{getattr(program, '__qualname__', program)}"
            error.add_note(f"replay: {self!r}.run({name})")
            raise


class _Run(Generic[T]):
    def __init__(self, cluster: VirtualCluster, program: Callable[[int, Any], T]) -> None:
        self._cluster = cluster
        self._program = program
        self._trace = Trace()
        self._schedule = Schedule(cluster.seed, self._deadlock)
        self._values: dict[int, T] = {}
        self._error: BaseException | None = None
        wires = Wires(cluster.network, cluster.world_size)
        context = RunContext(cluster.world_size, self._schedule, wires, self._trace)
        self._matcher = CollectiveMatcher("the group", context, range(cluster.world_size))

    def complete(self) -> Results[T]:
        for rank in range(self._cluster.world_size):
            self._schedule.start(rank, partial(self._rank, rank), is_lane=False)
        self._schedule.run()
        if self._error is not None:
            raise self._error
        if self._schedule.failure is not None:
            raise self._schedule.failure()
        values = tuple([self._values[rank] for rank in range(self._cluster.world_size)])
        return Results(values=values, elapsed_ns=self._schedule.now_ns, trace=self._trace)

    def _rank(self, rank: int) -> None:
        """Run the program of one rank."""
        cluster, schedule = self._cluster, self._schedule
        time = RankTime(rank, schedule, self._trace, cluster.compute, cluster.seed)
        group: dist.ProcessGroup = VirtualGroup(self._matcher, time)
        if cluster.faults is not None:
            group = cluster.faults(group)
        try:
            self._values[rank] = self._program(rank, group)
        except BaseException as error:
            if schedule.failure is None:
                self._error = error
                cause = f"rank {rank}: {type(error).__name__}: {error}"
                schedule.fail(lambda: PeerFailed(cause))

    def _deadlock(self) -> Exception:
        return Deadlock(
            "no rank can continue: expected every rank to call the same collectives",
            tuple(rank_statuses(self._schedule)),
        )
