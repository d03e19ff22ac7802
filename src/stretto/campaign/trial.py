"""A trial: one job of a campaign, struck or clean, on virtual ranks or real ones.

Recipes at a size at which thousands of jobs can be run.

Large enough that every rank's share of a bucket fills more than one row of sums (32 KiB), so that damage beyond
mending can be drawn; a job of three ranks takes about a tenth of a second.

A trial: one job of a campaign on one rank, struck or not, and what that rank saw of it.

Where trials take place: on ranks of the virtual cluster, or on real workers that meet over Gloo.

Clean twins: what becomes of a job that nothing strikes, and how often it could have been struck.

Clean rounds: jobs that nothing strikes, in which guards have nothing to say.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed as dist

from stretto.campaign.drawing import CAMPAIGNED, RANKS, Drawn
from stretto.checksums import digest
from stretto.engine import Options
from stretto.errors import ConformanceFailed, CorruptionError, StrettoError
from stretto.faults import Application, Fault, FaultPlan, FaultyGroup, Injector, strike_memory
from stretto.faults.plan import SITES, Site
from stretto.groups import Link
from stretto.guards import GUARDS, Audit, Guard
from stretto.parallel import DataParallel
from stretto.recipes import DigitsResNet, StdlibGPT, TaskConfig
from stretto.records import Incident, Update
from stretto.strategies import STRATEGIES
from stretto.strategies.ledger import ledger_of
from stretto.train.workers import Seat, seated
from stretto.virtual import VirtualCluster


def small(task: TaskConfig) -> TaskConfig:
    """Return `task` at the size that a campaign trains it at; a recipe that is not known here stays as it is."""
    match task:
        case StdlibGPT():
            # A hundred kilobytes of text are read and ordered at once.
            data = dataclasses.replace(task.data, megabytes=0.1)
            task = dataclasses.replace(task, layers=1, width=64, heads=1, context=8, batch=1)
            return dataclasses.replace(task, data=data, evaluation_windows=4)
        case DigitsResNet():
            return dataclasses.replace(task, batch=2)
        case _:
            return task


BUCKET_BYTES = 2**18
"""Of the jobs: several buckets, and more than a row of sums in a rank's share of most."""
_SITES: tuple[Site, ...] = SITES  # type: ignore[assignment]  # the same words, without their type
_NEVER = 10**9
PATIENCE_SECONDS = 10.0
"""How long a real worker waits for another one: a guarded job that waited longer has broken a promise. What a rank that
has failed alone left the others waiting for ends by itself, and torch's groups end only when nothing waits."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One job."""

    task: TaskConfig
    """What is trained."""
    strategy: str
    """By its name."""
    is_guarded: bool
    """Whether it has all guards that apply and a verified exchange, or neither."""
    audit: Audit | None = None
    """What audits it beside these."""
    seed: int
    """Of the task."""
    fault: Fault | None = None
    """What strikes it."""
    updates: int = 4
    """Committed updates before the drain."""
    micro_batches: int = 2
    """Per rank and update."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Seen:
    """What one rank saw of a job."""

    applications: tuple[Application, ...] = ()
    """What the fault did on this rank."""
    opportunities: dict[Site, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """How often each site could have been struck, by the end of the job's making and by the end of the job."""
    incidents: tuple[Incident, ...] = ()
    """In the order of updates."""
    rounds: int = 0
    """Exchanges behind the last update."""
    parameters: int | None = None
    """Digest of the final parameters, where the job came to its end."""
    loss: float | None = None
    """Held-out, at these."""
    error: str | None = None
    """Class and message of what ended the job."""
    ended_at: int = 0
    """The update that was under way then, from 1."""
    names_damage: bool = False
    """Whether the error is of the kind that speaks of damage."""
    ranks: tuple[int, ...] = ()
    """Whom the error names."""
    links: tuple[tuple[int, int], ...] = ()
    """Which links it names, sender and receiver."""


def try_on_rank(group: dist.ProcessGroup, trial: Trial, seen: Seen) -> None:
    """Run the job on this rank of `group`, and write into `seen` what becomes of it.

    Nothing is raised: without guards damage may end a job with any error.
    """
    injector = _injector(trial, group.rank())
    made: dict[Site, int] = {}
    parallel: DataParallel | None = None
    try:
        task = trial.task.build(group.rank(), group.size(), trial.seed, None)
        parallel = DataParallel(
            task.model,
            task.optimizer,
            STRATEGIES[trial.strategy](),
            micro_batches=trial.micro_batches,
            group=FaultyGroup(group, injector),
            guards=guards_of(trial),
            options=Options(
                bucket_bytes=BUCKET_BYTES, verified=trial.is_guarded, timeout_seconds=PATIENCE_SECONDS
            ),
        )
        strike_memory(parallel, injector)
        made = {site: injector.opportunities(site) for site in _SITES}
        _train(parallel, task, trial, seen)
    except Exception as error:
        seen.error = f"{type(error).__name__}: {error}"
        seen.ended_at = 1 if parallel is None else parallel.steps + 1
        if isinstance(error, CorruptionError):
            seen.names_damage, seen.ranks, seen.links = True, error.ranks, error.links
    seen.applications = tuple(injector.applications)
    seen.opportunities = {site: (made.get(site, 0), injector.opportunities(site)) for site in _SITES}


def guards_of(trial: Trial) -> tuple[Guard, ...]:
    """Return all guards that the trial's strategy may have, if it has any."""
    replicated = ledger_of(STRATEGIES[trial.strategy]()).replicated
    kinds = [kind for kind in GUARDS.values() if replicated or not kind.needs_replicas]
    cheap = [kind() for kind in kinds if kind is not Audit]
    audits = [] if trial.audit is None else [trial.audit]
    return (*audits, *cheap) if trial.is_guarded else ()


def _injector(trial: Trial, rank: int) -> Injector:
    """Return what strikes this rank; without a fault, one that counts the opportunities of all sites."""
    if trial.fault is not None:
        return Injector(FaultPlan((trial.fault,)), rank)
    return Injector(FaultPlan(tuple(Fault(site=site, rank=rank, instant=_NEVER) for site in _SITES)), rank)


def _train(parallel: DataParallel, task: Any, trial: Trial, seen: Seen) -> None:
    """Train to the end."""
    batches = iter(task.loader)
    updates: list[Update] = []
    while len(updates) < trial.updates:
        batch = next(batches)
        if update := parallel.micro_batch(lambda given: task.loss(task.model, given).value, batch):
            updates.append(update)
            seen.incidents += update.incidents
    for update in parallel.finish():
        updates.append(update)
        seen.incidents += update.incidents
    seen.incidents += parallel.late_incidents
    seen.rounds = updates[-1].round_index + 1
    parameters = torch.cat([parameter.detach().view(-1) for parameter in task.model.parameters()])
    seen.parameters = digest(parameters)
    seen.loss = task.evaluate(task.model)


def try_virtually(trial: Trial) -> list[Seen]:
    """Run a trial on a virtual cluster and return what every rank saw."""
    seen = [Seen() for _ in range(RANKS)]

    def program(rank: int, group: dist.ProcessGroup) -> None:
        try_on_rank(group, trial, seen[rank])

    try:
        VirtualCluster(RANKS).run(program)
    except StrettoError as error:  # nobody could go on: every rank ends by that
        for of_rank in seen:
            of_rank.error = of_rank.error or f"{type(error).__name__}: {error}"
    return seen


def try_really(seat: Seat, trials: list[Trial]) -> list[Seen]:
    """Run one trial after the other on this real worker and return what it saw; all workers must call."""
    torch.set_num_threads(1)
    found = []
    with seated(seat, Link.parse("none"), torch.device("cpu"), PATIENCE_SECONDS):
        whole = dist.group.WORLD
        if whole is None:
            raise RuntimeError("expected torch's default group behind a seat")
        for trial in trials:
            found.append(Seen())
            try_on_rank(whole, trial, found[-1])
            dist.barrier()
    return found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Twin:
    """A job without a fault, with guards or without."""

    trial: Trial
    """The job."""
    seen: tuple[Seen, ...]
    """By rank."""

    def struck_by(self, drawn: Drawn) -> Trial:
        """Return the same job, struck at the drawn moment of it."""
        made, end = self.seen[drawn.fault.rank].opportunities[drawn.fault.site]
        # Without guards a damaged length, read while the job is being made, may ask for any amount of memory.
        first = made if drawn.fault.site == "roll call" and not self.trial.is_guarded else 0
        return dataclasses.replace(self.trial, fault=drawn.within(first, end), audit=drawn.audit)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Twins:
    """The twins of one strategy."""

    guarded: Twin
    bare: Twin
    """Without guards: what harm is measured against."""


def twins_of(task: TaskConfig, strategy: str, seed: int) -> Twins:
    """Run both twins of a strategy.

    Raises:
        ConformanceFailed: A clean job failed, or guards changed its outcome.
    """
    guarded, bare = (
        Twin(trial=trial, seen=tuple(try_virtually(trial)))
        for trial in (
            Trial(task=task, strategy=strategy, is_guarded=is_guarded, seed=seed)
            for is_guarded in (True, False)
        )
    )
    for rank, (one, other) in enumerate(zip(guarded.seen, bare.seen, strict=True)):
        if one.error or other.error or one.parameters != other.parameters:
            raise ConformanceFailed(
                f"a clean job of {strategy}, rank {rank}: expected equal parameters with guards and without, found "
                f"{one.error or one.parameters} and {other.error or other.parameters}"
            )
    return Twins(guarded=guarded, bare=bare)


_UPDATES = 50
"""Of one job: as long as a job pays off whose making costs as much as some updates."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Clean:
    """What became of a job without a fault."""

    trial: Trial
    rounds: int
    """Exchanges behind its last update."""
    alarms: tuple[str, ...]
    """What was found although nothing was damaged."""


def clean_trials(task: TaskConfig, seed: int, rounds: int) -> Iterator[Trial]:
    """Yield guarded jobs of every strategy in turn, each with a seed of its own, of at least `rounds` rounds in all."""
    for number in itertools.count():
        if rounds <= 0:
            return
        strategy = CAMPAIGNED[number % len(CAMPAIGNED)]
        rounds_per_update = ledger_of(STRATEGIES[strategy]()).rounds
        updates = min(_UPDATES, -(-rounds // rounds_per_update))
        rounds -= updates * rounds_per_update
        yield Trial(
            task=task,
            strategy=strategy,
            is_guarded=True,
            seed=seed + 1 + number,
            updates=updates,
            micro_batches=rounds_per_update,
        )


def try_cleanly(trial: Trial) -> Clean:
    """Run a clean job on virtual ranks."""
    return silence_of(trial, try_virtually(trial))


def silence_of(trial: Trial, seen: list[Seen]) -> Clean:
    """Return what was said in a job in which nothing was to be said."""
    found = [str(incident) for of_rank in seen for incident in of_rank.incidents]
    found += [of_rank.error for of_rank in seen if of_rank.error is not None]
    alarms = tuple(f"{trial.strategy}, seed {trial.seed}: {text}" for text in dict.fromkeys(found))
    return Clean(trial=trial, rounds=seen[0].rounds, alarms=alarms)
