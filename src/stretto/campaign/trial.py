"""A trial: one job of a campaign on one rank, struck or not, and what that rank saw of it."""

import dataclasses
from typing import Any

import torch
from torch import distributed as dist

from stretto.digests import digest
from stretto.engine import Options
from stretto.engine.ledger import ledger_of
from stretto.errors import CorruptionError
from stretto.faults import Application, Fault, FaultPlan, FaultyGroup, Injector, strike_memory
from stretto.faults.plan import SITES, Site
from stretto.guards import GUARDS, Audit, Guard
from stretto.parallel import DataParallel
from stretto.recipes import TaskConfig
from stretto.records import Update, Verdict
from stretto.strategies import STRATEGIES

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
    verdicts: tuple[Verdict, ...] = ()
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
            seen.verdicts += update.verdicts
    for update in parallel.finish():
        updates.append(update)
        seen.verdicts += update.verdicts
    seen.verdicts += parallel.late_verdicts
    seen.rounds = updates[-1].round_index + 1
    parameters = torch.cat([parameter.detach().view(-1) for parameter in task.model.parameters()])
    seen.parameters = digest(parameters)
    seen.loss = task.evaluate(task.model)
