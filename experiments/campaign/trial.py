"""A trial: one small job of a campaign, with a fault or without, on virtual ranks.

The fault strikes at one of the site's *opportunities*, which are the moments at which there is something to damage. How
many there are is known from the golden run: the same job without a fault. Every other trial is compared with it.
"""

import copy
import dataclasses
import functools
import random
from collections import Counter
from typing import Any, cast

import numpy as np
import torch
from torch import distributed as dist
from torch import nn

from experiments.campaign.drawing import RANKS, DrawnFault, JobKind
from stretto.checksums import digest
from stretto.engine import Options
from stretto.errors import ConformanceFailed, CorruptionError, StrettoError
from stretto.guards import GUARDS, Audit, Guard
from stretto.parallel import DataParallel
from stretto.records import Incident
from stretto.strategies import STRATEGIES
from stretto.strategies.ledger import ledger_of
from stretto_lab.faults import Application, Fault, FaultPlan, FaultyGroup, Injector, strike_memory
from stretto_lab.faults.plan import SITES, Site
from stretto_lab.recipes import Task, TaskConfig
from stretto_lab.virtual import VirtualCluster

BUCKET_BYTES = 2**18
"""Small enough for several buckets, and large enough that a rank's share of most of them fills more than one row of
sums (32 KiB)."""
_SITES: tuple[Site, ...] = SITES  # type: ignore[assignment]  # the same words, without their type
_NEVER = 10**9
_LARGE = 4096
"""Elements of a parameter that may be frozen, or made a buffer: several pages."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One job."""

    task: TaskConfig
    """What is trained."""
    job: JobKind
    """On how many ranks, and how they train."""
    is_guarded: bool
    """Whether it has a verified exchange and all guards that apply, or none of these."""
    audit: Audit | None = None
    """An audit beside these guards."""
    seed: int
    """Of the task."""
    fault: Fault | None = None
    """What strikes it."""
    in_repair: Site | None = None
    """What is struck once more where a guard runs a micro-batch again, on the same rank."""
    updates: int = 4
    """Committed updates before the drain."""
    micro_batches: int = 2
    """Per rank and update."""

    @property
    def guards(self) -> tuple[Guard, ...]:
        """The guards of the job."""
        if not self.is_guarded:
            return ()
        audits = () if self.audit is None else (self.audit,)
        return (*audits, *(kind() for kind in GUARDS.values() if kind is not Audit))

    @property
    def rounds_per_update(self) -> int:
        """Exchanges of an update."""
        return ledger_of(STRATEGIES[self.job.strategy]()).rounds

    @property
    def micro_batches_per_round(self) -> int:
        """Per rank and exchange."""
        return self.micro_batches // self.rounds_per_update


@dataclasses.dataclass(kw_only=True, slots=True)
class RankResult:
    """What became of a job on one rank, and what the rank knows of it."""

    applications: tuple[Application, ...] = ()
    """What the fault did on this rank."""
    opportunities: dict[Site, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """How often each site could have been struck until the job was made, and until its end."""
    incidents: tuple[Incident, ...] = ()
    """In the order of updates."""
    rounds: int = 0
    """Exchanges up to the last update."""
    parameters: int | None = None
    """Digest of the final parameters; None if the job ended with an error."""
    loss: float | None = None
    """Held-out loss at the final parameters."""
    error: str | None = None
    """Class and message of the error that ended the job."""
    ended_at: int = 0
    """The update during which the error came, from 1."""
    is_corruption_error: bool = False
    """Whether the error reports damage; ranks and links are those that it names."""
    ranks: tuple[int, ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    """Sender and receiver of each."""


def run_virtual(trial: Trial) -> list[RankResult]:
    """Run a trial on a virtual cluster and return the result of every rank."""
    results = [RankResult() for _ in range(trial.job.ranks)]

    def program(rank: int, group: dist.ProcessGroup) -> None:
        _run_on_rank(group, trial, results[rank])

    try:
        VirtualCluster(trial.job.ranks).run(program)
    except StrettoError as error:  # no rank could go on, which ends those too that have raised nothing
        for result in results:
            result.error = result.error or f"{type(error).__name__}: {error}"
    return results


def _run_on_rank(group: dist.ProcessGroup, trial: Trial, result: RankResult) -> None:
    """Run a trial on this rank of `group` and fill in `result`.

    No exception leaves it: without guards, damage may end a job with any error.
    """
    injector = _make_injector(trial, group.rank())
    made: dict[Site, int] = {}
    parallel: DataParallel | None = None
    try:
        config: Any = trial.task  # a frozen dataclass, so that it can be hashed
        task = copy.deepcopy(_built(config, group.rank(), group.size(), trial.seed))
        parallel = DataParallel(
            task.model,
            task.optimizer,
            STRATEGIES[trial.job.strategy](),
            micro_batches=trial.micro_batches,
            group=FaultyGroup(group, injector),
            guards=trial.guards,
            options=Options(
                bucket_bytes=BUCKET_BYTES,
                wire=trial.job.wire,
                verified=trial.is_guarded and trial.job.wire == "fp32",
            ),
        )
        strike_memory(parallel, injector)
        made = {site: injector.opportunities(site) for site in _SITES}
        _train(parallel, task, trial, result)
    except Exception as error:
        result.error = f"{type(error).__name__}: {error}"
        result.ended_at = 1 if parallel is None else parallel.steps + 1
        if isinstance(error, CorruptionError):
            result.is_corruption_error, result.ranks, result.links = True, error.ranks, error.links
    result.applications = tuple(injector.applications)
    result.opportunities = {site: (made.get(site, 0), injector.opportunities(site)) for site in _SITES}


@functools.lru_cache(maxsize=2 * sum(RANKS))
def _built(config: TaskConfig, rank: int, world_size: int, seed: int) -> Task:
    """Return a rank's task, which is built once for many jobs: reading its data costs as much as training."""
    task = config.build(rank, world_size, seed, None)
    add_constants(task)
    return dataclasses.replace(task, scheduler=None)


def add_constants(task: Task) -> None:
    """Freeze one of the task's parameters, make another one a buffer, and add running statistics."""
    found = [
        (module, name, parameter)
        for module in task.model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]
    uses = Counter(id(parameter) for _, _, parameter in found)
    large = [one for one in found if one[2].numel() >= _LARGE and uses[id(one[2])] == 1]
    if len(large) < 3:
        return
    first = next(one for one in task.model.modules() if isinstance(one, nn.Linear))
    first.statistics = nn.BatchNorm1d(first.out_features, affine=False)
    first.register_forward_hook(_normed)
    large[-2][2].requires_grad_(False)
    module, name, parameter = large[-1]
    for group in task.optimizer.param_groups:
        group["params"] = [held for held in group["params"] if held is not parameter]
    delattr(module, name)
    module.register_buffer(name, parameter.detach())


def _normed(module: nn.Module, _: Any, result: torch.Tensor) -> torch.Tensor:
    statistics: Any = module.statistics
    return cast(torch.Tensor, statistics(result.flatten(0, -2)).view_as(result))


def _make_injector(trial: Trial, rank: int) -> Injector:
    """Return what strikes this rank; without a fault, an injector that only counts the opportunities of all sites."""
    if trial.fault is not None:
        return Injector(FaultPlan((trial.fault,)), rank)
    return Injector(FaultPlan(tuple(Fault(site=site, rank=rank, instant=_NEVER) for site in _SITES)), rank)


def _train(parallel: DataParallel, task: Task, trial: Trial, result: RankResult) -> None:
    """Train until so many updates are returned, drain, and evaluate."""
    batches, returned = iter(task.loader), 0
    fault = trial.fault if trial.fault is not None and trial.fault.rank == parallel.rank else None
    in_repair = None if fault is None else trial.in_repair
    run: list[Any] = []

    def loss(batch: Any) -> torch.Tensor:
        nonlocal in_repair
        if fault is not None and in_repair is not None and any(one is batch for one in run):
            _flip(task.model, in_repair, fault.seed)
            in_repair = None
        run.append(batch)
        return task.loss(task.model, batch).value

    while returned < trial.updates:
        batch, backward = next(batches), trial.job.loop == "backward"
        update = parallel.backward(loss(batch)) if backward else parallel.micro_batch(loss, batch)
        if update:
            returned += 1
            result.rounds = update.round_index + 1
            result.incidents += update.incidents
    for update in parallel.finish():
        result.rounds = update.round_index + 1
        result.incidents += update.incidents
    result.incidents += parallel.late_incidents
    values = [
        one.detach() for one in (*task.model.parameters(), *task.model.buffers()) if one.is_floating_point()
    ]
    result.parameters = digest(torch.cat([one.reshape(-1) for one in values]))
    result.loss = task.evaluate(task.model)


def _flip(model: nn.Module, site: Site, seed: int) -> None:
    """Flip a bit of a tensor of the model behind PyTorch's back."""
    found = {
        "shown parameters": [one for one in model.parameters() if one.requires_grad],
        "frozen parameters": [one for one in model.parameters() if not one.requires_grad],
        "buffers": [one for one in model.buffers() if one.numel() >= _LARGE],
    }[site]
    chance = random.Random(seed)
    content = chance.choice(found).detach().reshape(-1).numpy().view(np.uint8)
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GoldenRun:
    """A job without a fault, on virtual ranks: what the same job with a fault is compared with."""

    trial: Trial
    results: tuple[RankResult, ...]
    """By rank."""

    def struck_by(self, drawn: DrawnFault) -> Trial:
        """Return the same job with a fault, at the moment that was drawn for it."""
        made, stop = self.results[drawn.rank].opportunities[drawn.fault.site]
        # Without guards a damaged length, read while the job is being made, could ask for any amount of memory.
        start = made if drawn.fault.site == "round report" and not self.trial.is_guarded else 0
        if drawn.fault.site == "buffers":  # which of them forward passes write is known after the first round
            start = self.trial.micro_batches_per_round
        return dataclasses.replace(
            self.trial, fault=drawn.fault_within(start, stop), audit=drawn.audit, in_repair=drawn.in_repair
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GoldenRuns:
    """The two golden runs of a kind of job: with guards, and without, where a fault shows what harm it does."""

    guarded: GoldenRun
    unguarded: GoldenRun


def golden_runs(task: TaskConfig, job: JobKind, seed: int) -> GoldenRuns:
    """Make both golden runs of a kind of job.

    Raises:
        ConformanceFailed: One of them failed, or guards changed the final parameters.
    """
    trials = [Trial(task=task, job=job, is_guarded=is_guarded, seed=seed) for is_guarded in (True, False)]
    guarded, unguarded = (GoldenRun(trial=trial, results=tuple(run_virtual(trial))) for trial in trials)
    for rank, (one, other) in enumerate(zip(guarded.results, unguarded.results, strict=True)):
        if one.error or other.error or one.parameters != other.parameters:
            raise ConformanceFailed(
                f"a job of {job} without a fault, rank {rank}: expected equal parameters with guards and without, "
                f"found {one.error or one.parameters} and {other.error or other.parameters}"
            )
    return GoldenRuns(guarded=guarded, unguarded=unguarded)
