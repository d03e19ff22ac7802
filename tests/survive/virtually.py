"""Ranks of a virtual cluster that die, stop, wake and come, and a job that goes on: `stretto.survives` in virtual time.

The terms, the states in memory and the job are those of real processes. Two things are not: who goes on is agreed among
the tasks of one process, and a rank that is gone is known to be gone at once. What noticing and agreeing take on real
machines is said by whoever runs the cluster.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from stretto.errors import Deadlock, LeftOut, PeerFailed
from stretto.survive import Term
from stretto.survive.membership import Ended, Members, by_node
from stretto.survive.survivor import survive_among
from stretto.survive.terms import Wish
from stretto_lab.virtual.clock import Schedule, Task
from stretto_lab.virtual.cluster import Results, VirtualCluster
from stretto_lab.virtual.collectives import CollectiveMatcher, RunContext
from stretto_lab.virtual.group import VirtualGroup
from stretto_lab.virtual.network import Wires
from stretto_lab.virtual.runtime import RankTime
from stretto_lab.virtual.trace import Trace, rank_statuses

T = TypeVar("T")

_NOBODY = -1
"""The number of what is done beside all processes."""


class Died(BaseException):
    """Raised in a program, it ends the process of its rank there: the others are told nothing."""


def survive(
    cluster: VirtualCluster,
    train: Callable[[Term], T],
    *,
    every: int | None,
    agree_ns: int = 0,
    again_ns: int | None = None,
    silent_ns: int = 60_000_000_000,
    ranks_per_node: int = 1,
    members: "Callable[[Survival[T], int], Members] | None" = None,
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
        every: Updates between two states; None lets the library choose, by what they take on this machine.
        agree_ns: What it takes to notice a loss, to agree and to build the job again, beside what is sent.
        again_ns: After which a new process comes in the place of one that died or was left out; None for never.
        silent_ns: For which a process may be stopped (`term.group.stop`) before the others go on without it.
        ranks_per_node: Of machines that follow each other; they come and go together, as under `stretto.survives`.
        members: Makes a process's part in the agreement, from this run and the place of the process; None for that of
            `VirtualMembership`.

    Returns:
        The results of those that lived to the end, in the order of their seats.

    Raises:
        BaseException: The first error of a program but `Died`.
    """
    return Survival(cluster, train, every, agree_ns, again_ns, silent_ns, ranks_per_node, members).complete()


class Survival(Generic[T]):
    """One run: its processes, and what they have agreed on. The arguments are those of `survive`."""

    def __init__(
        self,
        cluster: VirtualCluster,
        train: Callable[[Term], T],
        every: int | None,
        agree_ns: int,
        again_ns: int | None,
        silent_ns: int,
        ranks_per_node: int,
        members: "Callable[[Survival[T], int], Members] | None",
    ) -> None:
        self._cluster, self._train, self._every = cluster, train, every
        self.agree_ns, self._again_ns, self._silent_ns = agree_ns, again_ns, silent_ns
        self._members = VirtualMembership if members is None else members
        self.ranks, self.ranks_per_node = cluster.world_size, ranks_per_node
        self.trace = Trace()
        self.schedule = Schedule(cluster.seed, self._deadlock)
        self.places: dict[int, int] = {}
        """Of every seat, the machine on which its process runs."""
        self.died: dict[int, str] = {}
        self.named: set[int] = set()
        """Seats that others have left out, because guards had named them: their errors end nothing."""
        self.silent: set[int] = set()
        """Seats of processes that are stopped, and have been for longer than anybody waits."""
        self.waiting: list[int] = []
        self.said: dict[int, dict[int, bool]] = {}
        """By term and seat, whether a member of the term before is done."""
        self.lists: dict[int, tuple[int, ...]] = {}
        self._groups: dict[int, tuple[tuple[int, ...], CollectiveMatcher]] = {}
        """By term, with its seats."""
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
        self.schedule.start(place, partial(self._live, place, at_ns), is_lane=False)

    def _live(self, place: int, at_ns: int) -> None:
        """One process, from its start to its end."""
        schedule = self.schedule
        schedule.sleep_until(at_ns)
        members = self._members(self, place)
        self.places[members.seat] = place
        try:
            self._values[members.seat] = survive_among(self._train, members, self._every, Wish())
            self._ended_ns = schedule.now_ns
        except Died:
            return
        except LeftOut:
            if any(members.seat in seats for seats, _ in self._groups.values()):  # else the job has ended
                self._start_again(place)
        except BaseException as error:
            if schedule.failure is None and members.seat not in self.named:
                self._error = error
                cause = f"seat {members.seat}: {type(error).__name__}: {error}"
                schedule.fail(lambda: PeerFailed(cause))

    def _start_again(self, place: int) -> None:
        if self._again_ns is not None:
            self._start(place, self.schedule.now_ns + self._again_ns)

    # What the processes ask and tell

    def time_of(self, seat: int) -> RankTime:
        """Return the virtual time of a seat's process."""
        cluster = self._cluster
        return RankTime(self.places[seat], self.schedule, self.trace, cluster.compute, cluster.seed)

    def group_of(self, number: int, seats: Sequence[int]) -> CollectiveMatcher:
        """Return the matcher of a term; of who has gone meanwhile the others hear at once."""
        if number not in self._groups:
            places = [self.places[seat] for seat in seats]
            group = CollectiveMatcher(f"term {number}", self._context, places)
            self._groups[number] = tuple(seats), group
            for seat in set(seats) & {*self.died, *self.silent}:
                group.lose(self.places[seat])
        return self._groups[number][1]

    def lose(self, seat: int, how: str) -> None:
        """A process is gone: let nobody wait for it any more, and start another one where that is asked for."""
        self.leave_out(seat, how)
        self._start_again(self.places[seat])

    def leave_out(self, seat: int, why: str) -> None:
        """Let nobody wait for a process any more."""
        self.died[seat] = why
        self._give_up(seat)

    def stop(self, seat: int, duration_ns: int) -> None:
        """Let the current process, which is that of a seat, do nothing for so long, in none of its threads."""
        schedule, now_ns = self.schedule, self.schedule.now_ns
        if duration_ns > self._silent_ns:
            watch = partial(self._watch, seat, now_ns + self._silent_ns)
            schedule.start(_NOBODY, watch, is_lane=True)  # nobody waits for a lane at the end of the run
        schedule.hold(self.places[seat], now_ns + duration_ns)
        self.silent.discard(seat)

    def _watch(self, seat: int, until_ns: int) -> None:
        """Give a process up that sleeps until after that."""
        self.schedule.sleep_until(until_ns)
        self.silent.add(seat)
        self._give_up(seat)

    def _give_up(self, seat: int) -> None:
        for seats, group in self._groups.values():
            if seat in seats:
                group.lose(self.places[seat])
        self.changed()

    def draw(self, place: int) -> int:
        """Return the seat of a process that has come: its place, and a number of its own if it is not the first."""
        return place if place not in self.places else max(self.ranks, *(seat + 1 for seat in self.places))

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

    def __init__(self, survival: Survival[Any], place: int) -> None:
        self._survival = survival
        self.seat = survival.draw(place)
        self.ranks_per_node = survival.ranks_per_node
        self.machine = f"{place // survival.ranks_per_node}"

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
                raise LeftOut(f"seat {self.seat}: the job ended before this process could join")
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
            if all(seat in {*said, *survival.died, *survival.silent} for seat in ended.seats):
                is_over = all(said.values())
                living = [seat for seat in ended.seats if seat in said and seat not in survival.died]
                return self.plan(number, [] if is_over else [*living, *survival.asking(ended.seats)])
            survival.wait()
        return self._listed(number)

    def newcomers(self, seats: Sequence[int]) -> list[int]:
        """See `Membership.newcomers`."""
        survival = self._survival
        return by_node(survival.asking(seats), survival.places, survival.ranks_per_node)

    def plan(self, number: int, seats: Sequence[int]) -> tuple[int, Sequence[int]]:
        """See `Membership.plan`."""
        survival = self._survival
        survival.lists.setdefault(number, tuple(by_node(seats, survival.places, survival.ranks_per_node)))
        survival.changed()
        return self._listed(number)

    def _listed(self, number: int) -> tuple[int, Sequence[int]]:
        seats = self._survival.lists[number]
        if seats and self.seat not in seats:
            raise LeftOut(
                f"seat {self.seat}: the other members continue without this process, as seats {list(seats)}"
            )
        return number, seats

    def group(self, number: int, seats: Sequence[int]) -> "VirtualLeavable":
        """See `Membership.group`."""
        return VirtualLeavable(self._survival, number, seats, self.seat)

    def leave_out(self, seat: int, why: str) -> None:
        """See `Membership.leave_out`."""
        self._survival.leave_out(seat, why)
        self._survival.named.add(seat)

    def died(self, how: str) -> None:
        """See `Membership.died`."""
        self._survival.lose(self.seat, how)


class VirtualLeavable(VirtualGroup):
    """A virtual group that a process can leave.

    Args:
        survival: Of which run.
        number: Of its term.
        seats: Its members.
        seat: Whose view of it this is.
    """

    def __init__(self, survival: Survival[Any], number: int, seats: Sequence[int], seat: int) -> None:
        super().__init__(survival.group_of(number, seats), survival.time_of(seat))
        self._survival, self._seat = survival, seat
        self._others: list[VirtualGroup] = []

    @property
    def of_jobs(self) -> Sequence[VirtualGroup]:
        """The groups that were made of this one, the first one first."""
        return self._others

    @property
    def is_whole(self) -> bool:
        """Whether nobody is known to be gone from it."""
        return self._matcher.left_by is None

    def stop(self, duration_ns: int) -> None:
        """Let this process do nothing for so long, as SIGSTOP and SIGCONT do; it may be given up meanwhile."""
        self._survival.stop(self._seat, duration_ns)

    def private(self) -> VirtualGroup:
        """See `VirtualGroup.private`."""
        self._others.append(super().private())
        return self._others[-1]

    def leave(self) -> None:
        """Leave this group and those made of it."""
        self._matcher.lose(self._matcher.ranks[self.rank()])
