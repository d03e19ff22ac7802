"""What members ask of each other while they train: to keep a state soon, because one of them leaves or another comes.

Note [Asked during training]
    One member knows that it has to leave, or that somebody waits to come in. All of them have to keep a state after the
    same update then, so all must know it at the same update. About once a second each tells all others in one small
    message, on a their own group. It is started after one update and waited for after a later one, when it has long
    come: training does not wait.

Note [Where all come]
    Ranks that step alone come together at averages. One whose data have ended waits there, and comes to no update
    before; the others cannot know that. So they keep states, and ask each other, after averages alone, and wait for the
    answer there, because all have just met. After the last average they do neither: the rank that has stepped last has
    come to that update already. Where an average lands some updates after it has left, a rank without data comes to no
    update of the others: data have to be even there, as for checkpoints.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from stretto.averaging.worker import WITHOUT_DATA
from stretto.exchange.transfer import Started
from stretto.groups.collectives import method_of
from stretto.parallel import DataParallel
from stretto.survive.copies import Beside

_LOOK_SECONDS = 1.0
"""Between two looks at what others ask: two of them pass until all know."""


class Asking:
    """Tells all members of a term what one of them asks, at the same update; see Note [Asked during training].

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

    def look(self, parallel: DataParallel, asks: Callable[[], bool]) -> bool:
        """Return whether a member asks, as far as all know; all ranks must call, after each update to which all come.

        Args:
            parallel: The job.
            asks: Whether this member asks now.

        Raises:
            CommunicationError: A rank was lost.
        """
        step = parallel.steps
        if meets_at_averages(parallel):
            was_asked = self._is_asked()  # before another strategy took over
            self._tell(step, asks=asks())
            return self._is_asked() or was_asked
        if step < self._next:
            return False
        is_asked = self._is_asked()
        self._tell(step, asks=asks())
        self._next = step + self._interval
        return is_asked

    def _is_asked(self) -> bool:
        """Wait for what all have told, if they have; return whether one of them asks."""
        if self._under_way is None:
            return False
        self._beside.wait(self._under_way)
        self._under_way = None
        slowest = max(float(self._told[:, 1].max()), _LOOK_SECONDS / (2 * self._interval))
        self._interval = max(1, int(_LOOK_SECONDS / slowest))
        return bool(self._told[:, 0].any())

    def _tell(self, step: int, *, asks: bool) -> None:
        """Start to tell the others, and how long an update takes here; at most twice as many are before the next."""
        now = self._now()
        seconds = (now - self._at) / max(1, step - self._step)
        self._at, self._step = now, step
        own = torch.tensor([asks, seconds], dtype=torch.float64)
        gather = method_of(self._beside.group, "all_gather_single")
        self._under_way = gather(self._told.view(-1), own), "what members ask"


def do_all_come(parallel: DataParallel) -> bool:
    """Return whether all ranks come to the update that has just landed; see Note [Where all come]."""
    if not meets_at_averages(parallel):
        return True
    votes = parallel.job.compute.course.votes
    is_last = bool(votes) and all(vote in WITHOUT_DATA for vote in votes)
    return not parallel.job.replica.agreement.gap and not is_last


def meets_at_averages(parallel: DataParallel) -> bool:
    """Return whether averages are the only updates to which every rank comes; see Note [Where all come]."""
    return parallel.job.replica.agreement.steps_alone and not getattr(parallel.strategy, "delay", 0)
