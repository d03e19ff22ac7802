"""The virtual clock: the tasks of all ranks alternate, in virtual time and in an order that a seed decides.

Note [Baton]
    Every task is a thread, and exactly one of them runs: it holds the baton until it waits for something or
    lets virtual time pass. Then the baton goes to the task that is ready first; among those ready at the same
    instant the seed chooses. Real time decides nothing, so a run is a function of its program and its seed.

Note [One processor]
    The threads share the processor of the thread that calls `run`. If each has its own, most of a
run is spent on waking them: a switch took 33 µs with two processors, and 7 µs with one.

Note [Failure]
    Once something has failed, nothing waits any longer: every task that gets the baton raises the failure, so
    that every rank ends at once and says why.
"""

import ctypes
import heapq
import os
import random
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import torch

from stretto.random_states import RandomStatesByRank


class Stopped(BaseException):
    """Ends a lane that is no longer needed; not an error, and not to be caught."""


class Task:
    """One thread that alternates with all others.

    Args:
        rank: The task's rank.
        work: Function that the thread runs.
        is_lane: Whether this is a communication lane instead of a rank's program.
    """

    def __init__(self, rank: int, work: Callable[[], None], *, is_lane: bool) -> None:
        self.rank = rank
        self.is_lane = is_lane
        self.has_ended = False
        self.waits_for: object = None
        """The event that the task waits for; messages show its text. None if it is ready or sleeps until an instant."""
        self.waits_since_ns = 0
        self.turn = threading.Lock()
        """A lock that is held while the task may not run; releasing it lets the task run, in real time."""
        self.turn.acquire()
        self.thread = threading.Thread(
            target=self._run,
            args=(work,),
            name=f"stretto-virtual-{rank}{'-lane' if is_lane else ''}",
            daemon=True,
        )

    @property
    def is_here(self) -> bool:
        """Whether the caller is this task."""
        return threading.current_thread() is self.thread

    @property
    def frame(self) -> FrameType | None:
        """The task's current stack frame."""
        return sys._current_frames().get(self.thread.ident or 0)

    def _run(self, work: Callable[[], None]) -> None:
        self.turn.acquire()
        work()


class Schedule:
    """The virtual time, and the running task.

    Args:
        seed: Seed of the order of tasks that are ready at the same instant.
        deadlock: Returns the error to raise when no task can continue.
    """

    def __init__(self, seed: int, deadlock: Callable[[], Exception]) -> None:
        self.now_ns = 0
        self.tasks: list[Task] = []
        self.failure: Callable[[], BaseException] | None = None
        """Makes the error that every task raises; see Note [Failure]."""
        self._deadlock = deadlock
        self._draws = random.Random(seed)
        self._ready: list[tuple[int, float, int, Task]] = []
        """A heap by instant, then by draw; the third number avoids comparing tasks."""
        self._num_woken = 0
        self._held: dict[int, int] = {}
        """By rank: the instant until which its tasks may not run."""
        self._tasks_left = self._programs_left = 0
        self._threads = torch.get_num_threads()
        self._processor: int | None = None
        self._random_states = RandomStatesByRank()
        self._over = threading.Lock()
        self._over.acquire()

    @property
    def current(self) -> Task:
        """The task that holds the baton."""
        return self._current

    def start(self, rank: int, work: Callable[[], None], *, is_lane: bool) -> Task:
        """Start a task, which is ready now."""
        task = Task(rank, lambda: self._perform(task, work), is_lane=is_lane)
        self.tasks.append(task)
        self._tasks_left += 1
        self._programs_left += not is_lane
        task.thread.start()
        self.wake(task, self.now_ns)
        return task

    def run(self) -> None:
        """Pass the baton until every task has ended; the calling thread is not a task."""
        self._choose_processor()
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
            task.thread.join()

    def _choose_processor(self) -> None:
        """Bind the tasks to the caller's processor; see Note [One processor]."""
        if sys.platform == "linux" and self._threads == 1:  # more threads of torch would have to share it too
            self._processor = ctypes.CDLL(None).sched_getcpu()

    # What the current task calls

    def sleep_until(self, at_ns: int) -> None:
        """Let the current task sleep until `at_ns`, if that is in the future."""
        if at_ns <= self.now_ns:
            return
        if self.failure is None and (not self._ready or self._ready[0][0] > at_ns):
            self.now_ns = at_ns  # nobody is ready before: keep the baton
            return
        self.wake(self._current, at_ns)
        self._pass_on()

    def hold(self, rank: int, until_ns: int) -> None:
        """Let no task of a rank run before `until_ns`; the calling task of that rank then continues."""
        self._held[rank] = until_ns
        self.sleep_until(until_ns)

    def park(self, waits_for: object) -> None:
        """Let the current task wait until another wakes it.

        Args:
            waits_for: The event; only messages use its text.
        """
        task = self._current
        task.waits_for, task.waits_since_ns = waits_for, self.now_ns
        self._pass_on()

    def wake(self, task: Task, at_ns: int) -> None:
        """Make a task ready at `at_ns`."""
        task.waits_for = None
        self._num_woken += 1
        heapq.heappush(self._ready, (at_ns, self._draws.random(), self._num_woken, task))

    def fail(self, failure: Callable[[], BaseException]) -> None:
        """Let every task raise the error from `failure` when it next runs; only the first failure counts."""
        if self.failure is None:
            self.failure = failure
        self._wake_parked()

    # How the baton goes from task to task

    def _perform(self, task: Task, work: Callable[[], None]) -> None:
        torch.set_num_threads(self._threads)  # OpenMP counts by calling thread
        if self._processor is not None:
            with suppress(OSError):  # it only saves time, and a sandbox may forbid it
                os.sched_setaffinity(0, {self._processor})
        try:
            self._resume(task)
            work()
        except Stopped:
            pass
        except BaseException as error:
            if self.failure is None:
                failure = error
                self.fail(lambda: failure)
        task.has_ended = True
        self._tasks_left -= 1
        self._programs_left -= not task.is_lane
        if self.failure is not None or self._programs_left == 0:
            self._wake_parked()
        if self._tasks_left == 0:
            self._over.release()
        else:
            self._give(self._take_next())

    def _pass_on(self) -> None:
        """Pass the baton on, and continue once it comes back.

        Raises:
            BaseException: The run has failed, or this lane is no longer needed.
        """
        task = self._current
        following = self._take_next()
        if following is not task:
            self._give(following)
            task.turn.acquire()
        self._resume(task)

    def _take_next(self) -> Task:
        if not self._ready:
            error = self._deadlock()
            self.fail(lambda: error)
        at_ns, _, _, task = heapq.heappop(self._ready)
        while self._held.get(task.rank, 0) > at_ns:
            self.wake(task, self._held[task.rank])
            at_ns, _, _, task = heapq.heappop(self._ready)
        self.now_ns = at_ns
        return task

    def _give(self, task: Task) -> None:
        self._current = task
        task.turn.release()

    def _resume(self, task: Task) -> None:
        if not task.is_lane:  # a lane draws nothing
            self._random_states.hand_to(task.rank)
        if self.failure is not None:
            raise self.failure()
        if task.is_lane and self._programs_left == 0:
            raise Stopped

    def _wake_parked(self) -> None:
        for task in self.tasks:
            if task.waits_for is not None:
                self.wake(task, self.now_ns)
