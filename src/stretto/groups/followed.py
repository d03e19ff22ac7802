"""A collective with a follow-up, which runs once, when the result is first requested."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future


class FollowedWork(dist.Work):
    """A work of another group, with a follow-up.

    Args:
        work: The collective.
        follow: Called once the collective is complete and a caller waits, before any caller reads the result.
        outputs: The result; None uses the work's result.
    """

    def __init__(self, work: dist.Work, follow: Callable[[], object], outputs: Any = None) -> None:
        super().__init__()
        self._work = work
        self._follow: Callable[[], object] | None = follow
        self._outputs = outputs
        self._once = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the collective is complete; at most `timeout`, where it is not zero.

        Raises:
            RuntimeError: It is not complete within `timeout`, or it has failed.
        """
        self._work.wait(timeout)
        self._go_on()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Whether the collective is complete and has not failed; the follow-up cannot fail it."""
        return self._work.is_success()

    def exception(self) -> Any:
        """The collective's error, if one has ended it."""
        return self._work.exception()

    def result(self) -> Any:
        """The output tensors, once complete."""
        self._go_on()
        return self._work.result() if self._outputs is None else self._outputs

    def get_future(self) -> Future[Any]:
        """A future of the output tensors."""
        future: Future[Any] = self._work.get_future()
        return future.then(self._followed)

    def _followed(self, future: Future[Any]) -> Any:
        value = future.value()  # raises what the collective has ended with
        self._go_on()
        return value if self._outputs is None else self._outputs

    def _go_on(self) -> None:
        with self._once:
            follow, self._follow = self._follow, None
            if follow is not None:
                follow()
