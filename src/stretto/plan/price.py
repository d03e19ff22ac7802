"""What an update of a strategy costs on a machine, by the virtual cluster: the code that would run, in virtual time.

Note [A small twin]
    A job's time depends on its parameters through bytes and through seconds per element. So a twin with a thousandth of
    the parameters, of the bucket size and of the link's rate takes the same virtual time, and next to no real time.
    Many ranks are scaled down alike: what each rank sends grows as (N - 1)/N, and its share of the optimizer falls as
    1/N. What grows with N and not with the model is left out: the round report, some hundred bytes per rank.
    Nodes of several ranks become two nodes of two ranks, whose links are scaled each by what crosses it.

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
from typing import Any, NamedTuple

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
from stretto.strategies.ledger import Ledger, ledger_of
from stretto.train.arms import Arm
from stretto.virtual import Compute, Network, Uplink, VirtualCluster

_RANKS = 2
"""Nodes of a twin, and ranks of each, at most."""
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
    """To other ranks, those of its node among them."""
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
        ConfigError: Its nodes are not those of the machine, or it has a setting that nothing prices.
    """
    strategy = arm.strategy()
    micro_batches = arm.settings.get("micro_batches", micro_batches)
    ledger = ledger_of(strategy)
    if "clock" in arm.settings:
        raise ConfigError(f"{arm.text}: a plan has no price for clock; leave it out, or use stretto simulate")
    twin = _Twin.of(
        machine, arm.settings.get("bucket_bytes", bucket_bytes), by_node=_is_by_node(arm, machine)
    )
    compute = dataclasses.replace(
        compute_of(arm, machine, micro_batches), jitter=_jitter_of_twin(machine, twin.ranks, micro_batches)
    )
    cluster = VirtualCluster(twin.ranks, twin.network, compute)
    options = Options(
        wire=arm.wire,
        changes=arm.settings.get("changes"),
        estimates=arm.settings.get("estimates"),
        bucket_bytes=twin.bucket_bytes,
        exchange=arm.settings.get("exchange", "auto"),
        ranks_per_node=twin.ranks_per_node or arm.settings.get("ranks_per_node"),
        allow_unused=True,
    )
    updates = _WARM_UP + _counted(strategy, machine)

    def program(rank: int, group: dist.ProcessGroup) -> list[_Passed]:
        return twin.train(strategy, options, micro_batches, updates, group)

    passed = cluster.run(program).values[0]
    first, last, counted = passed[_WARM_UP - 1], passed[-1], updates - _WARM_UP
    crossed = (last.crossed_bytes - first.crossed_bytes) / counted
    others = (last.sent_bytes - first.sent_bytes) / counted - crossed
    return Price(
        arm=arm.text,
        seconds=(last.seconds - first.seconds) / counted,
        exposed_seconds=statistics.fmean(one.exposed_seconds for one in passed[_WARM_UP:]),
        sent_bytes=others / twin.scale_inside + crossed / twin.scale_across,
        memory_bytes=machine.parameters
        * ledger.memory_bytes(strategy, parameter=4, accumulation=4, world_size=_owners(ledger, machine)),
        micro_batches=micro_batches,
    )


def compute_of(arm: Arm, machine: Machine, micro_batches: int) -> Compute:
    """Return what the work of an arm costs a rank of `machine`, in virtual time and without jitter."""
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
    return Compute(
        micro_batch_ns=_nanoseconds(max(compute_seconds, machine.load_seconds)),
        step_ns=_nanoseconds(lane_seconds),
        backward_share=machine.backward_seconds / machine.micro_batch_seconds,
    )


def _owners(ledger: Ledger, machine: Machine) -> int:
    """Return how many ranks share an optimizer that is not replicated."""
    return machine.ranks_per_node if ledger.by_node else machine.ranks


def _is_by_node(arm: Arm, machine: Machine) -> bool:
    """Return whether an arm adds up inside nodes first.

    Raises:
        ConfigError: Its nodes are not those of the machine.
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


class _Passed(NamedTuple):
    """Where a twin stands when an update has come."""

    seconds: float
    exposed_seconds: float
    """Of this update."""
    sent_bytes: int
    """Since the beginning."""
    crossed_bytes: int
    """Of them, sums and gathers between nodes, where there are two levels."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Twin:
    """A job that takes the same virtual time."""

    ranks: int
    ranks_per_node: int | None
    """Of two levels."""
    numel: int
    """Of each of its tensors."""
    bucket_bytes: int
    network: Network
    scale_inside: float
    """What a rank sends, over what a rank of the job sends: to all others, or with two levels inside its node."""
    scale_across: float
    """With two levels: what it sends to other nodes, over what a rank of the job does."""

    @classmethod
    def of(cls, machine: Machine, bucket_bytes: int, *, by_node: bool) -> "_Twin":
        """Return the twin of a job."""
        each, nodes = machine.ranks_per_node, max(1, machine.ranks // machine.ranks_per_node)
        twin_each, twin_nodes = min(each, _RANKS), min(nodes, _RANKS)
        ranks = twin_each * twin_nodes
        smallest = ranks * ALIGNMENT  # of a bucket
        buckets = max(1, math.ceil(machine.parameters * 4 / bucket_bytes))
        elements = min(machine.parameters, max(_PARAMETERS, buckets * smallest))
        numel = max(ALIGNMENT, elements // _TENSORS // ALIGNMENT * ALIGNMENT)
        scale = numel * _TENSORS / machine.parameters
        node_sends = scale
        if nodes > 1:
            node_sends *= _crossing(twin_nodes, twin_each, by_node) / _crossing(nodes, each, by_node)
        pair, of_job = (twin_each, each) if by_node else (ranks, machine.ranks)
        rank_sends = scale if of_job == 1 else scale * _share_sent(pair) / _share_sent(of_job)
        own = (
            scale
            if each == 1
            else scale * _inside(twin_nodes, twin_each, by_node) / _inside(nodes, each, by_node)
        )
        return cls(
            ranks=ranks,
            ranks_per_node=twin_each if by_node else None,
            numel=numel,
            bucket_bytes=max(4 * smallest, round(bucket_bytes * scale)),
            network=_network(
                _scaled(machine.inside, own), _scaled(machine.link, node_sends), twin_nodes, twin_each
            ),
            scale_inside=rank_sends,
            scale_across=node_sends * each / twin_each,
        )

    def train(
        self, strategy: Strategy, options: Options, micro_batches: int, updates: int, group: Any
    ) -> list[_Passed]:
        """Return what has passed, for each update."""
        model = nn.ParameterList(nn.Parameter(torch.ones(self.numel)) for _ in range(_TENSORS))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        parallel = DataParallel(
            model, optimizer, strategy, micro_batches=micro_batches, group=group, options=options
        )
        passed: list[_Passed] = []
        while len(passed) < updates:
            loss: Tensor = torch.zeros(())
            for parameter in model:
                loss = loss + parameter.sum()
            if update := parallel.backward(loss):
                crossed_bytes = parallel.job.exchange.crossed_bytes
                passed.append(
                    _Passed(group.now_ns / 1e9, update.exposed_seconds, parallel.sent_bytes, crossed_bytes)
                )
        parallel.finish()
        return passed


def _crossing(nodes: int, each: int, by_node: bool) -> float:
    """Return what a node's ranks send to others in a sum and a gather, in buffers' worth.

    On one level a sum is an all-to-all, and a gather a ring that passes every slice on through one rank of each node.
    """
    if by_node:
        return 2 * (1 - 1 / nodes)
    return each * (1 - 1 / nodes) + _share_sent(nodes * each)


def _inside(nodes: int, each: int, by_node: bool) -> float:
    """Return what a rank sends inside its node in a sum and a gather, in buffers' worth.

    On one level: its part of the all-to-all, and as a rank whose neighbour in the ring is of its node.
    """
    if by_node:
        return 2 * _share_sent(each)
    return _share_sent(each) / nodes + _share_sent(nodes * each)


def _network(inside: Link, across: Link, nodes: int, each: int) -> Network:
    """Return that of nodes whose ranks reach each other over `inside`, and share `across` towards other nodes."""
    if each == 1:
        return Network(link=across)
    ranks = [tuple(range(node * each, (node + 1) * each)) for node in range(nodes)]
    return Network(
        link=inside, uplinks=tuple(Uplink(ranks=of_node, link=across, direct=True) for of_node in ranks)
    )


def _scaled(link: Link, factor: float) -> Link:
    rate = link.bits_per_second
    return dataclasses.replace(link, bits_per_second=None if rate is None else rate * factor)


def _counted(strategy: Strategy, machine: Machine) -> int:
    """Return how many updates to count."""
    interval: int = getattr(strategy, "interval", None) or round(1 / getattr(strategy, "rate", 1.0))
    return max(_UPDATES_WITH_JITTER if machine.jitter else _UPDATES, _INTERVALS * interval)


def _jitter_of_twin(machine: Machine, ranks: int, micro_batches: int) -> float:
    """Return the jitter with which `ranks` wait as long as all would; see Note [Waiting for the slowest]."""
    of_twin = _expected_maximum(max(ranks, _RANKS))
    growth = _expected_maximum(machine.ranks) / of_twin
    bound = math.sqrt(3 * micro_batches) / of_twin  # at which the lag is j
    return min(machine.jitter * min(growth, bound), _MOST_JITTER)


def _expected_maximum(draws: int) -> float:
    """Return that of `draws` normal draws, by Blom's approximation."""
    return statistics.NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25))


def _share_sent(ranks: int) -> float:
    """Return the part of a buffer that a rank sends to others."""
    return (ranks - 1) / ranks


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
