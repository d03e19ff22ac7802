"""A campaign: hundreds of small jobs, each with a fault of its own, held to what guards promise.

Each fault is put into a job with guards and into one without. A share of the guarded jobs runs on real workers, all
others on virtual ranks. Beside them run clean jobs, without a fault, in which guards have to stay silent.
"""

import dataclasses
import functools
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from stretto.errors import ConfigError
from stretto.fields import check_fields
from stretto.machine import describe_environment
from stretto_lab.campaign.drawing import (
    CAMPAIGNED,
    RANKS,
    DrawnFault,
    JobKind,
    draw_faults,
    draw_real_numbers,
    kinds_of_jobs,
)
from stretto_lab.campaign.judgement import Judgement, judge, pattern_rows, site_rows
from stretto_lab.campaign.trial import GoldenRuns, RankResult, Trial, golden_runs, run_real, run_virtual
from stretto_lab.observe import Stages, replace_json
from stretto_lab.recipes import DigitsResNet, StdlibGPT, TaskConfig
from stretto_lab.train.configuration import TaskT
from stretto_lab.train.launch import LocalRanks
from stretto_lab.train.processes import map_on_workers

RESULTS = "campaign.json"
_CLEAN_ROUNDS_PER_FAULT = 10
_FAULTS_PER_REAL_ONE = 20
_FAULTS_PER_OVERHEAD = 400
"""Faults of a campaign for which overheads are measured once more."""
_CLEAN_UPDATES = 50
"""Updates of one clean job: making a job costs as much as some updates."""

Given = TypeVar("Given")
Found = TypeVar("Found")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CampaignConfig(Generic[TaskT]):
    """Faults drawn from a seed, each put into a small job of its own; see the page campaign."""

    task: TaskT
    """Model, data and optimizer of every job: the recipe, at the size that `stretto_lab.campaign.small` gives it."""
    faults: int = 2000
    """How many faults are drawn."""
    seed: int = 0
    """Decides faults, initial parameters and the order of the data; not negative."""
    out: str = "runs/campaign"
    """Folder for campaign.json, which is replaced."""
    clean_rounds: int | None = None
    """Exchanges of jobs without a fault, in which guards have to stay silent; None is ten per fault."""
    real: int | None = None
    """How many of the faults strike real workers, the others virtual ranks; None is one of twenty."""
    workers: int = 2
    """Processes that share the virtual jobs."""
    only: int | None = None
    """Repeat only the fault of this number, and show what every rank saw; nothing is written."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.faults < 1 or self.workers < 1 or self.seed < 0:
            raise ConfigError(
                f"faults={self.faults}, workers={self.workers}, seed={self.seed}: expected at least one fault, one "
                "worker, and a seed that is not negative"
            )
        if self.clean_rounds is not None and self.clean_rounds < 0:
            raise ConfigError(f"clean_rounds={self.clean_rounds}: expected at least 0")
        if self.real is not None and not 0 <= self.real <= self.faults:
            raise ConfigError(f"real={self.real}: expected a number of the {self.faults} faults")
        if self.only is not None and not 0 <= self.only < self.faults:
            raise ConfigError(
                f"only={self.only}: expected the number of a fault, from 0 to {self.faults - 1}"
            )

    @property
    def real_numbers(self) -> frozenset[int]:
        """Numbers of the faults that strike real workers."""
        real = self.faults // _FAULTS_PER_REAL_ONE if self.real is None else self.real
        return draw_real_numbers(self.seed, self.faults, real)

    @property
    def num_clean_rounds(self) -> int:
        """How many exchanges are made without a fault, at least."""
        return self.faults * _CLEAN_ROUNDS_PER_FAULT if self.clean_rounds is None else self.clean_rounds


def small(task: TaskConfig) -> TaskConfig:
    """Return `task` at a size at which thousands of jobs can be run; an unknown recipe stays as it is.

    A job of three ranks takes about a tenth of a second. Every rank's share of a bucket still fills more than one row
    of sums (32 KiB), so that there can be damage that is too large to be repaired.
    """
    match task:
        case StdlibGPT():
            data = dataclasses.replace(task.data, megabytes=0.1)
            task = dataclasses.replace(task, layers=1, width=64, heads=1, context=8, batch=1)
            return dataclasses.replace(task, data=data, evaluation_windows=4)
        case DigitsResNet():
            return dataclasses.replace(task, batch=2)
        case _:
            return task


def run_campaign(campaign: CampaignConfig[TaskT], stages: Stages) -> dict[str, Any]:
    """Put every drawn fault into a job of its own, and return the report that is written to campaign.json.

    Args:
        campaign: How many faults, from which seed, and where to.
        stages: Are told what is run.

    Raises:
        ConformanceFailed: A job without a fault failed, or guards changed its outcome.
        WorkerFailed: A real worker died.
    """
    started = time.perf_counter()
    torch.set_num_threads(1)
    drawn = list(itertools.islice(draw_faults(campaign.seed), campaign.faults))
    kinds = list({one.job for one in drawn} | {JobKind(strategy=name) for name in CAMPAIGNED})
    make = functools.partial(golden_runs, campaign.task, seed=campaign.seed)
    golden = dict(zip(kinds, _map(campaign, make, kinds, "jobs without a fault", stages), strict=True))
    stages.begin("measuring what guards cost")
    overheads = _measure_overheads(golden, turns=-(-campaign.faults // _FAULTS_PER_OVERHEAD))
    numbers = campaign.real_numbers
    chosen = [one for one in drawn if one.number in numbers]
    others = [one for one in drawn if one.number not in numbers]
    beside = _begin(functools.partial(_run_on_real_workers, chosen, golden))
    clean = _map(campaign, _run_clean, list(_clean_trials(campaign)), "clean jobs", stages)
    judgements = _map(
        campaign, _strike, [(one, golden[one.job], None) for one in others], "faults on virtual ranks", stages
    )
    stages.begin(f"waiting for the {len(numbers)} faults on real workers")
    clean_real, real = beside.result()
    struck = [(one, golden[one.job], real[one.number]) for one in chosen]
    judgements = sorted(
        judgements + _map(campaign, _strike, struck, "faults on real workers", stages),
        key=lambda one: one.drawn.number,
    )
    clean = clean_real + clean
    report = {
        **_summarize(judgements, clean),
        "sites": site_rows(judgements, overheads),
        "patterns": pattern_rows(judgements),
        "campaign": dataclasses.asdict(campaign),
        "ranks": RANKS,
        "overheads": overheads,
        "seconds": time.perf_counter() - started,
        "environment": describe_environment(),
    }
    replace_json(Path(campaign.out, RESULTS), report)
    return report


def repeat_fault(campaign: CampaignConfig[TaskT], number: int) -> Judgement:
    """Repeat one fault of a campaign alone, on ranks of the same kind; errors are those of `run_campaign`."""
    torch.set_num_threads(1)
    drawn = next(itertools.islice(draw_faults(campaign.seed), number, None))
    golden = golden_runs(campaign.task, drawn.job, campaign.seed)
    _, real = _run_on_real_workers([drawn] if number in campaign.real_numbers else [], {drawn.job: golden})
    return _strike((drawn, golden, real.get(number)))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _CleanRun:
    """What became of a guarded job without a fault."""

    rounds: int
    """Exchanges up to its last update."""
    alarms: tuple[str, ...]
    """Incidents and errors: all of them are false."""

    @classmethod
    def of(cls, trial: Trial, results: Sequence[RankResult]) -> "_CleanRun":
        found = [str(incident) for result in results for incident in result.incidents]
        found += [result.error for result in results if result.error is not None]
        job = f"{trial.job.strategy} on {trial.job.ranks} ranks, seed {trial.seed}"
        alarms = tuple(f"{job}: {text}" for text in dict.fromkeys(found))
        return cls(rounds=results[0].rounds, alarms=alarms)


def _clean_trials(campaign: CampaignConfig[TaskT]) -> Iterator[Trial]:
    """Yield clean jobs of every kind in turn, each with a seed of its own, until there are rounds enough."""
    left = campaign.num_clean_rounds
    for number, job in enumerate(itertools.cycle(kinds_of_jobs())):
        if left <= 0:
            return
        trial = Trial(task=campaign.task, job=job, is_guarded=True, seed=campaign.seed + 1 + number)
        rounds = trial.rounds_per_update
        updates = min(_CLEAN_UPDATES, -(-left // rounds))
        left -= updates * rounds
        yield dataclasses.replace(trial, updates=updates, micro_batches=rounds)


def _run_clean(trial: Trial) -> _CleanRun:
    return _CleanRun.of(trial, run_virtual(trial))


def _strike(job: tuple[DrawnFault, GoldenRuns, Sequence[RankResult] | None]) -> Judgement:
    """Judge a fault, after running its jobs on virtual ranks: the guarded one only if it has no results yet."""
    drawn, golden, real = job
    guarded = run_virtual(golden.guarded.struck_by(drawn)) if real is None else real
    unguarded = run_virtual(golden.unguarded.struck_by(drawn))
    return judge(drawn, guarded, unguarded, golden.guarded, is_real=real is not None)


def _run_on_real_workers(
    drawn: Sequence[DrawnFault], golden: Mapping[JobKind, GoldenRuns]
) -> tuple[list[_CleanRun], dict[int, Sequence[RankResult]]]:
    """Run a clean job of every kind, then the guarded jobs of the faults; return the latter by number."""
    clean_runs: list[_CleanRun] = []
    results: dict[int, Sequence[RankResult]] = {}
    for ranks in RANKS:
        own = [one for one in drawn if one.job.ranks == ranks]
        clean = [runs.guarded.trial for job, runs in golden.items() if job.ranks == ranks]
        if not own:
            continue
        struck = [golden[one.job].guarded.struck_by(one) for one in own]
        by_rank = LocalRanks(ranks).call(run_real, [*clean, *struck])
        by_trial = list(zip(*by_rank, strict=True))
        clean_runs += [_CleanRun.of(trial, found) for trial, found in zip(clean, by_trial, strict=False)]
        results |= dict(zip([one.number for one in own], by_trial[len(clean) :], strict=True))
    return clean_runs, results


def _begin(work: Callable[[], Found]) -> Future[Found]:
    """Begin `work` beside this thread: real workers mostly wait, for ranks that a fault has ended.

    Its thread is a daemon, so that it cannot hold up the end of the command; the workers end with that.
    """
    future: Future[Found] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="stretto-real-workers", daemon=True).start()
    return future


def _map(
    campaign: CampaignConfig[TaskT],
    function: Callable[[Given], Found],
    jobs: Sequence[Given],
    what: str,
    stages: Stages,
) -> list[Found]:
    """Return what `function` makes of every job, in their order."""
    stages.begin(f"{len(jobs)} {what}", len(jobs))
    return list(stages.counted(map_on_workers(function, jobs, campaign.workers, __name__)))


def _measure_overheads(golden: Mapping[JobKind, GoldenRuns], turns: int) -> dict[str, float]:
    """Return processor time with guards over that without, by strategy, on three ranks: the median of some turns."""

    def seconds(trial: Trial) -> float:
        started = time.process_time()
        run_virtual(trial)
        return time.process_time() - started

    runs = {name: golden[JobKind(strategy=name)] for name in CAMPAIGNED}
    seconds(next(iter(runs.values())).guarded.trial)  # a first job also imports what building a model needs
    return {
        name: statistics.median(
            seconds(pair.guarded.trial) / seconds(pair.unguarded.trial) for _ in range(turns)
        )
        for name, pair in runs.items()
    }


def _summarize(judgements: Sequence[Judgement], clean: Sequence[_CleanRun]) -> dict[str, Any]:
    alarms = [alarm for run in clean for alarm in run.alarms]
    return {
        "faults": len(judgements),
        "applied": sum(one.is_applied for one in judgements),
        "not_applied": [one.drawn.number for one in judgements if not one.is_applied],
        "on_real_workers": sum(one.is_real for one in judgements),
        "clean_rounds": sum(run.rounds for run in clean),
        "false_alarms": len(alarms),
        "alarms": alarms,
        "broken": [
            {"number": one.drawn.number, "why": one.violation, "story": one.story}
            for one in judgements
            if one.violation is not None
        ],
    }
