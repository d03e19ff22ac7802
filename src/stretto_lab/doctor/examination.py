"""An examination: every rank checks its devices and its links, then the results of all ranks are put together.

Results travel through the group's store, and so does the word whether to go on: the collectives are what is examined.
"""

import dataclasses
import itertools
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore

from stretto.errors import ConfigError
from stretto.fields import check_fields
from stretto.groups import Link
from stretto.machine import processor_name, share_of_cores, usable_cores
from stretto.packed import pack, unpack
from stretto_lab.doctor.device import (
    LARGE_OPERATORS,
    OPERATORS,
    MemoryResult,
    Operator,
    OperatorResult,
    repeat,
    write_and_read,
)
from stretto_lab.doctor.network import COLLECTIVES, CollectiveResult, LinkResult, Network
from stretto_lab.doctor.report import Finding, Report
from stretto_lab.faults import WIRE_SITES, Fault, FaultPlan, FaultyGroup, Injector
from stretto_lab.observe import Stages
from stretto_lab.train.workers import RankInfo, device_of, joined_group

_HOST_MEGABYTES = 64
_DEVICE_MEGABYTES = 2**13
"""At most: operations on CUDA count up to 2^31 elements, and this has 2^30 words."""
_TIME_SHARES = {"arithmetic": 0.4, "memory": 0.2, "collectives": 0.2, "links": 0.2}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """Is this machine's arithmetic, memory and network to be trusted?"""

    workers: int = 2
    """Local processes to start. Ranks that a launcher such as torchrun has started count instead."""
    seconds: float = 30.0
    """How long to look, about. A longer look finds rarer faults."""
    memory_megabytes: int | None = None
    """Memory that every rank writes and reads per device, in units of 2^20 bytes; it takes three times that. None is 64
    of the host's, and a quarter of what is free of a device, 8 GiB at most."""
    link_megabytes: float = 4.0
    """Payload that is sent over every link at a time, in units of 2^20 bytes."""
    faults: tuple[Fault, ...] = ()
    """Damage done on purpose to what arrives, to rehearse: SITE:rank=R:..., as contribution:rank=1:lasts=sticky."""
    out: str | None = None
    """Folder for doctor.json; None writes no file."""
    timeout_seconds: float = 60.0
    """How long a rank may wait for another one."""

    def __post_init__(self) -> None:
        check_fields(self)
        for field in ("workers", "seconds", "memory_megabytes", "link_megabytes", "timeout_seconds"):
            if (value := getattr(self, field)) is not None and not value > 0:
                raise ConfigError(f"{field} must be positive, found {value}")
        if inside := [fault.site for fault in self.faults if fault.site not in WIRE_SITES]:
            raise ConfigError(
                f"a fault in {inside[0]} has no job to strike here: expected one of {', '.join(WIRE_SITES)}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is examined on one rank."""

    devices: Sequence[torch.device]
    threads: int
    """Threads that keep the host's cores busy."""
    operators: Mapping[str, Operator] = dataclasses.field(default_factory=lambda: OPERATORS)
    """Work to repeat on the host."""
    large_operators: Mapping[str, Operator] = dataclasses.field(default_factory=lambda: LARGE_OPERATORS)
    """Work to repeat on other devices."""
    between_devices: Network | None = None
    """Collectives and links between devices; None where not every rank has one of its own."""
    disturb: Callable[[Tensor], None] | None = None
    """What happens to memory between writing and reading; for a rehearsal."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _DeviceResult:
    """What one rank has found out about one of its devices."""

    place: str
    """Host and device."""
    kind: str
    """Model of the device: devices of one kind give the same bits."""
    operators: dict[str, OperatorResult]
    memory: MemoryResult


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _RankResult:
    """What one rank has found out."""

    host: str
    devices: list[_DeviceResult]
    collectives: dict[str, CollectiveResult]
    links: dict[str, dict[int, LinkResult]]
    """By network and sender."""

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "_RankResult":
        """Return the result of which `dataclasses.asdict` made `fields`."""
        return cls(
            host=fields["host"],
            devices=[
                _DeviceResult(
                    **{
                        **device,
                        "operators": {name: OperatorResult(**op) for name, op in device["operators"].items()},
                        "memory": MemoryResult(**device["memory"]),
                    }
                )
                for device in fields["devices"]
            ],
            collectives={name: CollectiveResult(**one) for name, one in fields["collectives"].items()},
            links={
                name: {sender: LinkResult(**one) for sender, one in links.items()}
                for name, links in fields["links"].items()
            },
        )


def examine_rank(info: RankInfo, examination: Examination) -> Report:
    """Examine this rank's devices and its links to the others; every rank of the job calls this.

    Raises:
        CommunicationError: The others cannot be joined.
    """
    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True
    # Sums in bfloat16 are not exact.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    count = torch.cuda.device_count()
    own = [torch.device("cuda", i) for i in range(info.local_rank, count, info.local_world_size)]
    with (
        Stages("doctor", is_shown=info.rank == 0) as stages,
        joined_group(info, Link.parse("none"), torch.device("cpu"), examination.timeout_seconds),
    ):
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("expected a default group, which `joined_group` makes")
        plan = FaultPlan(examination.faults)
        struck = FaultyGroup(group, Injector(plan, info.rank)) if plan.faults else group
        subject = Subject(
            devices=[torch.device("cpu"), *own],
            threads=_threads(_Meeting(group)),
            between_devices=_between_devices(info),
        )
        return examine(struck, subject, examination, stages)


def _between_devices(info: RankInfo) -> Network | None:
    """Return the ranks' devices as NCCL joins them, where each has one; machines are expected to be alike."""
    device = device_of("auto", info.local_rank, info.local_world_size)
    if device.type != "cuda" or info.world_size == 1:
        return None
    torch.cuda.set_device(device)
    return Network(dist.new_group(backend="nccl"), device)


def _threads(meeting: "_Meeting") -> int:
    """Return how many threads keep this rank's cores busy, beside those of the other ranks of the machine."""
    host, own = platform.node(), sorted(usable_cores())
    of_all = meeting.gather([host, own])
    return max(1, round(share_of_cores(own, [cores for place, cores in of_all if place == host])))


def examine(
    group: dist.ProcessGroup, subject: Subject, examination: Examination, stages: Stages | None = None
) -> Report:
    """Examine one rank of `group` among the others; all ranks must call, with equal settings.

    Args:
        group: Of all ranks.
        subject: What is examined on this rank.
        examination: How long, and how much.
        stages: Are told what is looked at; None tells nobody.
    """
    stages = stages or Stages("doctor", is_shown=False)
    meeting = _Meeting(group)
    networks = {"": Network(group, torch.device("cpu"))}
    if subject.between_devices is not None:
        networks[" over NCCL"] = subject.between_devices
    seconds = {check: share * examination.seconds for check, share in _TIME_SHARES.items()}
    devices = [_examine_device(device, subject, examination, seconds, stages) for device in subject.devices]
    collectives: dict[str, CollectiveResult] = {}
    links: dict[str, dict[int, LinkResult]] = {}
    for over, network in networks.items():
        of_network = {name: CollectiveResult() for name in COLLECTIVES}
        stages.begin(f"looking at collectives{over}", seconds=seconds["collectives"] / len(networks))
        for index in meeting.rounds(f"collectives{over}", seconds["collectives"] / len(networks)):
            network.check_collectives(index, of_network)
        collectives |= {f"{name}{over}": result for name, result in of_network.items()}
        links[over] = {}
        stages.begin(f"looking at links{over}", seconds=seconds["links"] / len(networks))
        for index in meeting.rounds(f"links{over}", seconds["links"] / len(networks)):
            network.check_links(examination.link_megabytes, index, links[over])
    stages.begin("comparing what all ranks have found")
    own = _RankResult(host=platform.node(), devices=devices, collectives=collectives, links=links)
    results = [_RankResult.of(fields) for fields in meeting.gather(dataclasses.asdict(own))]
    findings = [
        *_judge_arithmetic(results),
        *_judge_memory(results),
        *(_judge_collective(name, [result.collectives[name] for result in results]) for name in collectives),
        *_judge_links(results),
    ]
    return Report(hosts=tuple(result.host for result in results), findings=tuple(findings))


def _examine_device(
    device: torch.device,
    subject: Subject,
    examination: Examination,
    seconds: Mapping[str, float],
    stages: Stages,
) -> _DeviceResult:
    share = 1 / len(subject.devices)
    is_cpu = device.type == "cpu"
    threads = subject.threads if is_cpu else 1
    both = share * (seconds["arithmetic"] + seconds["memory"])
    stages.begin(f"looking at arithmetic and memory of {device}", seconds=both)
    return _DeviceResult(
        place=f"host {platform.node()}, {device}",
        kind=processor_name() if is_cpu else torch.cuda.get_device_name(device),
        operators=repeat(
            subject.operators if is_cpu else subject.large_operators,
            device,
            share * seconds["arithmetic"],
            threads,
        ),
        memory=write_and_read(
            device,
            examination.memory_megabytes or _megabytes_of(device),
            share * seconds["memory"],
            subject.disturb,
        ),
    )


def _megabytes_of(device: torch.device) -> int:
    """Return how long a buffer is of which three fit into what is free."""
    if device.type == "cpu":
        return _HOST_MEGABYTES
    return min(_DEVICE_MEGABYTES, torch.cuda.mem_get_info(device)[0] // 2**22)


class _Meeting:
    """Where the ranks of one examination agree and exchange results: the group's store."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._world_size = group.rank(), group.size()
        store = group.get_group_store()
        # Examinations over this store, counted by every rank: what is said in one is not heard in the next.
        count = store.add(f"doctor/count/{self._rank}", 1)
        self._store = PrefixStore(f"doctor/{count}", store)

    def rounds(self, check: str, seconds: float) -> Iterator[int]:
        """Yield rounds until rank 0 finds that the time is up: at least one, and the same on all ranks."""
        deadline = time.monotonic() + seconds
        for index in itertools.count():
            key = f"{check}/{index}"
            if self._rank == 0:
                goes_on = index == 0 or time.monotonic() < deadline
                self._store.set(key, "go on" if goes_on else "stop")
            if self._store.get(key) != b"go on":
                return
            yield index

    def gather(self, result: Any) -> list[Any]:
        """Return what every rank has found."""
        self._store.set(f"result/{self._rank}", pack(result, "a result").hex())
        texts = [self._store.get(f"result/{rank}").decode() for rank in range(self._world_size)]
        return [unpack(bytes.fromhex(text), "a rank's result") for text in texts]


def _judge_arithmetic(results: Sequence[_RankResult]) -> Iterator[Finding]:
    """Yield what each device's repeats say, and what devices of one kind say side by side."""
    digests: defaultdict[tuple[str, str], dict[tuple[int, str], str]] = defaultdict(dict)
    for rank, device in _devices(results):
        for name, found in device.operators.items():
            digests[name, device.kind][rank, device.place] = found.digest
            yield _judge_operator(name, rank, device.place, found)
    for (name, kind), by_device in digests.items():
        if len(by_device) > 1:
            yield _compare_devices(name, kind, by_device)


def _devices(results: Sequence[_RankResult]) -> Iterator[tuple[int, _DeviceResult]]:
    for rank, result in enumerate(results):
        for device in result.devices:
            yield rank, device


def _judge_operator(name: str, rank: int, place: str, found: OperatorResult) -> Finding:
    passed = found.differing == 0 and found.is_exact is not False
    detail = f"{found.repeats} repeats with every core busy"
    if found.differing:
        detail += f", {found.differing} with other bits"
    if found.is_exact is not None:
        detail += ", exact" if found.is_exact else ", not the exact result"
    suspects = () if passed else (rank,)
    return Finding(check=name, rank=rank, device=place, passed=passed, detail=detail, suspects=suspects)


def _compare_devices(name: str, kind: str, digests: Mapping[tuple[int, str], str]) -> Finding:
    """Compare devices of one kind. Where most of them agree, the others are named."""
    (most, count), *others = Counter(digests.values()).most_common()
    suspects = sorted({rank for (rank, _), found in digests.items() if found != most})
    return Finding(
        check=f"{name} compared",
        passed=not others,
        detail=f"{len(digests)} devices, {kind}: " + ("different bits" if others else "the same bits"),
        suspects=tuple(suspects) if 2 * count > len(digests) else (),
    )


def _judge_memory(results: Sequence[_RankResult]) -> Iterator[Finding]:
    for rank, device in _devices(results):
        found = device.memory
        passed = found.damaged_words == 0
        detail = f"{found.passes} passes over {found.megabytes} MiB"
        if not passed:
            detail += f", {found.damaged_words} words damaged; {found.first}"
        suspects = () if passed else (rank,)
        yield Finding(
            check="memory", rank=rank, device=device.place, passed=passed, detail=detail, suspects=suspects
        )


def _judge_collective(name: str, results: Sequence[CollectiveResult]) -> Finding:
    """Put together what all ranks have seen of one collective. A sum that is wrong on every rank names nobody."""
    struck = [rank for rank, result in enumerate(results) if result.damaged]
    links = [link for result in results for link in sorted(result.links)]
    detail = f"{results[0].rounds} rounds on {len(results)} ranks"
    if struck:
        detail += f", damaged on rank {', '.join(map(str, struck))}"
    are_named = bool(struck) and not links and len(struck) < len(results)
    return Finding(
        check=name,
        passed=not struck,
        detail=detail,
        suspects=tuple(struck) if are_named else (),
        damaged_links=tuple(links),
    )


def _judge_links(results: Sequence[_RankResult]) -> Iterator[Finding]:
    for receiver, over, sender, found in (
        (receiver, over, sender, found)
        for receiver, result in enumerate(results)
        for over, links in result.links.items()
        for sender, found in sorted(links.items())
    ):
        rate = 8 * found.bytes / found.seconds / 1e6
        detail = f"{rate:,.1f} Mbit/s over {found.bytes / 1e6:,.0f} MB"
        if found.damaged:
            detail += f", {found.damaged} payloads damaged"
        link = sender, receiver
        yield Finding(
            check=f"link{over}",
            link=link,
            megabits_per_second=rate,
            passed=not found.damaged,
            detail=detail,
            damaged_links=(link,) if found.damaged else (),
        )
