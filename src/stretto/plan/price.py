"""What an update of a strategy costs on a machine, by the virtual cluster: the code that would run, in virtual time.

Note [A small twin]
    A job's time depends on its parameters through bytes and through seconds per element. So a twin with a thousandth of
    the parameters, of the bucket size and of the link's rate takes the same virtual time, and next to no real time.
    Many ranks are scaled down alike: what each rank sends grows as (N - 1)/N, and its share of the optimizer falls as
    1/N. What grows with N and not with the model is left out: the round report, some hundred bytes per rank.

Note [Waiting for the slowest]
    Ranks that wait for each other take as long as the slowest of them, so what jitter costs grows with N. With n
    micro-batches per update and a uniform jitter j, the slowest of N ranks lags behind the mean by about
    z(N) j / sqrt(3 n), where z(N) is the expected maximum of N normal draws, and never by more than j. A twin of two
    ranks has the same lag if its jitter is z(N) / z(2) times as large. Strategies that overlap hide a part of it, there
    as in the job.
"""

import dataclasses
import math
import statistics
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from stretto.engine import Options
from stretto.errors import ConfigError
from stretto.flat import ALIGNMENT
from stretto.groups import Link
from stretto.parallel import DataParallel
from stretto.plan.measure import Machine
from stretto.strategies import Strategy
from stretto.strategies.ledger import ledger_of
from stretto.train.arms import Arm
from stretto.virtual import Compute, Network, VirtualCluster

_RANKS = 2
"""Ranks of a twin, at most."""
_PARAMETERS = 2**15
"""Elements of a twin, about."""
_TENSORS = 16
"""Parameters of a twin: gradients come evenly over a backward pass."""
_WARM_UP = 3
"""First updates, in which overlapping only begins."""
_UPDATES = 6
"""Updates that are counted; of strategies that send now and then, those of several intervals."""
_UPDATES_WITH_JITTER = 24
"""As many where there is jitter: a price is their mean. The draws are the same for all arms."""
_MOST_JITTER = 0.95
"""`Compute` refuses 1."""
_INTERVALS = 3
_UNPRICED = ("clock", "ranks_per_node")
"""Settings of an arm that change its time and that a twin does not have."""
_BUSY_CORES = 2.0
"""Cores per rank below which a communication lane takes its time from computing."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What a strategy costs, per update and rank."""

    arm: str
    """The strategy with its settings, as the command line takes it."""
    seconds: float
    """Of an update."""
    exposed_seconds: float
    """Of it, waiting for communication."""
    sent_bytes: float
    memory_bytes: float
    """Parameters, gradients, masters and an optimizer with two moments."""
    micro_batches: int
    """Per update and rank."""

    @property
    def seconds_per_micro_batch(self) -> float:
        """What decides the time to a number of samples."""
        return self.seconds / self.micro_batches


def price(arm: Arm, machine: Machine, *, micro_batches: int, bucket_bytes: int) -> Price:
    """Return what an arm costs on `machine`.

    Args:
        arm: A strategy of the library; what it sets goes before the other arguments.
        machine: What was measured, perhaps with other ranks or another link.
        micro_batches: Per rank and update, where the arm sets none.
        bucket_bytes: Of the job, where the arm sets none.

    Raises:
        ConfigError: Its workers are nodes, or it has a setting that nothing prices.
    """
    strategy = arm.strategy()
    micro_batches = arm.settings.get("micro_batches", micro_batches)
    ledger = ledger_of(strategy)
    if ledger.by_node:
        raise ConfigError(
            f"{arm.text}: a plan prices ranks that have a link each; expected worker=rank, or stretto simulate --nodes"
        )
    if unpriced := [name for name in _UNPRICED if name in arm.settings]:
        raise ConfigError(
            f"{arm.text}: a plan has no price for {' and '.join(unpriced)}; leave it out, or use stretto simulate"
        )
    twin = _Twin.of(machine, arm.settings.get("bucket_bytes", bucket_bytes))
    compute = dataclasses.replace(
        compute_of(arm, machine, micro_batches), jitter=_jitter_of_twin(machine, micro_batches)
    )
    cluster = VirtualCluster(twin.ranks, Network(link=twin.link), compute)
    options = Options(
        wire=arm.wire,
        changes=arm.settings.get("changes"),
        estimates=arm.settings.get("estimates"),
        bucket_bytes=twin.bucket_bytes,
        allow_unused=True,
    )
    updates = _WARM_UP + _counted(strategy, machine)

    def program(rank: int, group: dist.ProcessGroup) -> tuple[list[float], list[float], list[int]]:
        return twin.train(strategy, options, micro_batches, updates, group)

    ends, exposed, sent = cluster.run(program).values[0]
    counted = updates - _WARM_UP
    traffic = (sent[-1] - sent[_WARM_UP - 1]) / counted / twin.scale
    return Price(
        arm=arm.text,
        seconds=(ends[-1] - ends[_WARM_UP - 1]) / counted,
        exposed_seconds=statistics.fmean(exposed[_WARM_UP:]),
        sent_bytes=traffic * _share_sent(machine.ranks) / _share_sent(twin.ranks)
        if machine.ranks > 1
        else 0.0,
        memory_bytes=machine.parameters
        * ledger.memory_bytes(strategy, parameter=4, accumulation=4, world_size=machine.ranks),
        micro_batches=micro_batches,
    )


def compute_of(arm: Arm, machine: Machine, micro_batches: int) -> Compute:
    """Return what the work of an arm costs a rank of `machine`, in virtual time and without jitter."""
    strategy = arm.strategy()
    ledger = ledger_of(strategy)
    owned = 1.0 if ledger.replicated else 1.0 / machine.ranks
    lane_seconds = machine.exchange_seconds[arm.wire] + machine.step_seconds * owned
    compute_seconds = machine.micro_batch_seconds
    if machine.cores < _BUSY_CORES and strategy.overlaps:
        compute_seconds += lane_seconds * ledger.rounds / micro_batches
    return Compute(
        micro_batch_ns=_nanoseconds(max(compute_seconds, machine.load_seconds)),
        step_ns=_nanoseconds(lane_seconds),
        backward_share=machine.backward_seconds / machine.micro_batch_seconds,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Twin:
    """A job that takes the same virtual time."""

    ranks: int
    numel: int
    """Of each of its tensors."""
    bucket_bytes: int
    link: Link
    scale: float
    """Its elements over those of the job."""

    @classmethod
    def of(cls, machine: Machine, bucket_bytes: int) -> "_Twin":
        """Return the twin of a job."""
        ranks = min(machine.ranks, _RANKS)
        smallest = ranks * ALIGNMENT  # of a bucket
        buckets = max(1, math.ceil(machine.parameters * 4 / bucket_bytes))
        elements = min(machine.parameters, max(_PARAMETERS, buckets * smallest))
        numel = max(ALIGNMENT, elements // _TENSORS // ALIGNMENT * ALIGNMENT)
        scale = numel * _TENSORS / machine.parameters
        rate = machine.link.bits_per_second
        if rate is not None and machine.ranks > 1:
            rate *= scale * _share_sent(ranks) / _share_sent(machine.ranks)
        return cls(
            ranks=ranks,
            numel=numel,
            bucket_bytes=max(4 * smallest, round(bucket_bytes * scale)),
            link=dataclasses.replace(machine.link, bits_per_second=rate),
            scale=scale,
        )

    def train(
        self, strategy: Strategy, options: Options, micro_batches: int, updates: int, group: Any
    ) -> tuple[list[float], list[float], list[int]]:
        """Return, for each update, when it came, the seconds that it waited, and the bytes sent until then."""
        model = nn.ParameterList(nn.Parameter(torch.ones(self.numel)) for _ in range(_TENSORS))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        parallel = DataParallel(
            model, optimizer, strategy, micro_batches=micro_batches, group=group, options=options
        )
        ends: list[float] = []
        exposed: list[float] = []
        sent: list[int] = []
        while len(ends) < updates:
            loss: Tensor = torch.zeros(())
            for parameter in model:
                loss = loss + parameter.sum()
            if update := parallel.backward(loss):
                ends.append(group.now_ns / 1e9)
                exposed.append(update.exposed_seconds)
                sent.append(parallel.sent_bytes)
        parallel.finish()
        return ends, exposed, sent


def _counted(strategy: Strategy, machine: Machine) -> int:
    """Return how many updates to count."""
    interval: int = getattr(strategy, "interval", None) or round(1 / getattr(strategy, "rate", 1.0))
    return max(_UPDATES_WITH_JITTER if machine.jitter else _UPDATES, _INTERVALS * interval)


def _jitter_of_twin(machine: Machine, micro_batches: int) -> float:
    """Return the jitter with which two ranks wait as long as all of them would; see Note [Waiting for the slowest]."""
    growth = _expected_maximum(machine.ranks) / _expected_maximum(_RANKS)
    bound = math.sqrt(3 * micro_batches) / _expected_maximum(_RANKS)  # at which the lag is j
    return min(machine.jitter * min(growth, bound), _MOST_JITTER)


def _expected_maximum(draws: int) -> float:
    """Return that of `draws` normal draws, by Blom's approximation."""
    return statistics.NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25))


def _share_sent(ranks: int) -> float:
    """Return the part of a buffer that a rank sends to others."""
    return (ranks - 1) / ranks


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
