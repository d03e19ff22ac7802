"""An examination: every check on every rank, then the ranks' results side by side.

Results and the number of rounds travel through the group's store and not through its collectives, which are what is
examined.
"""

import dataclasses
import itertools
import json
import os
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore

from stretto.doctor.device import OPERATORS, Operator, Work, repeat, write_and_read
from stretto.doctor.report import Finding, Link, Report
from stretto.doctor.wire import COLLECTIVES, Flow, Tally, Wire
from stretto.errors import ConfigError
from stretto.faults import WIRE_SITES, Fault, FaultPlan, FaultyGroup, Injector
from stretto.groups import Link as Speed
from stretto.train.outcome import processor_name
from stretto.train.workers import Seat, seated

_SHARES = {"arithmetic": 0.4, "memory": 0.2, "collectives": 0.2, "links": 0.2}
"""Of the time."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """Is this machine's arithmetic, memory and network to be trusted?"""

    workers: int = 2
    """Local processes to start. Ranks that a launcher such as torchrun has started count instead."""
    seconds: float = 30.0
    """How long to look, about; more finds what is wrong more seldom."""
    memory_megabytes: int = 64
    """Memory that every rank writes and reads per device, in units of 2^20 bytes; it takes three times that."""
    link_megabytes: float = 4.0
    """Payload that is sent over every link at a time, in units of 2^20 bytes."""
    faults: tuple[Fault, ...] = ()
    """Damage done on purpose to what arrives, to rehearse: SITE:rank=R:..., as contribution:rank=1:lasts=sticky."""
    out: str | None = None
    """Folder for doctor.json; None writes no file."""
    timeout_seconds: float = 60.0
    """How long a rank may wait for another one."""

    def __post_init__(self) -> None:
        for field in ("workers", "seconds", "memory_megabytes", "link_megabytes", "timeout_seconds"):
            if not getattr(self, field) > 0:
                raise ConfigError(f"{field} must be positive, found {getattr(self, field)}")
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
    """Work to repeat."""
    disturb: Callable[[Tensor], None] | None = None
    """What happens to memory between writing and reading; for a rehearsal."""


def examine_seat(seat: Seat, examination: Examination) -> Report:
    """Examine this rank's devices and its links to the others; every rank of the job calls this.

    Raises:
        CommunicationError: The others cannot be joined.
    """
    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True
    count = torch.cuda.device_count()
    own = [torch.device("cuda", i) for i in range(seat.local_rank, count, seat.local_world_size)]
    cores = os.cpu_count() or 1
    subject = Subject(devices=[torch.device("cpu"), *own], threads=max(1, cores // seat.local_world_size))
    with seated(seat, Speed.parse("none"), torch.device("cpu"), examination.timeout_seconds):
        group = dist.group.WORLD
        if group is None:
            raise ConfigError("no default group: examine_seat joins the others by itself")
        plan = FaultPlan(examination.faults)
        struck = FaultyGroup(group, Injector(plan, seat.rank)) if plan.faults else group
        return examine(struck, subject, examination)


def examine(group: dist.ProcessGroup, subject: Subject, examination: Examination) -> Report:
    """Examine one rank of `group` among the others; all ranks must call, with equal settings."""
    session = _Session(group, examination)
    own = {
        "seat": f"host {platform.node()}",
        "works": [session.look_at_arithmetic(subject, device) for device in subject.devices],
        "memory": [session.look_at_memory(subject, device) for device in subject.devices],
        "collectives": session.look_at_collectives(),
        "links": session.look_at_links(),
    }
    records = [json.loads(text) for text in session.gather(json.dumps(own))]
    findings = [
        *_arithmetic([(rank, *work) for rank, record in enumerate(records) for work in record["works"]]),
        *(Finding.from_json(fields) for record in records for fields in record["memory"]),
        *(_collective(name, [record["collectives"][name] for record in records]) for name in COLLECTIVES),
        *(Finding.from_json(fields) for record in records for fields in record["links"]),
    ]
    return Report(seats=tuple(record["seat"] for record in records), findings=tuple(findings))


class _Session:
    """One rank's part, with its share of the time."""

    def __init__(self, group: dist.ProcessGroup, examination: Examination) -> None:
        self._wire = Wire(group)
        store = group.get_group_store()
        # The count of sessions over this store, the same on all ranks: what is said in one is not heard in the next.
        count = store.add(f"doctor/sessions/{group.rank()}", 1)
        self._store = PrefixStore(f"doctor/{count}", store)
        self._examination = examination

    def look_at_arithmetic(self, subject: Subject, device: torch.device) -> tuple[str, str, dict[str, Any]]:
        """Return host and device, what kind of device it is, and what became of every operator."""
        seconds = self._seconds("arithmetic") / len(subject.devices)
        threads = subject.threads if device.type == "cpu" else 1
        works = repeat(subject.operators, device, seconds, threads)
        kind = processor_name() if device.type == "cpu" else torch.cuda.get_device_name(device)
        return _place(device), kind, {name: dataclasses.asdict(work) for name, work in works.items()}

    def look_at_memory(self, subject: Subject, device: torch.device) -> dict[str, Any]:
        """Write and read a device's memory."""
        size = self._examination.memory_megabytes
        seconds = self._seconds("memory") / len(subject.devices)
        readback = write_and_read(device, size, seconds, subject.disturb)
        detail = f"{readback.passes} passes over {size} MiB"
        if readback.damaged_words:
            detail += f", {readback.damaged_words} words damaged; {readback.first}"
        is_sound = readback.damaged_words == 0
        return Finding(
            check="memory",
            rank=self._wire.rank,
            device=_place(device),
            is_sound=is_sound,
            detail=detail,
            suspects=() if is_sound else (self._wire.rank,),
        ).as_json()

    def look_at_links(self) -> list[dict[str, Any]]:
        """Send payloads to every other rank in turn, and return what became of those that came here."""
        flows: dict[int, Flow] = {}
        for index in self._rounds("links"):
            for distance in range(1, self._wire.world_size):
                self._wire.send_around(distance, self._examination.link_megabytes, index, flows)
        return [_flow(sender, self._wire.rank, flow).as_json() for sender, flow in sorted(flows.items())]

    def look_at_collectives(self) -> dict[str, Any]:
        """Run all collectives, round by round."""
        tallies = {name: Tally() for name in COLLECTIVES}
        for index in self._rounds("collectives"):
            self._wire.run_collectives(index, tallies)
        return {
            name: {**dataclasses.asdict(tally), "links": sorted(tally.links)}
            for name, tally in tallies.items()
        }

    def gather(self, text: str) -> list[str]:
        """Return every rank's text."""
        self._store.set(f"text/{self._wire.rank}", text)
        return [self._store.get(f"text/{rank}").decode() for rank in range(self._wire.world_size)]

    def _rounds(self, check: str) -> Iterator[int]:
        """Yield rounds until rank 0 finds that the time is up; the same on all ranks, at least one."""
        deadline = time.monotonic() + self._seconds(check)
        for index in itertools.count():
            key = f"{check}/{index}"
            if self._wire.rank == 0:
                goes_on = index == 0 or time.monotonic() < deadline
                self._store.set(key, "go on" if goes_on else "stop")
            if self._store.get(key) != b"go on":
                return
            yield index

    def _seconds(self, check: str) -> float:
        return _SHARES[check] * self._examination.seconds


def _place(device: torch.device) -> str:
    return f"host {platform.node()}, {device}"


def _arithmetic(rows: Sequence[tuple[int, str, str, dict[str, Any]]]) -> Iterator[Finding]:
    """Yield what each device's repeats say, and what devices of one kind say side by side."""
    alike: defaultdict[tuple[str, str], dict[tuple[int, str], str]] = defaultdict(dict)
    for rank, place, kind, works in rows:
        for name, fields in works.items():
            work = Work(**fields)
            alike[name, kind][rank, place] = work.digest
            yield _work(name, rank, place, work)
    for (name, kind), digests in alike.items():
        if len(digests) > 1:
            yield _side_by_side(name, kind, digests)


def _work(name: str, rank: int, place: str, work: Work) -> Finding:
    is_sound = work.differing == 0 and work.is_true is not False
    detail = f"{work.repeats} repeats with every core busy"
    if work.differing:
        detail += f", {work.differing} with other bits"
    if work.is_true is not None:
        detail += ", exact" if work.is_true else ", not the exact result"
    suspects = () if is_sound else (rank,)
    return Finding(check=name, rank=rank, device=place, is_sound=is_sound, detail=detail, suspects=suspects)


def _side_by_side(name: str, kind: str, digests: Mapping[tuple[int, str], str]) -> Finding:
    """Compare devices of one kind; whoever differs from most of them is named."""
    (most, count), *others = Counter(digests.values()).most_common()
    detail = f"{len(digests)} devices, {kind}: " + ("different bits" if others else "the same bits")
    suspects = sorted({rank for (rank, _), found in digests.items() if found != most})
    return Finding(
        check=f"{name} compared",
        is_sound=not others,
        detail=detail,
        suspects=tuple(suspects) if 2 * count > len(digests) else (),
    )


def _collective(name: str, tallies: Sequence[dict[str, Any]]) -> Finding:
    """Say what all ranks have seen of one collective; where a sum is wrong everywhere, nobody can be named."""
    struck = [rank for rank, tally in enumerate(tallies) if tally["damaged"]]
    links: list[Link] = [(sender, receiver) for tally in tallies for sender, receiver in tally["links"]]
    detail = f"{tallies[0]['rounds']} rounds on {len(tallies)} ranks"
    if struck:
        detail += f", damaged on rank {', '.join(map(str, struck))}"
    are_named = bool(struck) and not links and len(struck) < len(tallies)
    return Finding(
        check=name,
        is_sound=not struck,
        detail=detail,
        suspects=tuple(struck) if are_named else (),
        damaged_links=tuple(links),
    )


def _flow(sender: int, receiver: int, flow: Flow) -> Finding:
    rate = flow.bytes / flow.seconds / 1e6
    detail = f"{rate:,.1f} MB/s over {flow.bytes / 1e6:,.0f} MB"
    if flow.damaged:
        detail += f", {flow.damaged} payloads damaged"
    link = sender, receiver
    return Finding(
        check="link",
        link=link,
        megabytes_per_second=rate,
        is_sound=not flow.damaged,
        detail=detail,
        damaged_links=(link,) if flow.damaged else (),
    )
