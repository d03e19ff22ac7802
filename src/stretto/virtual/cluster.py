"""The virtual cluster: a program on many ranks of one process, in virtual time."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from torch import distributed as dist

from stretto.errors import ConfigError, Deadlock, PeerFailed
from stretto.fields import check_fields
from stretto.virtual.clock import Schedule
from stretto.virtual.collectives import Hall, Surroundings
from stretto.virtual.group import VirtualGroup
from stretto.virtual.network import Network, Wires
from stretto.virtual.runtime import Compute, Costs, Desk
from stretto.virtual.trace import Trace, standings

T = TypeVar("T")
Faults = Callable[[dist.ProcessGroup], dist.ProcessGroup]
"""Returns the group that a rank is handed in the place of its own: one that injects faults, for example."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Results(Generic[T]):
    """What came of one run."""

    values: tuple[T, ...]
    """What the program returned, by rank."""
    elapsed_ns: int
    """Virtual nanoseconds from the beginning to the end of the last rank."""
    trace: Trace
    """What every rank did when."""


@dataclasses.dataclass(frozen=True, slots=True)
class VirtualCluster:
    """Runs one program on `world_size` ranks, each a thread that takes turns with the others.

        def program(rank: int, group: ProcessGroup) -> float:
            model, optimizer, loader = ...
            parallel = DataParallel(model, optimizer, ACCO(), group=group)
            ...

        results = VirtualCluster(64, network=NETWORKS["office"], seed=3).run(program)

    The code is the one that runs on real processes. Its communication lanes, collectives and costs take virtual
    time, by the models of the network and of the computing; everything else takes none. Equal clusters run equal
    programs alike to the bit, also in another process; another seed lets ranks that are ready at the same instant
    take turns in another order.
    """

    world_size: int
    """How many ranks there are."""
    network: Network = dataclasses.field(default_factory=Network)
    """What sending costs; by default nothing."""
    compute: Compute = dataclasses.field(default_factory=Compute)
    """What computing costs."""
    seed: int = 0
    """Of the order among ranks that are ready at the same instant, and of the jitter of costs."""
    faults: Faults | None = None
    """What every rank's group is wrapped in; None for nothing."""

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
            program: Ordinary training code that uses the group it is handed. It must not wait for anything but
                collectives: what blocks one thread blocks all.

        Raises:
            CollectivesDisagree: Ranks called different collectives; says where each one stands.
            Deadlock: No rank can go on; says where each one stands.
            BaseException: What a rank's program raised first. A note says how to run the same again.
        """
        run = _Run(self, program)
        try:
            return run.complete()
        except Exception as error:
            name = f"{program.__module__}.{getattr(program, '__qualname__', program)}"
            error.add_note(f"replay: {self!r}.run({name})")
            raise


class _Run(Generic[T]):
    """One run of one program."""

    def __init__(self, cluster: VirtualCluster, program: Callable[[int, Any], T]) -> None:
        self._cluster = cluster
        self._program = program
        self._trace = Trace()
        self._schedule = Schedule(cluster.seed, self._stand_still)
        self._values: dict[int, T] = {}
        self._error: BaseException | None = None
        wires = Wires(cluster.network, cluster.world_size)
        self._hall = Hall("the group", Surroundings(cluster.world_size, self._schedule, wires, self._trace))

    def complete(self) -> Results[T]:
        """Run it from beginning to end."""
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
        """One rank's task."""
        cluster, schedule = self._cluster, self._schedule
        desk = Desk(rank, schedule, Costs(cluster.compute, cluster.seed, rank), self._trace)
        group: dist.ProcessGroup = VirtualGroup(self._hall, desk, cluster.world_size)
        if cluster.faults is not None:
            group = cluster.faults(group)
        try:
            self._values[rank] = self._program(rank, group)
        except BaseException as error:
            if schedule.failure is None:
                self._error = error
                cause = f"rank {rank}: {type(error).__name__}: {error}"
                schedule.fail(lambda: PeerFailed(cause))

    def _stand_still(self) -> Exception:
        return Deadlock(
            "no rank can go on: expected every rank to come to the same collectives",
            tuple(standings(self._schedule.tasks, self._schedule.now_ns)),
        )
