"""A deliberately slow rank, to show the effect of a slower machine on a run.

After each micro-batch the rank waits for (factor - 1) times the duration of the micro-batch, and leaves its core to
others meanwhile. Only micro-batches are slow, not optimizer steps or packing; gradients that are sent during the
backward pass are sent before the wait.
"""

import time
from collections.abc import Callable, Mapping

import torch

from stretto.engine.round import Listener, LossFunction
from stretto.errors import ConfigError
from stretto.parallel import DataParallel
from stretto_lab.train.handle import Handle

Wait = Callable[[float], None]


class SlowRank(Listener):
    """Waits after every micro-batch of a job.

    Args:
        factor: How many times as long a micro-batch takes, at least 1.
        device: Device of the computation.
        now: The clock, in seconds.
        wait: Waits for a number of seconds of that clock.
    """

    def __init__(self, factor: float, device: torch.device, now: Callable[[], float], wait: Wait) -> None:
        self._factor = factor
        self._device = device
        self._now = now
        self._wait = wait
        self._began = 0.0

    def micro_batch_begins(self, loss_function: LossFunction, batch: object) -> None:
        self._began = self._now()

    def micro_batch_counted(self, weight: float, samples: int, fresh_samples: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the work has only been handed over
        self._wait((self._factor - 1) * (self._now() - self._began))


def slow_down(
    handle: Handle,
    slow: Mapping[int, float],
    device: torch.device,
    now: Callable[[], float] = time.perf_counter,
    wait: Wait = time.sleep,
) -> None:
    """Slow this rank down from now on, if it is one of the slow ranks.

    Args:
        handle: The handle of this rank.
        slow: Factors by rank.
        device: Device of the computation.
        now: The clock, in seconds.
        wait: Waits for a number of seconds of that clock.

    Raises:
        ConfigError: The handle is a stock method, which does not report its micro-batches.
    """
    if not slow:
        return
    if not isinstance(handle, DataParallel):
        raise ConfigError(f"slow ranks need DataParallel, not {type(handle).__name__}")
    if (factor := slow.get(handle.rank, 1.0)) > 1:
        handle.job.model.listeners.append(SlowRank(factor, device, now, wait))
