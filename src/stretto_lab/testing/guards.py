"""The laws of guards: they report nothing in a clean job, and keep their promises when something is damaged."""

import dataclasses
import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from stretto.guards import Guard
from stretto.strategies import ACCO, DDP, DPU, Strategy, WeightPrediction, ZeRO1
from stretto_lab.testing.jobs import Course, Damage, Job, RunRanks, goes_on, on_virtual_ranks, train


def guard_faults(
    make: Callable[[], tuple[Guard, ...]],
    promises: Sequence[Damage],
    *,
    strategies: Sequence[Strategy] = (DDP(), ZeRO1(), DPU(), WeightPrediction(), ACCO()),
    ranks: Sequence[int] = (3,),
    updates: int = 4,
    run: RunRanks = on_virtual_ranks,
) -> list[str]:
    """Return the laws that the guards from `make` break; they are used together.

    They promise to notice each damage within an update, in jobs of all `strategies` on all numbers of `ranks`.
    """
    guards, again = make(), pickle.loads(pickle.dumps(make()))
    broken = [] if repr(guards) == repr(again) else [f"after pickling: expected {guards!r}, found {again!r}"]
    for strategy, size in ((strategy, size) for strategy in strategies for size in ranks):
        job = Job(strategy=strategy, guards=guards, updates=updates)
        bare, clean = _trained(job, size, run, guards=()), _trained(job, size, run)
        for rank, (expected, course) in enumerate(zip(bare, clean, strict=True)):
            what = f"a clean {strategy.name}, rank {rank} of {size}"
            broken += [f"{what}: expected no incident, found {one}" for one in course.incidents]
            broken += course.differs_from(expected, f"{what}, with guards")
        broken += goes_on(job, size, saved_at=(0, 2), run=run)
        for damage in promises:
            broken += _promise(job, damage, bare, run)
    return broken


def _trained(job: Job, size: int, run: RunRanks, **changed: Any) -> Sequence[Course]:
    return run(size, functools.partial(train, dataclasses.replace(job, **changed)))


def _promise(job: Job, damage: Damage, bare: Sequence[Course], run: RunRanks) -> list[str]:
    """Return how a promise is broken; `bare` is the undamaged job."""
    size, rank = len(bare), damage.rank % len(bare)
    what = f"{damage.site} damaged after update {damage.behind} in {job.strategy.name}, rank {rank} of {size}"
    harmed = _trained(job, size, run, damage=damage, guards=())
    if not harmed[rank].differs_from(bare[rank], ""):
        return [f"{what}: expected harm without guards, found the clean job"]
    courses, broken = _trained(job, size, run, damage=damage), list[str]()
    incidents = courses[0].incidents
    for other, course in enumerate(courses):
        if [str(one) for one in course.incidents] != [str(one) for one in incidents]:
            broken.append(
                f"{what}: expected the incidents of rank 0, found {course.incidents} on rank {other}"
            )
        if damage.outcome == "ends the job" and course.ended_by is None:
            broken.append(f"{what}: expected an error that ends the job, found none on rank {other}")
        if damage.outcome == "repaired":
            # What is shown is damaged until somebody notices.
            if damage.site == "shown parameters":
                course.shown = bare[other].shown
            broken += course.differs_from(bare[other], f"{what}, repaired, on rank {other}")
    in_time = {one.site for one in incidents if damage.behind < one.step <= damage.behind + 1}
    named = {suspect for one in incidents for suspect in one.ranks}
    if damage.outcome != "ends the job" and (damage.site not in in_time or named != {rank}):
        broken.append(f"{what}: expected an incident on it by the next update, found {incidents}")
    return broken
