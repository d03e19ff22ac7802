"""A rank that is killed, stopped or silent at any moment of a job: all others end in time, and name it."""

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

import stretto as st
from stretto.groups.collectives import Call
from stretto.groups.private import private_group
from stretto.groups.wrapped import WrappedGroup
from stretto.strategies import STRATEGIES
from tests.draws import EVERYTHING, draws
from tests.errors.test_failures import default_store, lanes_left, move_store_to_rank_0
from tests.errors.tiny import TinyJob
from tests.groups.nccl_like import NcclLikeGroup
from tests.processes import rank_outcomes

SILENT_SECONDS = 5.0
"""More than a busy machine keeps a process waiting."""
NEVER = 600.0
LONG = timedelta(seconds=60)
MARGIN_SECONDS = 5.0

HOW = ("kill", "stop", "silence")
WAYS = [("kill", False), ("kill", True), ("stop", False), ("silence", True)]
WAYS += [("stop", True), ("silence", False)] * EVERYTHING
WIRES = ("fp32", "bf16", "int8", "int4")
MOST_CALLS = 40
"""Collectives of the start and of some updates."""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """What happens to one rank of a job."""

    how: Literal["kill", "stop", "silence"]
    world_size: int
    victim: int
    call: int
    """Of its collectives, the one at which it happens."""
    has_begun: bool
    """Whether it happens after that one was started."""
    strategy: str
    wire: str
    is_nccl_like: bool
    keeps_store: bool
    """Whether the store ends with rank 0."""

    @property
    def limit_seconds(self) -> float:
        """After which the others may know at the earliest."""
        shows = not self.is_nccl_like or (
            self.keeps_store and self.victim == 0
        )  # something closes when it dies
        return 0.0 if self.how == "kill" and shows else SILENT_SECONDS

    @property
    def options(self) -> st.Options:
        """Where the time-out has to find it, nothing else may; where it must not, it comes too late."""
        waits_for = {"timeout_seconds": NEVER, "silent_seconds": NEVER}
        if self.limit_seconds:
            waits_for["timeout_seconds" if self.how == "silence" else "silent_seconds"] = SILENT_SECONDS
        return st.Options(bucket_bytes=64, wire=self.wire, **waits_for)


def drawn(seed: int, **chosen: Any) -> Strike:
    """A random strike."""
    rng = random.Random(seed)
    world_size = rng.randint(2, 4 if EVERYTHING else 3)
    values = {
        "how": rng.choice(HOW),
        "world_size": world_size,
        "victim": rng.randrange(world_size),
        "call": rng.randrange(MOST_CALLS),
        "has_begun": rng.random() < 0.5,
        "strategy": rng.choice(list(STRATEGIES)),
        "wire": rng.choice(WIRES),
        "is_nccl_like": rng.random() < 0.5,
        "keeps_store": rng.random() < 0.3,
    }
    return Strike(**values | chosen)


class Struck(WrappedGroup):
    """A group in which it happens."""

    may_wait_again = True

    def __init__(self, strike: Strike, shared: dist.Store) -> None:
        inner = (
            NcclLikeGroup() if strike.is_nccl_like else private_group(dist.group.WORLD, timeout_seconds=NEVER)
        )
        super().__init__(inner, None, "struck")
        self._strike = strike
        self._shared = shared
        self._calls = 0

    def private(self) -> "Struck":
        """Return another such group."""
        return Struck(self._strike, self._shared)

    def perform(self, call: Call) -> dist.Work:
        """Let the inner group perform it, and strike before or after."""
        is_now = self.rank() == self._strike.victim and self._calls == self._strike.call
        self._calls += 1
        if is_now and not self._strike.has_begun:
            self._happen()
        work = super().perform(call)
        if is_now and self._strike.has_begun:
            self._happen()
        return work

    def _happen(self) -> None:
        self._shared.set("struck", str(time.monotonic()))
        if self._strike.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._strike.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            self._shared.wait(over(self._strike), LONG)


def over(strike: Strike) -> list[str]:
    """What is in the store once every other rank has ended."""
    return [f"over/{rank}" for rank in range(strike.world_size) if rank != strike.victim]


def train(rank: int, strike: Strike) -> tuple[str, str, float, list[str]]:
    """Train until an error; return its kind, its text, the seconds since it happened, and lanes that have not ended."""
    shared = default_store()
    shared.set(f"process/{rank}", str(os.getpid()))
    shared.wait([f"process/{other}" for other in range(strike.world_size)], LONG)
    if strike.keeps_store:
        move_store_to_rank_0(rank, strike.world_size)
    found: tuple[str, str, float, list[str]] = ("nothing", "", 0.0, [])
    try:
        job = TinyJob(strike.strategy, group=Struck(strike, shared), options=strike.options)
        for _ in range(50 * MOST_CALLS):
            job.micro_batch()
    except st.StrettoError as error:
        seconds = time.monotonic() - float(shared.get("struck"))
        found = type(error).__name__, str(error), seconds, lanes_left()
    shared.set(f"over/{rank}", "")
    if rank != strike.victim:
        shared.wait(over(strike), LONG)
        if strike.how == "stop":
            os.kill(int(shared.get(f"process/{strike.victim}")), signal.SIGCONT)
    return found


def check(strike: Strike) -> None:
    """All others have ended in time and name the victim; where it lives, it ends too."""
    for outcome in rank_outcomes(strike.world_size, train, strike):
        is_victim = outcome.rank == strike.victim
        assert (outcome.error is None) == (not is_victim or strike.how != "kill"), (strike, outcome.error)
        if is_victim and strike.how != "silence":
            continue
        kind, text, seconds, lanes = (
            outcome.value
        )  # who comes back from a silence is told that it was waited for
        assert kind == ("PeerFailed" if strike.limit_seconds == 0 else "PeerSilent"), (strike, outcome.value)
        assert any(words in text for words in told(strike)), (strike, text)
        assert strike.how != "silence" or "raise Options(timeout_seconds=...)" in text, text
        assert lanes == [], strike
        assert is_victim or seconds < MARGIN_SECONDS + 1.2 * strike.limit_seconds, (strike, seconds)


def told(strike: Strike) -> list[str]:
    """Of these words a message holds one."""
    if strike.limit_seconds:
        incident = "no answer" if strike.how == "silence" else "no sign of life"
        return [f"{incident} for {SILENT_SECONDS:g} s from ranks [{strike.victim}]"]
    keeper = "the rank that keeps the store, usually rank 0, died"  # before the ranks have told who keeps it
    died = f"rank {strike.victim} died or closed its", f"rank {strike.victim}, which keeps the store, died"
    return [*died, *([keeper] if strike.keeps_store and strike.victim == 0 else [])]


KINDS: list[dict[str, Any]] = [
    {"how": "kill", "is_nccl_like": False, "keeps_store": True, "victim": 0},
    *({"how": how, "is_nccl_like": is_nccl_like} for how, is_nccl_like in WAYS),
]
STRIKES = [drawn(7 * seed + index, **kind) for index, kind in enumerate(KINDS) for seed in draws(3, 1)]


def test_whoever_is_struck_at_any_moment_is_named_by_all_others_in_time() -> None:
    with ThreadPoolExecutor(len(KINDS)) as pool:  # side by side, as all they do is wait
        list(pool.map(check, STRIKES))
