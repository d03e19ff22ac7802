"""The handle of a collective on a virtual cluster."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from stretto.virtual.meeting import Hall, Meeting


class VirtualWork(dist.Work):
    """A collective under way; waiting for it takes virtual time only.

    A timeout is no use: a collective that cannot complete is an error at once.
    """

    def __init__(self, hall: Hall, meeting: Meeting, rank: int, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._hall = hall
        self._meeting = meeting
        self._rank = rank
        self._outputs = list(outputs)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Let virtual time pass until the collective is over.

        Raises:
            CollectivesDisagree: Ranks called different collectives.
            Deadlock: Not all ranks will ever come.
            PeerFailed: A rank raised.
        """
        self._hall.wait(self._rank, self._meeting)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` takes no time."""
        return self._meeting.is_over

    def is_success(self) -> bool:
        """As `is_completed`: what fails, fails the whole run."""
        return self._meeting.is_over

    def exception(self) -> Exception | None:
        """None."""
        return None

    def result(self) -> list[Tensor]:
        """The output tensors."""
        return self._outputs

    def get_future(self) -> Future[Any]:
        """Wait, and return a completed future of the output tensors.

        Torch waits for futures in C++, out of reach of virtual time. So whoever asks for one waits on the spot:
        stock DDP computes the right values on a virtual cluster, and hides nothing.
        """
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self._outputs)
        return future
