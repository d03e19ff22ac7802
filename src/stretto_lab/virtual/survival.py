"""Ranks of a virtual cluster that die and come, and a job that goes on: `stretto.survives` in virtual time.

The terms, the states in memory and the job are those of real processes. Two things are not: who goes on is agreed among
the tasks of one process, and a rank that is gone is known to be gone at once. What noticing and agreeing take on real
machines is said by whoever runs the cluster.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from stretto.errors import Deadlock, LeftOut, PeerFailed
from stretto.survive import Term
from stretto.survive.membership import Ended
from stretto.survive.terms import survive_among
from stretto_lab.virtual.clock import Schedule, Task
from stretto_lab.virtual.cluster import Results, VirtualCluster
from stretto_lab.virtual.collectives import CollectiveMatcher, RunContext
from stretto_lab.virtual.group import VirtualGroup
from stretto_lab.virtual.network import Wires
from stretto_lab.virtual.runtime import RankTime
from stretto_lab.virtual.trace import Trace, rank_statuses

T = TypeVar("T")


class Died(BaseException):
    """Raised in a program, it ends the process of its rank there: the others are told nothing."""


def survive(
    cluster: VirtualCluster,
    train: Callable[[Term], T],
    *,
    every: int,
    agree_ns: int = 0,
    again_ns: int | None = None,
) -> Results[T]:
    """Call `train` with a `Term` on every rank, as `stretto.survives` does, and return when all that live have ended.

        def train(term):
            parallel = DataParallel(model, optimizer, group=term.group)
            term.go_on(parallel)
            for batch in parallel.feed(loader, on_update=lambda update: committed(term, update)): ...

        def committed(term, update):
            if (term.seats[term.rank], update.step) in losses:
                raise Died
            term.keep(parallel)

    Args:
        cluster: Where.
        train: The program.
        every: Updates between two states.
        agree_ns: What it takes to notice a loss, to agree and to build the job again, beside what is sent.
        again_ns: After which a new process comes in the place of one that died; None for never.

    Returns:
        The results of those that lived to the end, in the order of their seats.

    Raises:
        BaseException: The first error of a program but `Died`.
    """
    return _Survival(cluster, train, every, agree_ns, again_ns).complete()


class _Survival(Generic[T]):
    """One run: its processes, and what they have agreed on."""

    def __init__(
        self,
        cluster: VirtualCluster,
        train: Callable[[Term], T],
        every: int,
        agree_ns: int,
        again_ns: int | None,
    ) -> None:
        self._cluster, self._train, self._every = cluster, train, every
        self.agree_ns, self._again_ns = agree_ns, again_ns
        self.ranks = cluster.world_size
        self.trace = Trace()
        self.schedule = Schedule(cluster.seed, self._deadlock)
        self.places: list[int] = []
        """Of every seat, the machine on which its process runs."""
        self.died: dict[int, str] = {}
        self.waiting: list[int] = []
        self.said: dict[int, dict[int, bool]] = {}
        """By term and seat, whether a member of the term before is done."""
        self.lists: dict[int, tuple[int, ...]] = {}
        self._groups: dict[int, CollectiveMatcher] = {}
        self._parked: list[Task] = []
        self._values: dict[int, T] = {}
        self._ended_ns = 0
        self._error: BaseException | None = None
        wires = Wires(cluster.network, cluster.world_size)
        self._context = RunContext(cluster.world_size, self.schedule, wires, self.trace)

    def complete(self) -> Results[T]:
        """Run it from beginning to end."""
        for place in range(self._cluster.world_size):
            self._start(place, 0)
        self.schedule.run()
        if self._error is not None:
            raise self._error
        if self.schedule.failure is not None:
            raise self.schedule.failure()
        values = tuple(value for _, value in sorted(self._values.items()))
        return Results(values=values, elapsed_ns=self._ended_ns, trace=self.trace)

    def _start(self, place: int, at_ns: int) -> None:
        seat = len(self.places)
        self.places.append(place)
        self.schedule.start(place, partial(self._live, seat, at_ns), is_lane=False)

    def _live(self, seat: int, at_ns: int) -> None:
        """One process, from its start to its end."""
        schedule = self.schedule
        schedule.sleep_until(at_ns)
        try:
            self._values[seat] = survive_among(self._train, VirtualMembership(self, seat), self._every)
            self._ended_ns = schedule.now_ns
        except (Died, LeftOut):
            return
        except BaseException as error:
            if schedule.failure is None:
                self._error = error
                cause = f"seat {seat}: {type(error).__name__}: {error}"
                schedule.fail(lambda: PeerFailed(cause))

    # What the processes ask and tell

    def time_of(self, seat: int) -> RankTime:
        """Return the virtual time of a seat's process."""
        cluster = self._cluster
        return RankTime(self.places[seat], self.schedule, self.trace, cluster.compute, cluster.seed)

    def group_of(self, number: int, seats: Sequence[int]) -> CollectiveMatcher:
        """Return the matcher of a term; of who has died meanwhile the others hear at once."""
        if number not in self._groups:
            places = [self.places[seat] for seat in seats]
            group = self._groups[number] = CollectiveMatcher(f"term {number}", self._context, places)
            for seat in set(seats) & self.died.keys():
                group.lose(self.places[seat])
        return self._groups[number]

    def lose(self, seat: int, how: str) -> None:
        """A process is gone: let nobody wait for it any more, and start another one where that is asked for."""
        self.died[seat] = how
        place = self.places[seat]
        if self._groups:
            self._groups[max(self._groups)].lose(place)
        self.changed()
        if self._again_ns is not None:
            self._start(place, self.schedule.now_ns + self._again_ns)

    def asking(self, seats: Sequence[int]) -> list[int]:
        """Return who wants to come in, but for those of `seats`."""
        entered = {seat for listed in self.lists.values() for seat in listed}
        return [seat for seat in self.waiting if seat not in {*seats, *self.died, *entered}]

    def changed(self) -> None:
        """Let all look again that wait for what others say."""
        parked, self._parked = self._parked, []
        for task in parked:
            self.schedule.wake(task, self.schedule.now_ns)

    def wait(self) -> None:
        """Let the current process wait until somebody says something."""
        self._parked.append(self.schedule.current)
        self.schedule.park("what the other members say")

    def _deadlock(self) -> Exception:
        return Deadlock(
            "no rank can go on: expected every member to come", tuple(rank_statuses(self.schedule))
        )


class VirtualMembership:
    """One process's part in the agreement, as `stretto.survive.membership.Members` describes it."""

    def __init__(self, survival: _Survival[Any], seat: int) -> None:
        self._survival = survival
        self.seat = seat

    @property
    def deaths(self) -> Mapping[int, str]:
        """How processes have ended, by seat."""
        return self._survival.died

    def enter(self) -> tuple[int, Sequence[int]]:
        """See `Membership.enter`."""
        survival = self._survival
        if self.seat < survival.ranks:
            return self.following(Ended(-1, range(survival.ranks)))
        survival.waiting.append(self.seat)
        while True:
            number = max(survival.lists, default=-1)
            seats = survival.lists.get(number, ())
            if self.seat in seats:
                return number, seats
            if number >= 0 and not seats:
                raise LeftOut(f"seat {self.seat}: the job ended before this process could come in")
            survival.wait()

    def following(self, ended: Ended) -> tuple[int, Sequence[int]]:
        """See `Membership.following`."""
        survival, number = self._survival, ended.number + 1
        if ended.number >= 0 and not ended.is_done:
            survival.schedule.sleep_until(survival.schedule.now_ns + survival.agree_ns)
        said = survival.said.setdefault(number, {})
        said[self.seat] = ended.is_done
        survival.changed()
        while number not in survival.lists:
            if all(seat in said or seat in survival.died for seat in ended.seats):
                is_over = all(said.values())
                living = [seat for seat in ended.seats if seat in said and seat not in survival.died]
                return self.plan(number, [] if is_over else [*living, *survival.asking(ended.seats)])
            survival.wait()
        return number, survival.lists[number]

    def newcomers(self, seats: Sequence[int]) -> list[int]:
        """See `Membership.newcomers`."""
        return self._survival.asking(seats)

    def plan(self, number: int, seats: Sequence[int]) -> tuple[int, Sequence[int]]:
        """See `Membership.plan`."""
        self._survival.lists.setdefault(number, tuple(seats))
        self._survival.changed()
        return number, self._survival.lists[number]

    def group(self, number: int, seats: Sequence[int]) -> "VirtualLeavable":
        """See `Membership.group`."""
        survival = self._survival
        return VirtualLeavable(survival.group_of(number, seats), survival.time_of(self.seat))

    def died(self, how: str) -> None:
        """See `Membership.died`."""
        self._survival.lose(self.seat, how)


class VirtualLeavable(VirtualGroup):
    """A virtual group that a process can leave."""

    def __init__(self, matcher: CollectiveMatcher, time: RankTime) -> None:
        super().__init__(matcher, time)
        self._others: list[VirtualGroup] = []

    @property
    def of_jobs(self) -> Sequence[VirtualGroup]:
        """The groups that were made of this one, the first one first."""
        return self._others

    @property
    def is_whole(self) -> bool:
        """Whether nobody is known to be gone from it."""
        return not self._matcher.is_left

    def private(self) -> VirtualGroup:
        """See `VirtualGroup.private`."""
        self._others.append(super().private())
        return self._others[-1]

    def leave(self) -> None:
        """Leave this group and those made of it."""
        self._matcher.lose(self._matcher.ranks[self.rank()])
