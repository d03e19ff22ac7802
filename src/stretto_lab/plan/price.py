"""The cost of an update on a machine: the virtual cluster runs the strategy's own code in virtual time.

Note [Waiting for the slowest] Ranks that wait for each other take as long as the slowest of them, so what jitter costs
    grows with N. With n micro-batches per update and a uniform jitter j, the slowest of N ranks lags behind the mean by
    about z(N) j / sqrt(3 n), where z(N) is the expected maximum of N normal draws, and never by more than j. A twin of
    two ranks has the same lag if its jitter is z(N) / z(2) times as large. Strategies that overlap hide a part of the
    lag, in the twin as in the job.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from stretto.engine import Clock, Options
from stretto.errors import ConfigError
from stretto.exchange import WIRES
from stretto.flat import bucket_bytes_among
from stretto.strategies import Strategy
from stretto.strategies.ledger import Ledger, ledger_of
from stretto_lab.estimate.times import bytes_held
from stretto_lab.plan.measure import Machine
from stretto_lab.plan.twin import RANKS, Passed, Twin
from stretto_lab.train.arms import Arm
from stretto_lab.virtual import Compute, VirtualCluster

_WARM_UP = 3
"""Number of first updates, in which overlap only begins; they do not count."""
_UPDATES = 6
"""Number of counted updates; strategies that send rarely count several intervals."""
_UPDATES_WITH_JITTER = 24
"""Number of counted updates with jitter: a price is their mean. All arms have the same draws."""
_UPDATES_BY_CLOCK = 12
"""Number of counted updates by the clock, whose updates differ."""
_GUESSES = 2
"""Number of times that the micro-batches of an update are counted again if overlapped work slows them."""
_MOST_JITTER = 0.95
"""Largest jitter, since `Compute` refuses 1."""
_INTERVALS = 3
_BUSY_CORES = 2.0
"""Cores per rank below which a communication lane slows computing."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """The cost of a strategy, per update and rank."""

    arm: str
    """The strategy with its settings, as the command line writes it."""
    seconds: float
    """Seconds per update."""
    exposed_seconds: float
    """Seconds of these spent waiting for communication."""
    sent_bytes: float
    """Bytes to other ranks, including the ranks of the same node."""
    memory_bytes: float
    """Bytes of parameters, gradients, masters, an optimizer with two moments, and the wire's buffers."""
    micro_batches: float
    """Micro-batches per update and rank; by the clock a mean over ranks and updates."""

    @property
    def seconds_per_micro_batch(self) -> float:
        """Seconds per micro-batch, which decide the time to a number of samples."""
        return self.seconds / self.micro_batches


def price(arm: Arm, machine: Machine, *, micro_batches: int, bucket_bytes: int | None = None) -> Price:
    """Return the price of an arm on `machine`.

    Args:
        arm: A strategy of the library; its settings override the other arguments.
        machine: The measurements, perhaps with other ranks or another link.
        micro_batches: Number per rank and update, if the arm sets none.
        bucket_bytes: Bucket size, if the arm sets none; None is the default of the job's device and number of ranks.

    Raises:
        ConfigError: Its nodes differ from the machine's, or the planner cannot price one of its settings.
    """
    micro_batches = arm.settings.get("micro_batches", micro_batches)
    clock = arm.settings.get("clock") if arm.overlaps else None
    sent_bytes = int(machine.parameters * min(4.0, WIRES[arm.wire].bytes_per_value))
    usual = bucket_bytes_among(machine.ranks, machine.bucket_bytes, 4 * machine.parameters, sent_bytes)
    bucket_bytes = arm.settings.get("bucket_bytes", bucket_bytes) or usual
    if clock is None:
        return _priced(arm, machine, bucket_bytes, micro_batches, float(micro_batches))
    found = _priced(arm, machine, bucket_bytes, clock, clock.minimum * ledger_of(arm.strategy()).rounds)
    for _ in range(_GUESSES if machine.cores < _BUSY_CORES else 0):
        found = _priced(arm, machine, bucket_bytes, clock, found.micro_batches)
    return found


def _priced(arm: Arm, machine: Machine, bucket_bytes: int, quota: int | Clock, micro_batches: float) -> Price:
    """Return the price of an arm with `micro_batches` per rank and update, or about so many by the clock."""
    strategy = arm.strategy()
    ledger = ledger_of(strategy)
    twin = Twin.of(machine, bucket_bytes, by_node=_is_by_node(arm, machine))
    compute = dataclasses.replace(
        compute_of(arm, machine, micro_batches, twin.slowness),
        jitter=_jitter_of_twin(machine, twin, micro_batches),
    )
    options = Options(
        wire=arm.wire,
        changes=arm.settings.get("changes"),
        bucket_bytes=twin.bucket_bytes,
        ranks_per_node=twin.ranks_per_node or arm.settings.get("ranks_per_node"),
        allow_unused=True,
    )
    updates = _WARM_UP + _counted(strategy, machine, quota)
    cluster = VirtualCluster(twin.ranks, twin.network, compute)
    of_ranks = cluster.run(lambda rank, group: twin.train(strategy, options, quota, updates, group)).values
    first, last, counted = of_ranks[0][_WARM_UP - 1], of_ranks[0][-1], updates - _WARM_UP
    crossed = (last.crossed_bytes - first.crossed_bytes) / counted
    others = (last.sent_bytes - first.sent_bytes) / counted - crossed
    return Price(
        arm=arm.text,
        seconds=(last.seconds - first.seconds) / counted,
        exposed_seconds=twin.mean([_mean_exposed(passed[_WARM_UP:]) for passed in of_ranks]),
        sent_bytes=others / twin.scale_inside + crossed / twin.scale_across,
        memory_bytes=machine.parameters * bytes_held(strategy, arm.wire, _owners(ledger, machine)),
        micro_batches=quota if isinstance(quota, int) else _mean_count(twin, of_ranks[0][_WARM_UP:]),
    )


def _mean_exposed(passed: Sequence[Passed]) -> float:
    return statistics.fmean(one.exposed_seconds for one in passed)


def _mean_count(twin: Twin, passed: Sequence[Passed]) -> float:
    """Return the mean number of micro-batches per rank of the job and update."""
    return statistics.fmean(twin.mean(one.micro_batches) for one in passed)


def compute_of(arm: Arm, machine: Machine, micro_batches: float, slowness: Sequence[float] = ()) -> Compute:
    """Return the cost of an arm's work for a rank of `machine`, in virtual time and without jitter.

    Args:
        arm: The arm.
        machine: The measurements.
        micro_batches: Approximate number per rank and update.
        slowness: Factor on a micro-batch, by rank; all ranks have equally slow loaders.
    """
    strategy = arm.strategy()
    ledger = ledger_of(strategy)
    each = machine.ranks_per_node if _is_by_node(arm, machine) else 1
    owned = 1.0 if ledger.replicated else 1.0 / _owners(ledger, machine)
    plain, packed = machine.exchange_seconds["fp32"], machine.exchange_seconds[arm.wire]
    # On nodes a rank packs and unpacks the sums of its column; the other half, what owners publish, is all of it.
    exchange_seconds = plain + (packed - plain) * (1 + 1 / each) / 2
    if ledger.local:
        # It exchanges now and then; only the ranks of a node add up their gradients at every update, unpacked.
        exchange_seconds *= ledger.averages + ledger.outer_steps
        exchange_seconds += plain if ledger.by_node and each > 1 else 0.0
    lane_seconds = exchange_seconds + machine.step_seconds * owned
    compute_seconds = machine.micro_batch_seconds
    if machine.cores < _BUSY_CORES and strategy.overlaps:
        compute_seconds += lane_seconds * ledger.rounds / micro_batches
    period = max(compute_seconds, machine.load_seconds)
    return Compute(
        micro_batch_ns=_nanoseconds(period),
        step_ns=_nanoseconds(lane_seconds),
        slowness={
            rank: max(compute_seconds * factor, machine.load_seconds) / period
            for rank, factor in enumerate(slowness)
        },
        backward_share=machine.backward_seconds / machine.micro_batch_seconds,
    )


def _owners(ledger: Ledger, machine: Machine) -> int:
    """Return the number of ranks that share an optimizer that is not replicated."""
    return machine.ranks_per_node if ledger.by_node else machine.ranks


def _is_by_node(arm: Arm, machine: Machine) -> bool:
    """Return whether an arm sums inside nodes first.

    Raises:
        ConfigError: Its nodes differ from the machine's.
    """
    each = arm.settings.get("ranks_per_node")
    if each is None and ledger_of(arm.strategy()).by_node:
        raise ConfigError(
            f"{arm.text}: a worker that is a node: expected ranks_per_node={machine.ranks_per_node}"
        )
    if each not in (None, 1, machine.ranks_per_node):
        raise ConfigError(
            f"{arm.text}: a machine whose nodes have ranks_per_node={machine.ranks_per_node}: expected that, or to "
            f"measure ranks on nodes of {each}"
        )
    return each is not None and each > 1


def _counted(strategy: Strategy, machine: Machine, quota: int | Clock) -> int:
    """Return the number of updates to count."""
    ledger = ledger_of(strategy)
    interval = round(1 / (ledger.averages or ledger.outer_steps or 1.0))
    least = _UPDATES if isinstance(quota, int) else _UPDATES_BY_CLOCK
    return max(_UPDATES_WITH_JITTER if machine.jitter else least, _INTERVALS * interval)


def _jitter_of_twin(machine: Machine, twin: Twin, micro_batches: float) -> float:
    """Return the jitter with which a twin waits as long as all ranks would; see Note [Waiting for the slowest]."""
    of_twin = _expected_maximum(max(twin.slowest, RANKS))
    growth = _expected_maximum(max(twin.num_slowest, RANKS)) / of_twin
    bound = math.sqrt(3 * micro_batches) / of_twin  # at which the lag is j
    return min(machine.jitter * min(growth, bound), _MOST_JITTER)


def _expected_maximum(draws: int) -> float:
    """Return the expected maximum of `draws` normal draws, by Blom's approximation."""
    return statistics.NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
