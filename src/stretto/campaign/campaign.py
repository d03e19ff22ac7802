"""Everything about a campaign that can be chosen.

The campaign: twins, faults, clean rounds, and the report of it all.
"""

import dataclasses
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from stretto.campaign.drawing import CAMPAIGNED, RANKS, Drawn, draw, draw_real
from stretto.campaign.judgement import Judged, judge, pattern_rows, rows
from stretto.campaign.trial import (
    Clean,
    Seen,
    Trial,
    Twins,
    clean_trials,
    silence_of,
    try_cleanly,
    try_really,
    try_virtually,
    twins_of,
)
from stretto.errors import ConfigError
from stretto.observe import replace_json
from stretto.train.configuration import TaskT
from stretto.train.launch import LocalRanks
from stretto.train.outcome import describe_environment
from stretto.train.workers import PRELOAD

_CLEAN_ROUNDS_PER_FAULT = 10
_FAULTS_PER_REAL_ONE = 20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CampaignConfig(Generic[TaskT]):
    """Faults drawn from a seed, each put into a small job of its own; see docs/campaign.md."""

    task: TaskT
    """Model, data and optimizer of every job: the recipe, at the size that `stretto.campaign.trial` gives it."""
    faults: int = 2000
    """How many are drawn."""
    seed: int = 0
    """Decides faults, initial parameters and the order of the data; not negative."""
    out: str = "campaign"
    """Folder for campaign.json; what it holds is replaced."""
    clean_rounds: int | None = None
    """Exchanges of jobs without a fault, in which guards have to stay silent; None is ten per fault."""
    real: int | None = None
    """Faults of these that strike real workers, the others virtual ones; None is one of twenty."""
    workers: int = 2
    """Processes that the virtual jobs are shared out to."""
    only: int | None = None
    """Repeat the fault of this number alone, with what every rank saw; nothing is written."""

    def __post_init__(self) -> None:
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
    def num_real(self) -> int:
        """How many faults strike real workers."""
        return self.faults // _FAULTS_PER_REAL_ONE if self.real is None else self.real

    @property
    def num_clean_rounds(self) -> int:
        """How many exchanges are made without a fault, at least."""
        return self.faults * _CLEAN_ROUNDS_PER_FAULT if self.clean_rounds is None else self.clean_rounds


RESULTS = "campaign.json"
_FAULTS_PER_TURN = 400
"""Faults of a campaign to one more turn in which overheads are measured."""
_TOLD_EVERY = 100

Given = TypeVar("Given")
Found = TypeVar("Found")


def run_campaign(campaign: CampaignConfig[TaskT], tell: Callable[[str], None]) -> dict[str, Any]:
    """Put every drawn fault into a job of its own, and return the report that stands in campaign.json.

    Args:
        campaign: How many faults, from which seed, and where to.
        tell: Told what happens, one line at a time.

    Raises:
        ConformanceFailed: A job without a fault failed, or guards changed what came of it.
        WorkerFailed: A real worker died.
    """
    begun = time.perf_counter()
    torch.set_num_threads(1)
    all_twins = {name: twins_of(campaign.task, name, campaign.seed) for name in CAMPAIGNED}
    turns = -(-campaign.faults // _FAULTS_PER_TURN)
    overheads = {strategy: _overhead(all_twins[strategy], turns) for strategy in CAMPAIGNED}
    drawn = list(islice(draw(campaign.seed), campaign.faults))
    numbers = draw_real(campaign.seed, campaign.faults, campaign.num_real)
    tell(f"{len(numbers)} faults strike real workers")
    really, clean = _on_real_workers([one for one in drawn if one.number in numbers], all_twins)
    jobs = [(one, all_twins[one.strategy], really.get(one.number)) for one in drawn]
    with ProcessPoolExecutor(
        campaign.workers, _context(), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        judged = _in_parts(pool, _strike, jobs, partial(_tell_some, tell, "faults", len(jobs)))
        trials = list(clean_trials(campaign.task, campaign.seed, campaign.num_clean_rounds))
        clean += _in_parts(pool, try_cleanly, trials, partial(_tell_some, tell, "clean jobs", len(trials)))
    report = {
        **_summary(judged, clean),
        "sites": rows(judged, overheads),
        "patterns": pattern_rows(judged),
        "campaign": dataclasses.asdict(campaign),
        "ranks": RANKS,
        "overheads": overheads,
        "seconds": time.perf_counter() - begun,
        "environment": describe_environment(),
    }
    replace_json(Path(campaign.out, RESULTS), report)
    return report


def repeat_fault(campaign: CampaignConfig[TaskT], number: int) -> Judged:
    """Repeat one fault of a campaign alone, where it took place there; errors are those of `run_campaign`."""
    torch.set_num_threads(1)
    drawn = next(islice(draw(campaign.seed), number, None))
    twins = twins_of(campaign.task, drawn.strategy, campaign.seed)
    is_real = number in draw_real(campaign.seed, campaign.faults, campaign.num_real)
    really, _ = _on_real_workers([drawn] if is_real else [], {drawn.strategy: twins})
    return _strike((drawn, twins, really.get(number)))


def _overhead(twins: Twins, turns: int) -> float:
    """Return the processor time of a guarded job over that of one without guards: the median of turns."""

    def seconds(trial: Trial) -> float:
        started = time.process_time()
        try_virtually(trial)
        return time.process_time() - started

    ratios = [seconds(twins.guarded.trial) / seconds(twins.bare.trial) for _ in range(turns)]
    return statistics.median(ratios)


def _on_real_workers(
    drawn: Sequence[Drawn], all_twins: Mapping[str, Twins]
) -> tuple[dict[int, list[Seen]], list[Clean]]:
    """Run the guarded jobs of faults, and before them a clean job of each strategy, on real workers."""
    if not drawn:
        return {}, []
    clean = [twins.guarded.trial for twins in all_twins.values()]
    struck = [all_twins[one.strategy].guarded.struck_by(one) for one in drawn]
    by_rank = LocalRanks(RANKS).call(try_really, [*clean, *struck])
    seen = [list(of_all) for of_all in zip(*by_rank, strict=True)]
    silences = [silence_of(trial, of_job) for trial, of_job in zip(clean, seen, strict=False)]
    return {one.number: of_job for one, of_job in zip(drawn, seen[len(clean) :], strict=True)}, silences


def _strike(job: tuple[Drawn, Twins, list[Seen] | None]) -> Judged:
    """Run the jobs of one fault that have not been run on real workers, on virtual ones."""
    drawn, twins, really = job
    guarded = try_virtually(twins.guarded.struck_by(drawn)) if really is None else really
    bare = try_virtually(twins.bare.struck_by(drawn))
    return judge(drawn, guarded, bare, twins.guarded, is_real=really is not None)


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, __name__])
    return context


def _in_parts(
    pool: ProcessPoolExecutor,
    function: Callable[[Given], Found],
    jobs: Sequence[Given],
    done: Callable[[int], None],
) -> list[Found]:
    """Return what `function` makes of every job, in their order."""
    found = []
    for result in pool.map(function, jobs, chunksize=max(1, min(16, len(jobs) // 16))):
        found.append(result)
        done(len(found))
    return found


def _tell_some(tell: Callable[[str], None], what: str, total: int, done: int) -> None:
    if done % _TOLD_EVERY == 0 or done == total:
        tell(f"{done} of {total} {what}")


def _summary(judged: Sequence[Judged], clean: Sequence[Clean]) -> dict[str, Any]:
    alarms = [alarm for one in clean for alarm in one.alarms]
    return {
        "faults": len(judged),
        "applied": sum(one.is_applied for one in judged),
        "not_applied": [one.drawn.number for one in judged if not one.is_applied],
        "on_real_workers": sum(one.is_real for one in judged),
        "clean_rounds": sum(one.rounds for one in clean),
        "false_alarms": len(alarms),
        "alarms": alarms,
        "broken": [
            {"number": one.drawn.number, "why": one.breaks, "story": one.story}
            for one in judged
            if one.breaks is not None
        ],
    }
