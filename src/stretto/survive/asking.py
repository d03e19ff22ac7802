"""What members ask of each other while they train: to keep a state soon, because one of them leaves or another comes.

Note [Asked beside training]
    One member knows that it has to leave, or that somebody waits to come in. All of them have to keep a state after the
    same update then, so all must know it at the same update. About once a second each tells all others in one small
    message, on a group of their own. It is started after one update and waited for after a later one, when it has long
    come: training does not wait. A round's report would carry it for nothing, but where ranks step alone they meet once
    in many updates, and a machine that is taken away may give notice of half a minute.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from stretto.exchange.transfer import Started
from stretto.groups.collectives import method_of
from stretto.parallel import DataParallel
from stretto.survive.copies import Beside

_LOOK_SECONDS = 1.0
"""Between two looks at what others ask: two of them pass until all know."""


class Asking:
    """Tells all members of a term what one of them asks, at the same update; see Note [Asked beside training].

    Args:
        parallel: The job.
        group: Of the term; all its ranks must make this, at the same place.
    """

    def __init__(self, parallel: DataParallel, group: dist.ProcessGroup) -> None:
        self._beside = Beside(parallel, group)
        self._now = parallel.job.compute.runtime.now
        self._at = self._now()
        self._step = self._next = parallel.steps
        self._interval = 1
        self._told = torch.zeros(group.size(), 2, dtype=torch.float64)
        self._under_way: Started | None = None

    def look(self, step: int, asks: Callable[[], bool]) -> bool:
        """Return whether a member asked when all looked before; all ranks must call, after every update.

        Args:
            step: Committed updates. Who has passed some by makes up for them.
            asks: Whether this member asks now.

        Raises:
            CommunicationError: A rank was lost.
        """
        is_asked = False
        while step >= self._next:
            if self._under_way is not None:
                self._beside.wait(self._under_way)
                is_asked |= bool(self._told[:, 0].any())
                slowest = max(float(self._told[:, 1].max()), _LOOK_SECONDS / (2 * self._interval))
                self._interval = max(1, int(_LOOK_SECONDS / slowest))
            self._tell(self._next, asks())
            self._next += self._interval
        return is_asked

    def _tell(self, step: int, asks: bool) -> None:
        """Start to tell the others, and how long an update takes here; at most twice as many lie before the next."""
        now = self._now()
        seconds = (now - self._at) / max(1, step - self._step)
        self._at, self._step = now, step
        own = torch.tensor([asks, seconds], dtype=torch.float64)
        gather = method_of(self._beside.group, "all_gather_single")
        self._under_way = gather(self._told.view(-1), own), "what members ask"
