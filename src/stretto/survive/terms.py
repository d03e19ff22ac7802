"""One term of a job: from its members' agreement until a member is lost, leaves or joins."""

import copy
import dataclasses
import logging
import math
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from stretto.checkpoint.load import Restored
from stretto.checkpoint.ranks import Ranks
from stretto.continuation import Loader
from stretto.engine.report import Asks
from stretto.engine.state import set_settings
from stretto.engine.watcher import store_of
from stretto.errors import ConfigError, OutOfTurn, PeerFailed, PeerSilent
from stretto.groups import Leavable, LeavableGroup, meshes_over
from stretto.optimizer import Hyperparameters, read_hyperparameters
from stretto.parallel import DataParallel
from stretto.survive.generations import Memory, may_leave
from stretto.survive.keeping import Keeping, do_all_come
from stretto.survive.membership import Ended, Members

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger("stretto")
_LOOK_SECONDS = 1.0
"""Seconds between two checks by the first member for processes that wait to join."""


@dataclasses.dataclass(frozen=True, slots=True)
class Before:
    """How the previous term ended, for its log line."""

    words: str = ""
    at: float = 0.0
    """Time at which this process noticed it."""
    agreed: float = 0.0
    """Time at which it knew which processes continue."""

    def line(self, step: int, ranks: int) -> str:
        """Return the log line, once the job has continued at a step."""
        agreed, back = self.agreed - self.at, time.perf_counter() - self.at
        return (
            f"{self.words}: resuming from update {step} on {ranks} ranks; agreed after {agreed:.2f} s, back "
            f"after {back:.2f} s"
        )


class Beginning:
    """The state of optimizer and scheduler before a job continues, to restore if another term follows.

    Some members have trained and others have just joined, but a job begins only if all have equal settings.
    """

    def __init__(self) -> None:
        self._settings: Hyperparameters = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduler: Any = None
        self._schedule: Any = None

    def note(self, parallel: DataParallel) -> None:
        """Record their state."""
        self._optimizer, self._scheduler = parallel.job.model.optimizer, parallel.scheduler
        self._settings = read_hyperparameters(self._optimizer)
        if hasattr(self._scheduler, "state_dict"):  # without one, keeping a state raises
            self._schedule = copy.deepcopy(self._scheduler.state_dict())

    def put_back(self) -> None:
        """Restore their state."""
        if self._optimizer is None:
            return
        if self._schedule is not None:
            self._scheduler.load_state_dict(self._schedule)
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            set_settings(group, settings)


class Wish:
    """Whether this process wants to leave, at its user's request or after a signal."""

    def __init__(self) -> None:
        self.is_asked = False

    def ask(self) -> None:
        self.is_asked = True

    @contextmanager
    def at(self, signals: Sequence[signal.Signals]) -> Iterator[None]:
        """During the block, let the first of these signals request it; the next has its earlier effect."""
        before = {number: signal.getsignal(number) or signal.SIG_DFL for number in signals}

        def heard(number: int, _: object) -> None:
            self.ask()
            signal.signal(number, before[signal.Signals(number)])

        try:
            for number in signals:
                signal.signal(number, heard)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """State of a process that lasts from term to term."""

    membership: Members
    memory: Memory
    every: int | None
    """Updates between two generations; None lets the library choose."""
    wish: Wish


class Term:
    """The argument of the user's function: the time until a rank is lost or joins."""

    def __init__(
        self,
        number: int,
        seats: Sequence[int],
        group: Any,
        process: Process,
        before: Before,
    ) -> None:
        self.number = number
        """Number of the term, from 0."""
        self.group = group
        """Group of its members, for `DataParallel(group=...)` and for the user's own collectives."""
        self.rank, self.world_size = group.rank(), group.size()
        """This process's index among the members, and their number."""
        self.seats = tuple(seats)
        """Seats of its members, which no other process has had."""
        self._process = process
        self._before = before
        self._keeping: Keeping | None = None
        self._looked = -math.inf
        """Time of the first rank's last check for waiting processes."""
        self._has_meshes = False
        self._job: weakref.ref[DataParallel] | None = None
        self.beginning = Beginning()

    def go_on(
        self,
        parallel: DataParallel,
        *,
        loader: Loader | None = None,
        extra: Any = None,
        begin: Callable[[], object] | None = None,
    ) -> Restored | None:
        """Let a new job continue from the position of the previous term's job; all ranks must call it, before training.

        Args:
            parallel: The new job, over `group`.
            loader: This rank's loader. With as many ranks as before, Stretto restores its position; otherwise
                `Restored.loader_states` has the positions of all, for the caller to deal out.
            extra: As for `keep`; kept at the beginning of the job.
            begin: Called at the beginning of the job, before its state is kept: loads a checkpoint, for example.

        Returns:
            The restored state; None at the beginning of the job.

        Raises:
            ConfigError: The job is not over `group`.
            TornCheckpoint: No generation is complete.
            CommunicationError: A rank was lost.
        """
        if not self.group.of_jobs:
            raise ConfigError(
                f"rank {self.rank}: term.go_on() of a job over another group: expected DataParallel(..., "
                "group=term.group)"
            )
        self._job = weakref.ref(parallel)
        self.beginning.note(parallel)
        self._keeping = Keeping(parallel, self.group, self._process.memory, self._process.every)
        restored = self._keeping.go_on(parallel, loader=loader)
        if restored is None:
            self._keeping.begin(parallel, self._asked_for(), begin, loader=loader, extra=extra)
        elif self.rank == 0:
            _log.warning("%s", self._before.line(restored.step, self.world_size))
        return restored

    def meshes(self, device_type: str = "cpu") -> "dict[str, DeviceMesh]":
        """Return the mesh across nodes, "node", and the one inside this node, "shard"; all members must call, once.

        For models that `fully_shard` shards inside nodes. FSDP2 keeps the mesh in the model, so sharded models and
        their optimizers are built again in every term. Torch's default group is made with them, over all members. It
        ends with the term, and no other code may make one. All work over Gloo, on any device.

        Args:
            device_type: Type of the parameters' device, such as "cuda".

        Raises:
            ConfigError: Torch has a default group that is not a term's, or the term is on a virtual cluster.
            OutOfTurn: This term has its meshes already.
            CommunicationError: A rank was lost.
        """
        if self._has_meshes:
            raise OutOfTurn(
                f"rank {self.rank}: term.meshes() twice in a term: expected once; models share them"
            )
        if not isinstance(self.group, LeavableGroup):
            raise ConfigError(
                f"term.meshes(): expected a group of processes, found a {type(self.group).__name__}"
            )
        self._has_meshes = True
        return meshes_over(self.group, self._process.membership.ranks_per_node, device_type)

    def leave(self) -> None:
        """Let this process leave soon: its machine is taken away, say. It may be called at any time, by any thread.

        All members keep a state after the same update, within seconds, and the others continue from there without this
        process, so nothing is done again. Here `keep` does not return then, and `survives` raises `LeftOut`.
        """
        self._process.wish.ask()

    def keep(self, parallel: DataParallel, *, loader: Loader | None = None, extra: Any = None) -> None:
        """Keep the state, if it is due; all ranks must call it, after every `Update`.

        It is time when so many updates have passed, and when a member leaves or a process waits to come in. Then the
        term ends here too, and nothing is done again: an exception that is no `Exception` leaves the caller's function.
        Where ranks step alone (`LocalSGD`, `DiLoCo` without a delay), it waits for the next average.
        Copies of the state that was kept last are sent meanwhile, and continue whenever this is called.

        Args:
            parallel: The job.
            loader: This rank's loader, if its position is to be kept.
            extra: Any value that `go_on` should return in the next term; rank 0's is kept. A function is called for it.

        Raises:
            OutOfTurn: `go_on` was not called before.
            CommunicationError: A rank was lost.
        """
        keeping, course = self._keeping, parallel.job.compute.rounds
        if keeping is None:
            raise OutOfTurn(f"rank {self.rank}: term.keep() before term.go_on(): expected it before training")
        if self._asks(parallel.job.compute.runtime.now()):
            course.asks |= Asks.KEEP  # with the next round: all know at the same update
        if not (do_all_come(parallel) and (Asks.KEEP in course.asked or keeping.is_due(parallel))):
            keeping.send_on()
            return
        course.asks &= ~Asks.KEEP
        seats = self._stay(keeping.keep(parallel, self._asked_for(), loader=loader, extra=extra))
        if seats != list(self.seats):
            keeping.complete()
            # After this nobody waits for those that leave.
            Ranks(parallel).gather("ending a term", lambda: None)
            parallel.leave()
            raise Planned(seats, self.group)

    def _asks(self, now: float) -> bool:
        """Return whether this member has a reason to end the term; the first member also checks for waiting
        processes.
        """
        if self._process.wish.is_asked or self.rank or now < self._looked + _LOOK_SECONDS:
            return self._process.wish.is_asked
        self._looked = now
        return bool(self._process.membership.newcomers(self.seats))

    def _asked_for(self) -> dict[str, Any]:
        """Return the values that the others need from this member when a state is kept."""
        return {
            "leaves": self._process.wish.is_asked,
            "waiting": self._process.membership.newcomers(self.seats) if self.rank == 0 else [],
        }

    def _stay(self, by_rank: Sequence[tuple[str, Any]]) -> list[int]:
        """Return the seats of the members that continue from a state.

        Args:
            by_rank: By rank: its machine, and the result of its `_asked_for`.
        """
        leaving = may_leave(
            [machine for machine, _ in by_rank],
            [rank for rank, (_, one) in enumerate(by_rank) if one["leaves"]],
            together=self._process.membership.ranks_per_node > 1,
        )
        stay = [seat for rank, seat in enumerate(self.seats) if rank not in leaving]
        return [*stay, *by_rank[0][1]["waiting"]]

    def end(self, error: BaseException) -> Ended:
        """End the job unless it has ended, and leave the group; return this member's input for the agreement."""
        parallel = None if self._job is None else self._job()
        if parallel is not None:
            parallel.fail(error)
            parallel.job.compute.lifetime.failures.let_go()  # they hold threads of the group
        if self._keeping is not None:
            self._keeping.end()
            self._keeping = None
        jobs = self.group.of_jobs
        signs = store_of(jobs[0]) if jobs else None
        ranks = error.ranks if isinstance(error, PeerFailed | PeerSilent) else ()
        self.group.leave()
        return Ended(self.number, self.seats, signs, [self.seats[rank] for rank in ranks])

    @property
    def reached(self) -> str:
        """Describe how far the job has come."""
        parallel = None if self._job is None else self._job()
        return "before training" if parallel is None else f"after update {parallel.steps}"


class Planned(BaseException):
    """The term ends with everything kept, because processes join or leave; contains the seats that continue."""

    def __init__(self, seats: Sequence[int], group: Leavable) -> None:
        super().__init__(seats)
        self.seats = seats
        self.group = group
