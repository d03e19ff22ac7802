"""The numbers that decide how long an update takes, measured on the ranks of a job.

Note [What is measured where] The planner times micro-batches and the optimizer while all ranks compute, as in training.
    It times the two parts of an exchange separately: a single rank's work for every wire (packing, sums, norms, copies,
    the round report), and the link, on which it sends bytes that no code reads. A test with one bucket shows how the
    cost of packing depends on the number of ranks. All this takes seconds, and changes a model that is then dropped.
"""

import dataclasses
import math
import socket
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor
from torch import distributed as dist

from stretto.engine import Options
from stretto.engine.failures import BACKEND_MARGIN_SECONDS, FailureDetector, Lifetime
from stretto.engine.round import Progress
from stretto.errors import ConfigError
from stretto.exchange import PackedWire, wire_by_name
from stretto.flat import ALIGNMENT, shard_of, usual_bucket_bytes
from stretto.groups import Link, SoloGroup, private_group
from stretto.groups.collectives import method_of
from stretto.machine import share_of_cores, usable_cores
from stretto.parallel import DataParallel
from stretto.strategies import ZeRO1
from stretto_lab.evidence import OF_WIRES
from stretto_lab.observe import Stages
from stretto_lab.recipes import Task
from stretto_lab.train.configuration import Job, TaskT
from stretto_lab.train.shards import placed
from stretto_lab.train.state import slowed
from stretto_lab.train.workers import RankInfo, choose_device, joined_group

WIRES = tuple(OF_WIRES)
"""Wires with almost no cost in loss."""
_WARM_UP = 2
"""Number of first repeats that every measurement skips: memory is new."""
_EXCHANGES = 4
"""Number of updates that a single rank times for each wire."""
_ROUND_TRIPS = 10
_LINK_SECONDS = 0.3
"""Shortest transfer, in seconds, that is long enough to measure the link's rate."""
_AT_ONCE = 8
"""Number of collectives in progress together, like the buckets of a job. A single one uses Gloo's links in one
direction at a time, and takes up to twice as long."""
_LARGEST_TRANSFER = 2**25
"""Largest transfer in bytes, to bound memory; longer measurements repeat it."""
_MOST_TRANSFERS = 2**12
"""Most repeats of a transfer: 2**37 bytes in all, which take 0.1 s at ten times the rate of today's fastest links
between devices."""
_MOST_CORES = 1024
"""Most cores in a Linux set of cores."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The times of one rank's work, and the link to the other ranks."""

    ranks: int
    parameters: int
    """Trainable parameters."""
    forward_seconds: float
    """Seconds of one micro-batch's forward pass."""
    backward_seconds: float
    """Seconds of one micro-batch's backward pass."""
    load_seconds: float
    """Seconds in which the loader makes the next micro-batch, if nothing else is done."""
    step_seconds: float
    """Seconds of an optimizer step over all parameters."""
    exchange_seconds: dict[str, float]
    """By wire: seconds of a whole exchange on a single rank or node, without the optimizer and the link."""
    link: Link
    """The link of every rank, or of every node, to the others: in each direction, while all ranks send."""
    cores: float
    """Processor cores per rank; infinite if a device computes."""
    jitter: float = 0.0
    """A micro-batch takes up to this share more or less than the mean; all times between are equally likely."""
    ranks_per_node: int = 1
    """Number of consecutive ranks that share the link of their node."""
    inside: Link = dataclasses.field(default_factory=Link)
    """The link of every rank to the other ranks of its node: in each direction, while all send."""
    bucket_bytes: int = usual_bucket_bytes(torch.device("cpu"))
    """The default size of buckets on the machine's devices."""
    slowness: tuple[float, ...] = ()
    """By rank: factor on all times except the loader's; empty if all ranks are equally fast."""
    packing_seconds: Mapping[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    """By number of ranks and by wire: seconds of packing and unpacking, which `exchange_seconds` includes."""
    shards: int = 1
    """Ranks that hold one model together. If there are several, all other fields are per node: the number of nodes, and
    the times, sizes and bytes of one rank, which exchanges with the ranks of the same shard."""

    @property
    def micro_batch_seconds(self) -> float:
        """Seconds of one micro-batch's forward and backward pass."""
        return self.forward_seconds + self.backward_seconds

    @property
    def slowest(self) -> float:
        """Factor on all times for the slowest rank."""
        return max(self.slowness, default=1.0)

    def with_ranks(self, ranks: int, slow: Mapping[int, float]) -> Self:
        """Return the machine with as many ranks, some of them slower than measured.

        Additional ranks are as slow as the slowest measured one.
        """
        measured = self.slowness if len(self.slowness) == ranks else (self.slowest,) * ranks
        factors = [factor * slow.get(rank, 1.0) for rank, factor in enumerate(measured)]
        here, there = (self.packing_seconds.get(number, {}) for number in (self.ranks, ranks))
        return dataclasses.replace(
            self,
            ranks=ranks,
            slowness=tuple(factors) if max(factors) != 1 else (),
            exchange_seconds={
                wire: max(0.0, seconds + there.get(wire, 0.0) - here.get(wire, 0.0))
                for wire, seconds in self.exchange_seconds.items()
            },
        )


class Ranks:
    """All ranks of the default process group, on a private group; an error on one rank reaches the others.

    Args:
        device: The device of the tensors that ranks exchange.
        options: The time limits of waits.
    """

    def __init__(self, device: torch.device, options: Options) -> None:
        self.group = private_group(timeout_seconds=options.timeout_seconds + BACKEND_MARGIN_SECONDS)
        self.device = device
        self._failures = FailureDetector(
            self.group,
            device,
            timeout_seconds=options.timeout_seconds,
            silent_seconds=options.silent_seconds,
            progress=Progress(),
        )
        self._lifetime = Lifetime(self._failures, leave=lambda waits: None)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Report an error in the block to the other ranks; the group is unusable afterwards."""
        with self._lifetime.running():
            yield
        self._lifetime.finish()

    def gather(self, values: Sequence[float]) -> Tensor:
        """Return the values of every rank, `(world_size, len(values))`, in float64; waits for all of them.

        Raises:
            CommunicationError: Another rank does not answer.
        """
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        whole = own.new_empty(self.group.size() * len(values))
        self._failures.wait(method_of(self.group, "all_gather_single")(whole, own), "times of all ranks")
        return whole.view(-1, len(values)).cpu()

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds that `work` takes, including the device's part."""
        return _seconds(work, self.device)

    def send(self, outgoing: Sequence[Tensor], to: Sequence[int], times: int = 1) -> None:
        """Send an equal part of each tensor to each rank of `to`, all at once; these ranks do the same.

        Args:
            outgoing: The bytes to send; received bytes are not read.
            to: This rank and others.
            times: How often.

        Raises:
            CommunicationError: Another rank does not answer.
        """
        part = outgoing[0].numel() // len(to)
        splits = [part * (rank in to) for rank in range(self.group.size())]
        arrives = [torch.empty_like(one) for one in outgoing]
        works = [
            method_of(self.group, "all_to_all_single")(to_here, one, splits, splits)
            for _ in range(times)
            for to_here, one in zip(arrives, outgoing, strict=True)
        ]
        for work in works:
            self._failures.wait(work, "measurement of the link")


def measure(info: RankInfo, job: Job[TaskT], batches: int, numbers: Sequence[int] = ()) -> Machine:
    """Measure on all ranks, and return the times; every rank calls it with equal settings.

    Args:
        info: Which rank this is.
        job: The recipe and the link.
        batches: Micro-batches to time.
        numbers: Numbers of ranks to plan for.

    Raises:
        ConfigError: The recipe has no loss that trains, or its loader ends too soon.
        CommunicationError: Another rank has failed, or does not answer.
    """
    torch.set_num_threads(1)
    device = choose_device(job.device, info)
    with (
        Stages(is_shown=info.rank == 0) as stages,
        joined_group(info, Link.parse(job.link), device, job.timeout_seconds),
    ):
        stages.begin("building the model")
        task = job.task.build(info.rank, info.world_size, job.seed, None)
        placed(task, job, device)
        slow = dataclasses.replace(task, loader=slowed(job, task.loader, info.rank))
        ranks = Ranks(device, job.options)
        with ranks.together():
            return measure_task(
                ranks,
                slow,
                batches,
                job.ranks_per_node or info.local_world_size,
                stages,
                shards=job.shard,
                numbers=numbers,
            )


def measure_task(
    ranks: Ranks,
    task: Task,
    batches: int,
    ranks_per_node: int,
    stages: Stages,
    *,
    shards: int = 1,
    numbers: Sequence[int] = (),
) -> Machine:
    """Measure a task on all ranks, and return the times; changes the task's model. All ranks must call it.

    Args:
        ranks: The ranks; the model is on their device.
        task: This rank's task; its loader, model, loss and optimizer are used.
        batches: Micro-batches to time.
        ranks_per_node: Ranks of this rank's node. Nodes count if there are several, all with the same number of ranks.
        stages: Shows the current measurement.
        shards: Ranks that hold the model together, as `train.shards.placed` has split it; they then are the node.
        numbers: Numbers of ranks to plan for; packing is measured for these, too.

    Raises:
        ConfigError: The loader ends too soon.
        CommunicationError: Another rank does not answer.
    """
    device = ranks.device
    stages.begin("measuring the loader", batches + _WARM_UP)
    fresh = list(stages.counted(islice(_timed(task.loader), batches + _WARM_UP)))
    if len(fresh) <= _WARM_UP:
        raise ConfigError(
            f"plan: expected more than {_WARM_UP} micro-batches from the loader, found {len(fresh)}"
        )
    world_size = ranks.group.size()
    each = _agreed_ranks_per_node(ranks, ranks_per_node) if shards == 1 else 1
    stages.begin("measuring the link")
    if shards == 1:
        inside, link = measure_links(ranks, each)
    else:
        inside, link = Link(), measure_link(ranks, range(ranks.group.rank() % shards, world_size, shards))
    timed = stages.through("measuring micro-batches", fresh)
    passes = [_passes(task, batch, device) for batch, _ in timed][_WARM_UP:]
    alone = _alone(device, shards)
    exchanges = {
        wire: _exchange_seconds(task, fresh[0][0], wire, device, alone)
        for wire in stages.through("measuring exchanges on each wire", WIRES)
    }
    stages.begin("measuring the optimizer")
    step_seconds = _step_seconds(task, fresh[0][0], device)
    parameters = sum(shard_of(p)[0].numel() for p in task.model.parameters() if p.requires_grad)
    packing = {
        number: {wire: _packing_seconds(wire, number, parameters, device) for wire in WIRES}
        for number in sorted({1, world_size // shards, *(one // shards for one in numbers)})
    }
    own = Machine(
        ranks=1,  # whose exchange was measured
        parameters=parameters,
        forward_seconds=statistics.median(forward for forward, _ in passes),
        backward_seconds=statistics.median(backward for _, backward in passes),
        load_seconds=statistics.fmean(seconds for _, seconds in fresh[_WARM_UP:]),
        step_seconds=step_seconds,
        exchange_seconds={wire: max(0.0, taken - step_seconds) for wire, taken in exchanges.items()},
        link=link,
        cores=float("inf") if device.type != "cpu" else _own_cores(ranks),
        bucket_bytes=usual_bucket_bytes(device),
        jitter=_jitter([sum(one) for one in passes]),
        ranks_per_node=each,
        inside=inside,
        packing_seconds=packing,
        shards=shards,
    ).with_ranks(world_size // shards, {})
    return _of_all(ranks, own, min(sum(one) for one in passes))


def _agreed_ranks_per_node(ranks: Ranks, own: int) -> int:
    """Return the number of ranks per node; 1 if there are no separate nodes."""
    world_size = ranks.group.size()
    is_even = bool((ranks.gather([own]) == own).all()) and world_size % own == 0
    return own if is_even and own < world_size else 1


def _own_cores(ranks: Ranks) -> float:
    """Return the number of this rank's cores; each rank may be bound to some, as by Slurm, or all may share them."""
    own = {core % _MOST_CORES for core in usable_cores()}
    host = float(zlib.crc32(socket.gethostname().encode()))
    of_all = ranks.gather([host, *(float(core in own) for core in range(_MOST_CORES))])
    same_host = of_all[of_all[:, 0] == host, 1:]
    return share_of_cores(own, [row.nonzero().flatten().tolist() for row in same_host])


def _of_all(ranks: Ranks, own: Machine, least_seconds: float) -> Machine:
    """Return one machine for all ranks, so that they plan alike; for links and loaders, the slowest rank decides.

    Args:
        ranks: All of them.
        own: This rank's measurements.
        least_seconds: The shortest of its micro-batches.
    """
    links = [
        number
        for link in (own.link, own.inside)
        for number in (1 / (link.bits_per_second or math.inf), link.latency_seconds)
    ]
    work = [own.forward_seconds, own.backward_seconds, own.step_seconds, *own.exchange_seconds.values()]
    of_ranks = ranks.gather([least_seconds, own.jitter, *work, own.load_seconds, *links, -own.cores])
    # Ranks of shards wait for each other in every pass.
    rows = of_ranks.view(own.ranks, own.shards, -1).amax(1)
    slowness, longest = by_speed(rows[:, 0], rows[:, 2 : 2 + len(work)])
    forward, backward, step, *exchanges = longest.tolist()
    load, per_bit, latency, per_bit_inside, latency_inside, cores = rows[:, -6:].amax(0).tolist()
    return dataclasses.replace(
        own,
        forward_seconds=forward,
        backward_seconds=backward,
        load_seconds=load,
        step_seconds=step,
        exchange_seconds=dict(zip(own.exchange_seconds, exchanges, strict=True)),
        link=Link(bits_per_second=1 / per_bit if per_bit else None, latency_seconds=latency),
        inside=Link(
            bits_per_second=1 / per_bit_inside if per_bit_inside else None, latency_seconds=latency_inside
        ),
        cores=-cores,
        jitter=rows[:, 1].mean().item(),  # few draws: their mean is nearer to the truth than their maximum
        slowness=tuple(slowness.tolist()) if slowness.max() > 1 else (),
    )


def by_speed(least: Tensor, work: Tensor) -> tuple[Tensor, Tensor]:
    """Return how slow each rank is, and the longest time of each kind of work, divided by the speed of the measuring
    rank.

    A disturbance only lengthens a time, so the shortest micro-batch shows how slow a rank is.

    Args:
        least: Seconds of the shortest micro-batch, by rank.
        work: Seconds, by rank and kind.
    """
    slowness = least / least.min()
    return slowness, (work / slowness[:, None]).amax(0)


def measure_links(ranks: Ranks, ranks_per_node: int) -> tuple[Link, Link]:
    """Return the link between ranks of a node, and the link between nodes; all ranks must call it."""
    world_size, rank, each = ranks.group.size(), ranks.group.rank(), ranks_per_node
    if each == 1:
        return Link(), measure_link(ranks, range(world_size))
    first = rank // each * each
    inside = measure_link(ranks, range(first, first + each))
    between = measure_link(ranks, range(rank % each, world_size, each))
    # All ranks of a node have sent at once.
    return inside, dataclasses.replace(between, bits_per_second=each * (between.bits_per_second or math.inf))


def measure_link(ranks: Ranks, to: Sequence[int]) -> Link:
    """Return the link between this rank and some others while all send; all ranks must call it.

    The latency is the one-way time of the smallest message. The rate comes from all transfers that take long enough.
    Where a transfer takes less than twice the latency, the rate is uncertain: it is then more likely too low.

    Args:
        ranks: All ranks.
        to: This rank and its receivers; as many on every rank.
    """
    if len(to) == 1:
        return Link()

    def seconds(numel: int, times: int = 1, at_once: int = _AT_ONCE) -> float:
        outgoing = [
            torch.zeros(len(to) * numel // at_once, dtype=torch.uint8, device=ranks.device)
            for _ in range(at_once)
        ]
        return ranks.seconds(lambda: ranks.send(outgoing, to, times))

    def longest(numel: int, times: int) -> float:
        return ranks.gather([seconds(numel, times)]).max().item()  # all ranks send equally much

    latency = statistics.median(seconds(1, at_once=1) for _ in range(_ROUND_TRIPS))
    numel, times = 2**14, 1
    while (taken := longest(numel, times)) < _LINK_SECONDS and times < _MOST_TRANSFERS:
        if numel * (len(to) - 1) < _LARGEST_TRANSFER:
            numel *= 4
        else:
            times *= 4
    sending = max(taken - latency, taken / 2)  # all are under way together
    bits = 8 * times * numel * (len(to) - 1)
    return Link(bits_per_second=bits / sending if sending else None, latency_seconds=latency)


def _timed(loader: Any) -> Iterator[tuple[Any, float]]:
    """Yield the loader's batches, epoch after epoch, with the seconds of each."""
    gives = True
    while gives:
        gives = False
        batches, started = iter(loader), time.perf_counter()
        for batch in batches:
            gives = True
            yield batch, time.perf_counter() - started
            started = time.perf_counter()


def _passes(task: Task, batch: Any, device: torch.device) -> tuple[float, float]:
    """Return the seconds of a forward and a backward pass."""
    losses: list[Tensor] = []
    forward = _seconds(lambda: losses.append(task.loss(task.model, batch).value), device)
    return forward, _seconds(losses[0].backward, device)


def _jitter(taken: list[float]) -> float:
    """Return `Machine.jitter` from the spread of `taken`, in seconds; 0 where there is only one."""
    return math.sqrt(3) * statistics.stdev(taken) / statistics.fmean(taken) if len(taken) > 1 else 0.0


def _alone(device: torch.device, shards: int) -> dict[str, Any]:
    """Return the arguments for a job of a single rank, or of a single node of shards; all ranks must call it."""
    if shards == 1:
        return {"group": SoloGroup()}
    from torch.distributed.device_mesh import init_device_mesh  # as in `placed`

    mesh = init_device_mesh(device.type, (dist.get_world_size(), 1), mesh_dim_names=("rank", "alone"))
    return {"mesh": mesh["alone"]}


def _exchange_seconds(
    task: Task, batch: Any, wire: str, device: torch.device, alone: Mapping[str, Any]
) -> float:
    """Return the seconds for which an update keeps the communication lane of a single rank or node busy."""
    task.optimizer.zero_grad()
    parallel = DataParallel(
        task.model, task.optimizer, ZeRO1(), options=Options(wire=wire, allow_unused=True), **alone
    )
    taken = []
    for _ in range(_WARM_UP + _EXCHANGES):
        update = parallel.backward(task.loss(task.model, batch).value)
        taken.append(0.0 if update is None else update.lane_seconds)
        _await(device)  # so that the next update knows the times of this one
    parallel.finish()
    return statistics.median(taken[_WARM_UP:])


def _packing_seconds(name: str, ranks: int, parameters: int, device: torch.device) -> float:
    """Return the seconds for packing and unpacking in an update: sums for and from all ranks, and the owners' changes.

    Every bucket costs as much as a bucket of random values.
    """
    wire = wire_by_name(name).of(torch.float32)
    if not isinstance(wire, PackedWire):
        return 0.0
    part = -(-min(parameters, usual_bucket_bytes(device) // 4) // (ranks * ALIGNMENT)) * ALIGNMENT
    values = torch.randn(ranks * part, device=device)
    content = torch.empty(wire.num_bytes(ranks * part), dtype=torch.uint8, device=device)
    to_all, own = wire.drawn("sums", 0, *[0] * ranks), wire.drawn("changes", 0, 0)
    of_all = [wire.drawn(stream, 0, *range(ranks)) for stream in ("sums", "changes")]

    def bucket() -> None:
        to_all.write(values, content)
        own.write(values[:part], content[: len(content) // ranks])
        for drawn in of_all:
            drawn.read(content)

    taken = [_seconds(bucket, device) for _ in range(_WARM_UP + _EXCHANGES)][_WARM_UP:]
    return statistics.median(taken) * math.ceil(parameters / (ranks * part))


def _step_seconds(task: Task, batch: Any, device: torch.device) -> float:
    """Return the seconds of an optimizer step over all parameters."""
    task.loss(task.model, batch).value.backward()
    return statistics.median(
        [_seconds(task.optimizer.step, device) for _ in range(_WARM_UP + _EXCHANGES)][_WARM_UP:]
    )


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    _await(device)
    return time.perf_counter() - started


def _await(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
