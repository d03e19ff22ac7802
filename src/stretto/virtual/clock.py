"""The clock: tasks take turns in virtual time, each with random states of its own.

The process's random states, which change hands with the baton: every rank draws from its own.

The schedule: tasks take turns in virtual time, in an order that the seed decides.

Note [Baton]
    Every task is a thread, and exactly one of them runs: it holds the baton until it waits for something or
    lets virtual time pass. Then the baton goes to the task that is ready first; among those ready at the same
    instant the seed chooses. Real time decides nothing, so a run is a function of its program and its seed.

Note [Failure]
    Once something has failed, nothing waits any longer: every task that gets the baton back raises the failure
    where it stands, so that every rank unwinds at once and says why.
"""

import dataclasses
import heapq
import random
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclasses.dataclass(slots=True)
class _Held:
    """One rank's states while another rank runs."""

    torch: Tensor
    numpy: np.random.BitGenerator
    """The generator itself changes hands: 0.2 µs, where copying its state takes 70."""
    python: tuple[Any, ...]

    @classmethod
    def take(cls) -> "_Held":
        """Take what is in place."""
        return cls(torch.default_generator.get_state(), _generator(), random.getstate())

    def put(self) -> None:
        """Put it in place."""
        torch.default_generator.set_state(self.torch)
        _use_generator(self.numpy)
        random.setstate(self.python)


class RandomStates:
    """The states of torch, numpy and Python by rank; a rank's lane draws nothing and shares its rank's.

    A rank starts as if its number had been the seed, whatever the process drew before, so that a program that
    does not seed itself repeats too. What the process had is given back at the end.
    """

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._before = _Held.take()
        self._owner: int | None = None

    def hand_to(self, rank: int) -> None:
        """Put the states of `rank` in place, and keep those of the rank before."""
        if rank == self._owner:
            return
        if self._owner is not None:
            self._held[self._owner] = _Held.take()
        self._owner = rank
        if rank in self._held:
            self._held[rank].put()
            return
        torch.default_generator.manual_seed(rank)
        _use_generator(np.random.MT19937(rank))
        random.seed(rank)

    def give_back(self) -> None:
        """Put back what the process had before."""
        self._before.put()


def _generator() -> np.random.BitGenerator:
    generator: np.random.BitGenerator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in its stub
    return generator


def _use_generator(generator: np.random.BitGenerator) -> None:
    np.random.set_bit_generator(generator)  # type: ignore[attr-defined]  # not in its stub


class Stopped(BaseException):
    """Ends a lane that nobody needs any more; not an error, and nothing to catch."""


class Task:
    """One thread that takes turns with all others."""

    def __init__(self, rank: int, work: Callable[[], None], *, is_lane: bool) -> None:
        self.rank = rank
        self.is_lane = is_lane
        """Whether this is a communication lane; otherwise it is a rank's program."""
        self.has_ended = False
        self.waits_for: object = None
        """What it waits for without knowing until when, as text on demand; None where it knows."""
        self.waits_since_ns = 0
        self._work = work
        self._turn = threading.Lock()
        self._turn.acquire()
        self._thread = threading.Thread(
            target=self._run, name=f"stretto-virtual-{rank}{'-lane' if is_lane else ''}", daemon=True
        )

    def begin(self) -> None:
        """Start the thread, which waits for its first turn."""
        self._thread.start()

    def give_turn(self) -> None:
        """Let the task go on."""
        self._turn.release()

    def await_turn(self) -> None:
        """Wait, in real time, until this task is given its turn."""
        self._turn.acquire()

    def join(self) -> None:
        """Wait, in real time, until the thread is gone."""
        self._thread.join()

    @property
    def is_here(self) -> bool:
        """Whether the caller is this task."""
        return threading.current_thread() is self._thread

    @property
    def frame(self) -> FrameType | None:
        """Where the task stands now."""
        return sys._current_frames().get(self._thread.ident or 0)

    def _run(self) -> None:
        self.await_turn()
        self._work()


class Schedule:
    """The virtual clock, and whose turn it is.

    Args:
        seed: Decides among tasks that are ready at the same instant.
        stand_still: Returns the error to raise where no task can go on.
    """

    def __init__(self, seed: int, stand_still: Callable[[], Exception]) -> None:
        self.now_ns = 0
        self.tasks: list[Task] = []
        self.failure: Callable[[], BaseException] | None = None
        """Makes the error that every task raises; see Note [Failure]."""
        self._stand_still = stand_still
        self._draws = random.Random(seed)
        self._ready: list[tuple[int, float, int, Task]] = []
        self._pushed = 0
        self._left = self._programs_left = 0
        self._threads = torch.get_num_threads()
        self._random_states = RandomStates()
        self._over = threading.Lock()
        self._over.acquire()

    @property
    def current(self) -> Task:
        """The task that holds the baton."""
        return self._current

    def start(self, rank: int, work: Callable[[], None], *, is_lane: bool) -> Task:
        """Make a task of `work`, ready now."""
        task = Task(rank, lambda: self._perform(task, work), is_lane=is_lane)
        self.tasks.append(task)
        self._left += 1
        self._programs_left += not is_lane
        task.begin()
        self.wake(task, self.now_ns)
        return task

    def run(self) -> None:
        """Hand out the baton until every task has ended; called by a thread that is none of them."""
        try:
            self._give(self._take_next())
            self._over.acquire()
        except BaseException as interruption:
            # The task that runs finds this when its turn ends; nothing else is safe to touch from here.
            self.failure = self.failure or type(interruption)
            raise
        finally:
            self._random_states.give_back()
        for task in self.tasks:
            task.join()

    def sleep(self, duration_ns: int) -> None:
        """Let `duration_ns` pass for the current task."""
        self.sleep_until(self.now_ns + duration_ns)

    def sleep_until(self, at_ns: int) -> None:
        """Let time pass for the current task until `at_ns`, if that lies ahead."""
        if at_ns <= self.now_ns:
            return
        if self.failure is None and (not self._ready or self._ready[0][0] > at_ns):
            self.now_ns = at_ns  # nobody is ready before: keep the baton
            return
        self.wake(self._current, at_ns)
        self._pass_on()

    def park(self, waits_for: object) -> None:
        """Let the current task wait until somebody wakes it.

        Args:
            waits_for: What for; its text is taken only where nothing comes of it.
        """
        task = self._current
        task.waits_for, task.waits_since_ns = waits_for, self.now_ns
        self._pass_on()

    def wake(self, task: Task, at_ns: int) -> None:
        """Let a task that is parked be ready at `at_ns`."""
        task.waits_for = None
        self._pushed += 1
        heapq.heappush(self._ready, (at_ns, self._draws.random(), self._pushed, task))

    def fail(self, failure: Callable[[], BaseException]) -> None:
        """Let every task raise what `failure` makes, when its turn comes; the first failure counts."""
        if self.failure is None:
            self.failure = failure
        self._wake_parked()

    def _wake_parked(self) -> None:
        for task in self.tasks:
            if task.waits_for is not None:
                self.wake(task, self.now_ns)

    def _pass_on(self) -> None:
        """Hand the baton on, and go on when it comes back.

        Raises:
            BaseException: The run has failed, or this lane is not needed any more.
        """
        task = self._current
        following = self._take_next()
        if following is not task:
            self._give(following)
            task.await_turn()
        self._resume(task)

    def _take_next(self) -> Task:
        if not self._ready:
            error = self._stand_still()
            self.fail(lambda: error)
        self.now_ns, _, _, task = heapq.heappop(self._ready)
        return task

    def _give(self, task: Task) -> None:
        self._current = task
        task.give_turn()

    def _resume(self, task: Task) -> None:
        if not task.is_lane:
            self._random_states.hand_to(task.rank)
        if self.failure is not None:
            raise self.failure()
        if task.is_lane and self._programs_left == 0:
            raise Stopped

    def _perform(self, task: Task, work: Callable[[], None]) -> None:
        torch.set_num_threads(self._threads)  # OpenMP counts by calling thread
        try:
            self._resume(task)
            work()
        except Stopped:
            pass
        except BaseException as error:
            if self.failure is None:
                failure = error
                self.fail(lambda: failure)
        self._end(task)

    def _end(self, task: Task) -> None:
        task.has_ended = True
        self._left -= 1
        self._programs_left -= not task.is_lane
        if self.failure is not None or self._programs_left == 0:
            self._wake_parked()
        if self._left == 0:
            self._over.release()
        else:
            self._give(self._take_next())
