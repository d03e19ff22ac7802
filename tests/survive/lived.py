"""Small jobs in processes that survive the loss of others, and the same jobs from the same state in fresh processes."""

import hashlib
import os
import signal
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import stretto as st
from experiments.numbered import Numbered
from stretto.errors import LeftOut
from stretto.groups.collectives import Call
from stretto.groups.private import part_of, private_group
from stretto.groups.wrapped import WrappedGroup
from stretto.survive import Term, survives
from stretto_lab.train.workers import host_store
from tests.processes import Outcome, rank_outcomes

LONG = timedelta(seconds=60)
SILENT_SECONDS = 8.0
SAMPLES = 4
"""Of a micro-batch."""
TOTAL = st.Total(7)
"""Micro-batches of all ranks together in an update: neither 2 nor 3 divides it."""


@dataclass(frozen=True, kw_only=True)
class Lived:
    """A job that loses ranks."""

    strategy: st.Strategy = field(default_factory=st.ZeRO1)
    wire: str = "fp32"
    guards: Any = ()
    ranks: int = 3
    shards: int = 1
    """Ranks of a node, among which FSDP2 shards the model."""
    whole_tensors: bool = False
    """Whether one of the optimizers steps whole tensors."""
    updates: int = 24
    every: int = 5
    killed: tuple[tuple[int, int], ...] = ()
    """Seat, and the collective of its jobs in which it is killed."""
    stopped: tuple[int, ...] = ()
    """Of these, seats that are stopped instead, until the others train without them; then they send 666."""
    again: int | None = None
    """Place for which another process comes once one of its jobs has been struck; of shards, the first of a node."""
    comes_late: bool = False
    """Whether that is only once the others have gone on."""
    host: tuple[int, signal.Signals, int] | None = None
    """Process that hosts the store, what rank 0 sends it, and after which update."""


def batch_of(number: int, shard: int = 0) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(number + 10**6 * shard))
    return inputs, inputs.sum(1, keepdim=True).sin()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.BatchNorm1d(9), nn.Linear(9, 1))


def in_shards(mesh: DeviceMesh) -> nn.Sequential:
    """A network whose rows do not divide, and of whose last layer only the first shard has one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 1))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Built:
    """What a process builds before it gives its name, and keeps from term to term; in shards, in each term."""

    def __init__(self, mesh: Mapping[str, DeviceMesh] | None = None, *, whole_tensors: bool = False) -> None:
        self.mesh = mesh
        self.model = network() if mesh is None else in_shards(mesh["shard"])
        parameters = list(self.model.parameters())
        self.optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer]
        self.optimizer = first = torch.optim.AdamW(parameters[whole_tensors:], lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(first, 7, 0.9)
        if whole_tensors:
            self.optimizer = [first, torch.optim.Muon(parameters[:1], lr=0.01)]


class Job:
    """One rank's, with all that it needs to go on."""

    def __init__(self, lived: Lived, group: dist.ProcessGroup, built: Built) -> None:
        self.model = built.model
        node, self.shard = divmod(group.rank(), lived.shards)
        self.samples = Numbered(node, group.size() // lived.shards, TOTAL)
        self.shards = lived.shards
        self.parallel = st.DataParallel(
            self.model,
            built.optimizer,
            lived.strategy,
            micro_batches=TOTAL,
            scheduler=built.scheduler,
            wire=lived.wire,
            guards=lived.guards,
            group=group,
            mesh=None if built.mesh is None else built.mesh["node"],
            options=st.Options(silent_seconds=SILENT_SECONDS, bucket_bytes=128),
        )

    def restored(self, restored: st.checkpoint.Restored | None) -> None:
        """Read on after what the state has had."""
        if restored is not None and len(restored.loader_states) != self.parallel.world_size:
            self.samples.deal(restored.loader_states[:: self.shards])

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return (self.model(inputs) - targets).square().mean()

    def train(self, updates: int, on_update: Any) -> str:
        with self.parallel:
            for number in self.parallel.feed(self.samples, updates=updates, on_update=on_update):
                self.parallel.micro_batch(self.loss, batch_of(number, self.shard))
            self.parallel.finish()
        return digest(self.model)


def digest(model: nn.Module) -> str:
    """Of all that ranks have in common: each counts its own batches (`num_batches_tracked`)."""
    state = model.state_dict().values()
    values = [value.full_tensor() if isinstance(value, DTensor) else value for value in state]
    values = [value for value in values if value.is_floating_point()]
    state = b"".join(value.numpy().tobytes() for value in values)
    return hashlib.sha1(state).hexdigest()


class Struck(WrappedGroup):
    """A group in one of whose collectives something happens to the process.

    Args:
        inner: Performs them.
        moments: Of the process: what happens, after so many collectives have begun.
    """

    may_wait_again = True

    def __init__(self, inner: dist.ProcessGroup, moments: "Moments") -> None:
        super().__init__(inner, None, "struck")
        self._moments = moments

    def private(self) -> "Struck":
        """Return another such group."""
        self._moments.passed()
        return Struck(private_group(self.inner), self._moments)

    def part(self, members: Sequence[int]) -> "Struck":
        """Return such a group of some of its ranks."""
        self._moments.passed()
        return Struck(part_of(self.inner, members), self._moments)

    def perform(self, call: Call) -> dist.Work:
        """Let the inner group begin it, and let happen what is due."""
        self._moments.spoil(call)
        work = super().perform(call)
        self._moments.passed()
        self._moments.spoil(call)
        return work


class Moments:
    """What happens to one process."""

    def __init__(self, lived: Lived, seat: int, store: dist.Store) -> None:
        self._at = dict(lived.killed).get(seat)
        self._signal = signal.SIGSTOP if seat in lived.stopped else signal.SIGKILL
        self._store, self._is_waited_for = store, lived.again is not None
        self._collectives = 0
        self.models: list[weakref.ref[nn.Module]] = []

    def watch(self, model: nn.Module) -> None:
        """Count every pass through a part of a model, forward and backward, as one more collective."""
        self.models.append(weakref.ref(model))

        def comes_back(_: nn.Module, inputs: Any, output: Tensor) -> None:
            output.register_hook(lambda _: self.passed())

        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: self.passed())
            module.register_forward_hook(comes_back)

    def passed(self) -> None:
        """One more collective has begun."""
        if self._collectives == self._at:
            if self._is_waited_for:
                self._store.set("struck", "")
            os.kill(os.getpid(), self._signal)
        self._collectives += 1

    def spoil(self, call: Call) -> None:
        """Let a process that has slept send other values."""
        if self._at is not None and self._collectives > self._at:
            for tensor in call.inputs:
                tensor.fill_(666 if tensor.is_floating_point() else 66)


@dataclass
class Told:
    """What one rank has seen in one term."""

    number: int
    seats: tuple[int, ...]
    step: int = 0
    """From which it went on."""
    begin: int = 0
    """The first sample that is left there."""
    given: list[int] = field(default_factory=list)
    counted: dict[int, int] = field(default_factory=dict)
    """Samples that all ranks counted, by update."""


def check_terms(found: dict[int, tuple[str, list[Told]]]) -> list[list[Told]]:
    """All that are in a term know the same members and the same state; return what they have told, by term."""
    by_number: dict[int, dict[int, Told]] = {}
    for rank, (_, terms) in found.items():
        for told in terms:
            by_number.setdefault(told.number, {})[rank] = told
    for terms in by_number.values():
        assert len({(told.seats, told.step, told.begin) for told in terms.values()}) == 1, by_number
        assert terms.keys() <= set(next(iter(terms.values())).seats)
    return [list(by_number[number].values()) for number in sorted(by_number)]


def check_samples(
    terms: list[list[Told]], strategy: st.Strategy, updates: int, samples: int = SAMPLES
) -> None:
    """Every sample counts once in what was kept: in the last term by numbers, in those before by their count."""
    counted = {step: samples for told in terms for step, samples in sorted(told[0].counted.items())}
    while len(terms) > 1 and not any(told.given for told in terms[-1]) and is_same_deal(*terms[-2:]):
        terms = terms[:-1]  # in the last one nothing was left to give
    last = terms[-1][0]
    total = sum(counted[step] for step in range(1, updates + 1))
    given = sorted(number for told in terms[-1] for number in told.given)
    begin = given[0] if given else last.begin  # as many ranks as before go on within their deal
    assert begin >= last.begin
    assert given == list(range(begin, begin + len(given))), given
    stepping_alone = st.LocalSGD | st.DiLoCo | st.Average  # whose updates count what one rank has stepped on
    if not isinstance(strategy, stepping_alone):
        assert total == samples * (begin + len(given)), counted


def is_same_deal(before: list[Told], after: list[Told]) -> bool:
    """Whether ranks went on within what had been dealt out to them before."""
    return before[0].begin == after[0].begin


def place_of(rank: int, lived: Lived, store: dist.Store) -> int:
    """The place for which a process is started, once it is time for it to come."""
    if rank < lived.ranks:
        return rank
    store.wait(["gone on" if lived.comes_late else "struck"], LONG)
    return rank - lived.ranks + (lived.again or 0)


def built_in(term: Term, lived: Lived, moments: Moments) -> Built:
    """What a process builds in every term, because its model is in shards."""
    moments.passed()
    meshes = term.meshes()
    assert [model for model in moments.models if model() is not None] == [], (
        "a model of a term before is still there"
    )
    built = Built(meshes, whole_tensors=lived.whole_tensors)
    moments.watch(built.model)
    return built


def live(rank: int, lived: Lived, port: int, folder: str | None) -> tuple[str, list[Told]]:
    """One rank's life; return the digest of its model, and what it has seen."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LONG)
    moments, whole = Moments(lived, rank, store), Built() if lived.shards == 1 else None
    terms: list[Told] = []
    place = place_of(rank, lived, store)

    def wake(seats: Iterable[int]) -> None:
        for seat in seats:
            with suppress(ProcessLookupError):  # it has woken, and ended
                os.kill(int(store.get(f"process/{seat}")), signal.SIGCONT)

    def train(term: Term) -> str:
        built = whole or built_in(term, lived, moments)
        job = Job(lived, Struck(term.group, moments), built)
        job.restored(restored := term.go_on(job.parallel, loader=job.samples))
        told = Told(term.number, term.seats, 0 if restored is None else restored.step, job.samples.begin)
        told.given = job.samples.given
        terms.append(told)

        def on_update(update: st.Update) -> None:
            told.counted[update.step] = update.samples
            if lived.comes_late and term.number:
                store.set("gone on", "")
            if lived.host is not None and (rank, update.step) == (0, lived.host[2]):
                os.kill(*lived.host[:2])
            if folder is not None and update.step % lived.every == 0:
                st.checkpoint.save(job.parallel, folder, loader=job.samples, keep=100)
            term.keep(job.parallel, loader=job.samples)
            wake(set(lived.stopped) - set(term.seats))

        return job.train(lived.updates, on_update)

    store.set(f"process/{rank}", str(os.getpid()))
    try:
        model = survives(
            train,
            store=store,
            rank=place,
            ranks=lived.ranks,
            every=lived.every,
            silent_seconds=SILENT_SECONDS,
            ranks_per_node=lived.shards,
        )
    except LeftOut as error:
        return str(error), terms
    finally:
        wake(lived.stopped)
        if lived.again is not None:  # else the store may be gone
            store.multi_set(["struck", "gone on"], ["", ""])
    return model, terms


def fresh(rank: int, lived: Lived, path: str | None) -> str:
    """The same from a checkpoint, in a process that knows nothing; return the digest of the model."""
    shape = dist.get_world_size() // lived.shards, lived.shards
    whole = init_device_mesh("cpu", shape, mesh_dim_names=("node", "shard"))
    mesh = None if lived.shards == 1 else {"node": whole["node"], "shard": whole["shard"]}
    job = Job(lived, dist.group.WORLD, Built(mesh, whole_tensors=lived.whole_tensors))
    job.restored(None if path is None else st.checkpoint.load(job.parallel, path, loader=job.samples))
    return job.train(lived.updates, lambda _: None)


def lives(lived: Lived, folder: str | None = None) -> list[Outcome]:
    """What became of every rank."""
    store = host_store("127.0.0.1", 0)
    processes = lived.ranks + (0 if lived.again is None else lived.shards)
    return rank_outcomes(processes, live, lived, store.port, folder, backend=None)
