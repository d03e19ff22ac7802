"""Failures travel through the store, so that a dead, raising or silent rank ends the job with its cause."""

import contextlib
import datetime
import time

from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from stretto.errors import CommunicationError, PeerFailed, PeerSilent

_LOOK_SECONDS = 1.0
"""How often a waiting lane looks into the store: a raising rank is noticed within this time."""
_NOTICE_SECONDS = 2.0
"""How long a rank whose collective failed waits for a cause, or for the others to notice too."""


class Watch:
    """Waits for collectives of one group, and tells and hears about failures of its ranks.

    A collective that cannot complete has three causes. A rank died: its sockets close and the collective
    raises. A rank raised: it told the store before it left, and whoever waits reads it there. A rank stopped
    answering: nothing happens until the timeout; those who did wait have said so in the store, and the
    others are named.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self.timeout_seconds = timeout_seconds
        self.step = 0
        """Committed updates so far, for messages; the lane keeps it up to date."""
        self._store = _store_of(group)
        self._num_waits = 0

    def wait(self, work: dist.Work, what: str) -> None:
        """Wait for `work`; `what` says what is waited for.

        Raises:
            PeerFailed: A rank died or raised.
            PeerSilent: The timeout passed without either.
        """
        self._num_waits += 1
        deadline = time.monotonic() + self.timeout_seconds
        while True:
            try:
                work.wait(datetime.timedelta(seconds=_LOOK_SECONDS))
                return
            except RuntimeError as error:
                if work.is_completed():
                    raise PeerFailed(self._where(what) + self._cause(error)) from error
            told = self._heard()
            if told:
                raise PeerFailed(self._where(what) + "; ".join(told))
            self._say("waiting", str(self._num_waits))
            if time.monotonic() > deadline:
                raise PeerSilent(self._where(what) + self._silence())

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks why this one leaves; a failure that was itself heard of is not told again."""
        if not isinstance(error, CommunicationError):
            self._say("failure", f"rank {self.rank}, after step {self.step}: {type(error).__name__}: {error}")

    def _say(self, topic: str, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store's host is gone: nobody is left to tell
            if self._store is not None:
                self._store.set(f"{topic}/{self.rank}", text)

    def _hear(self, topic: str) -> dict[int, str]:
        """Return what other ranks have said about `topic`, by rank."""
        if self._store is None:
            return {}
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        return {
            rank: self._store.get(f"{topic}/{rank}").decode()
            for rank in others
            if self._store.check([f"{topic}/{rank}"])
        }

    def _heard(self) -> list[str]:
        """Return the failures that other ranks have told."""
        try:
            return list(self._hear("failure").values())
        except RuntimeError:
            return []

    def _where(self, what: str) -> str:
        return f"rank {self.rank}, after step {self.step}, waiting for the {what}: "

    def _cause(self, error: RuntimeError) -> str:
        """Return why a collective failed: what was told, or else which ranks are not there any more."""
        reason = str(error).splitlines()[0]
        self._say("noticed", "the connection closed")
        deadline = time.monotonic() + _NOTICE_SECONDS
        try:
            while time.monotonic() < deadline:
                told = self._heard()
                if told:
                    return "; ".join(told)
                missing = self._missing("noticed")
                if not missing:
                    break
                time.sleep(_NOTICE_SECONDS / 20)
            return f"rank {missing} died or closed its connection ({reason})" if missing else reason
        except RuntimeError:
            return f"the rank that keeps the store, usually rank 0, died ({reason})"

    def _missing(self, topic: str) -> list[int]:
        heard = self._hear(topic)
        return [rank for rank in range(self.world_size) if rank != self.rank and rank not in heard]

    def _silence(self) -> str:
        waiting = {rank for rank, count in self._hear("waiting").items() if int(count) >= self._num_waits}
        silent = [rank for rank in range(self.world_size) if rank != self.rank and rank not in waiting]
        return (
            f"no answer for {self.timeout_seconds:g} s from ranks {silent}; "
            "look at what they do, or raise Options(timeout_seconds=...)"
        )


def _store_of(group: dist.ProcessGroup) -> Store | None:
    """Return a store of the group's own ranks, or None for a group without one (a lone rank, a simulation)."""
    try:
        return PrefixStore("stretto", group.get_group_store())
    except RuntimeError:
        return None
