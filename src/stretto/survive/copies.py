"""Copies of ranks' states, which ranks send each other while they train.

Note [During training]
    A state is kept between two updates, and training continues at once. Copies of its shares are sent meanwhile, on
    their own group, a few parts at a time: after every committed update, a rank takes the parts that have arrived,
    and starts the next. No rank waits there, and no thread is needed, because Gloo's own threads carry the bytes.

    They are waited for before the next state is kept. After that all ranks hear from all others, so each knows that
    the copies of the last state have arrived everywhere, and only then the state before is dropped. If ranks are lost
    while copies are sent, the job continues from the state before.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from stretto.exchange.relay import relay
from stretto.exchange.transfer import Started
from stretto.groups import host_group
from stretto.parallel import DataParallel

Arrived = Callable[[int, memoryview], None]
"""Receives the bytes from a rank."""


class Copies:
    """Copies in progress between the ranks of one term; see Note [During training].

    Args:
        parallel: The job, whose end ends them.
        group: The term's group; all its ranks must make this, at the same place.
    """

    def __init__(self, parallel: DataParallel, group: dist.ProcessGroup) -> None:
        self._exchange = parallel.job.exchange
        self._group = host_group(group)
        self._lifetime = parallel.job.compute.lifetime
        self._wait = self._lifetime.failures.among(self._group, range(group.size()), "")
        self._works: Iterator[Started] = iter(())
        self._awaited: Started | None = None
        self._arriving: dict[int, memoryview] = {}
        self._arrived: Arrived | None = None

    def give(
        self, content: bytes | memoryview, lengths: Sequence[int], to: Sequence[int], arrived: Arrived
    ) -> None:
        """Begin to send bytes to another rank; no copy may be in progress. All ranks must call it.

        Args:
            content: This rank's bytes.
            lengths: Number of bytes of every rank.
            to: The receiver of each rank's bytes.
            arrived: Receives the bytes of other ranks for this rank, once complete.
        """
        self._exchange.count_sent(len(content))
        self._works, self._arriving = relay(self._group, content, lengths, to)
        self._arrived = arrived
        self._step()

    def go_on(self) -> None:
        """Take the parts that have arrived, and start the next parts, without waiting.

        Raises:
            CommunicationError: A rank was lost.
        """
        while self._awaited is not None and self._awaited[0].is_completed():
            self._take(self._awaited)

    def complete(self) -> None:
        """Wait until all copies have arrived; all ranks must call it.

        Raises:
            CommunicationError: A rank was lost.
        """
        while self._awaited is not None:
            self._take(self._awaited)

    def end(self) -> None:
        """Take the parts that have arrived, because the term ends with an error."""
        with contextlib.suppress(RuntimeError):  # a part that is lost with a rank
            while self._awaited is not None and self._awaited[0].is_completed():
                self._awaited[0].wait()
                self._step()

    def _take(self, awaited: Started) -> None:
        with contextlib.nullcontext() if self._lifetime.has_finished else self._lifetime.running():
            self._wait(*awaited)
        self._step()

    def _step(self) -> None:
        self._awaited = next(self._works, None)
        if self._awaited is None and self._arrived is not None:
            arrived, self._arrived = self._arrived, None
            arriving, self._arriving = self._arriving, {}
            for source, copied in arriving.items():
                arrived(source, copied)
