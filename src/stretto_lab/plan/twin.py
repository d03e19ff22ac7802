"""A small job that takes as much virtual time as a large one.

Note [A small twin]
    A job's time depends on its parameters through bytes and through seconds per element. So a twin with a thousandth of
    the parameters, of the bucket size and of the link's rate takes the same virtual time, and next to no real time.
    Many ranks are scaled down alike: what each rank sends grows as (N - 1)/N, and its share of the optimizer falls as
    1/N. What grows with N and not with the model is skipped: the round report, some hundred bytes per rank.
    Nodes of several ranks become two nodes of two ranks, whose links are scaled each by what crosses it.

Note [Ranks that are not equally fast]
    Ranks that are about as fast are one class, and a twin has a rank of every class, of the slowest one two. With
    fixed counts the slowest class decides how long a round takes, so it is as slow as the slowest of its ranks. By
    the clock every class contributes in proportion to its size and speed, so every other class has the mean speed of
    its ranks.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto.engine import Clock, Options
from stretto.flat import ALIGNMENT
from stretto.groups import Link
from stretto.parallel import DataParallel
from stretto.strategies import Strategy
from stretto_lab.plan.measure import Machine
from stretto_lab.virtual import Network, Uplink

RANKS = 2
"""Number of nodes of a twin, and of ranks per node, if all ranks are equally fast."""
_PARAMETERS = 2**15
"""Approximate number of elements of a twin."""
_TENSORS = 16
"""Number of parameters of a twin, so that gradients come evenly during a backward pass."""
_CLASSES = 4
"""Largest number of classes of ranks."""
_AS_FAST = 1.05
"""Ratio of two ranks' times up to which they are in one class."""


class Passed(NamedTuple):
    """The counts of a twin after an update."""

    seconds: float
    exposed_seconds: float
    """Exposed seconds of this update."""
    sent_bytes: int
    """Bytes sent since the start."""
    crossed_bytes: int
    """Bytes of these that sums and gathers sent between nodes, with two levels."""
    micro_batches: tuple[int, ...]
    """Micro-batches in this update, by rank."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Twin:
    """A small job that takes the same virtual time."""

    ranks: int
    ranks_per_node: int | None
    """Ranks per node if the job has two levels."""
    numel: int
    """Elements in each of its tensors."""
    bucket_bytes: int
    network: Network
    scale_inside: float
    """Bytes that a rank of the twin sends per byte of a rank of the job: to all others, or with two levels inside its
    node."""
    scale_across: float
    """The same ratio for the bytes sent to other nodes, with two levels."""
    slowness: tuple[float, ...]
    """By rank: factor on the machine's time for a micro-batch."""
    stands_for: tuple[float, ...]
    """By rank of the twin: the number of the job's ranks that it represents."""
    slowest: int
    """Number of ranks that are as slow as the slowest one."""
    num_slowest: int
    """Number of the job's ranks that are as slow as the slowest one."""

    def mean(self, values: Sequence[float]) -> float:
        """Return the mean over the job's ranks, from one value for each rank of the twin."""
        weighted = [value * ranks for value, ranks in zip(values, self.stands_for, strict=True)]
        return sum(weighted) / sum(self.stands_for)

    @classmethod
    def of(cls, machine: Machine, bucket_bytes: int, *, by_node: bool) -> "Twin":
        each, nodes = machine.ranks_per_node, max(1, machine.ranks // machine.ranks_per_node)
        classes = _classes(machine)
        twin_each, twin_nodes = min(each, RANKS), len(classes) if each == 1 else min(nodes, RANKS)
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
            slowness=tuple(one.slowness for one in classes),
            stands_for=tuple(one.ranks for one in classes),
            slowest=sum(one.slowness == classes[-1].slowness for one in classes),
            num_slowest=round(sum(one.ranks for one in classes if one.slowness == classes[-1].slowness)),
        )

    def train(
        self, strategy: Strategy, options: Options, quota: int | Clock, updates: int, group: Any
    ) -> list[Passed]:
        """Train the twin, and return its counts after each update."""
        model = nn.ParameterList(nn.Parameter(torch.ones(self.numel)) for _ in range(_TENSORS))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        parallel = DataParallel(model, optimizer, strategy, micro_batches=quota, group=group, options=options)
        passed: list[Passed] = []
        own = 1.0 + group.rank()  # ranks do not read the same batches
        while len(passed) < updates:
            loss: Tensor = torch.zeros(())
            for parameter in model:
                loss = loss + own * parameter.sum()
            if update := parallel.backward(loss):
                crossed_bytes = parallel.job.exchange.crossed_bytes
                passed.append(
                    Passed(
                        group.now_ns / 1e9,
                        update.exposed_seconds,
                        parallel.sent_bytes,
                        crossed_bytes,
                        update.micro_batches,
                    )
                )
        parallel.finish()
        return passed


class _Class(NamedTuple):
    """A group of the job's ranks that one rank of the twin represents."""

    slowness: float
    ranks: float


def _classes(machine: Machine) -> list[_Class]:
    """Return the ranks that each rank of a twin represents, the fastest first; see Note [Ranks that are not equally
    fast].

    On nodes all ranks are as slow as the slowest.
    """
    factors = sorted(machine.slowness or (1.0,) * machine.ranks)
    if machine.ranks_per_node > 1:
        count = RANKS * min(RANKS, machine.ranks // machine.ranks_per_node)
        return [_Class(factors[-1], machine.ranks / count)] * count
    num_slowest = sum(one * _AS_FAST >= factors[-1] for one in factors)
    others = factors[:-num_slowest]
    # Whole runs of ranks that are about as fast, or equally many of them where there would be too many.
    groups: list[list[float]] = []
    for one in others:
        if groups and one <= groups[-1][0] * _AS_FAST:
            groups[-1].append(one)
        else:
            groups.append([one])
    if len(groups) >= _CLASSES:
        cuts = [index * len(others) // (_CLASSES - 1) for index in range(_CLASSES)]
        groups = [others[begin:end] for begin, end in itertools.pairwise(cuts)]
    count = min(RANKS, num_slowest)
    return [
        *(_Class(statistics.harmonic_mean(group), len(group)) for group in groups),
        *[_Class(factors[-1], num_slowest / count)] * count,
    ]


def _crossing(nodes: int, each: int, by_node: bool) -> float:
    """Return how many buffers a node's ranks send to other nodes in a sum and a gather.

    On one level a sum is an all-to-all, and a gather is a ring that passes every slice through one rank of each node.
    """
    if by_node:
        return 2 * (1 - 1 / nodes)
    return each * (1 - 1 / nodes) + _share_sent(nodes * each)


def _inside(nodes: int, each: int, by_node: bool) -> float:
    """Return how many buffers a rank sends inside its node in a sum and a gather.

    On one level these are its part of the all-to-all, and the ring's slices if its neighbour is in the same node.
    """
    if by_node:
        return 2 * _share_sent(each)
    return _share_sent(each) / nodes + _share_sent(nodes * each)


def _network(inside: Link, across: Link, nodes: int, each: int) -> Network:
    """Return a network of nodes: ranks reach each other over `inside`, and share `across` towards other nodes."""
    if each == 1:
        return Network(link=across)
    ranks = [tuple(range(node * each, (node + 1) * each)) for node in range(nodes)]
    return Network(
        link=inside, uplinks=tuple(Uplink(ranks=of_node, link=across, direct=True) for of_node in ranks)
    )


def _scaled(link: Link, factor: float) -> Link:
    rate = link.bits_per_second
    return dataclasses.replace(link, bits_per_second=None if rate is None else rate * factor)


def _share_sent(ranks: int) -> float:
    """Return the part of a buffer that a rank sends to others."""
    return (ranks - 1) / ranks
