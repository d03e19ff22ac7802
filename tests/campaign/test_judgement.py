"""A judge as strict as a user: wrong names, ranks that end apart and a lost loss are broken promises."""

import dataclasses
import math
from typing import Any

from experiments.campaign.drawing import draw_faults
from experiments.campaign.judgement import LOSS_OFF, Judgement, judge
from experiments.campaign.trial import GoldenRun, RankResult, Trial
from stretto.records import Incident
from stretto_lab.faults import Application
from tests.train.tiny import Tiny

DRAWN = next(
    one
    for one in draw_faults(0)
    if (one.fault.site, one.row.extent, one.job.strategy, one.job.ranks) == ("masters", "chunk", "zero1", 3)
    and not one.lasts
)
STRUCK = DRAWN.fault.rank
OTHER = (STRUCK + 1) % 3
HEALTHY = tuple(RankResult(parameters=7, loss=1.0) for _ in range(3))
GOLDEN = GoldenRun(trial=Trial(task=Tiny(), job=DRAWN.job, is_guarded=True, seed=0), results=HEALTHY)


def struck_once() -> tuple[Application, ...]:
    """What a fault did to the masters."""
    fault = DRAWN.fault
    return (
        Application(fault=fault, opportunity=1, step=0, elements=9, span=(0.0, 1.0), before="a", after="b"),
    )


def judged(**changed: Any) -> Judgement:
    """Judge a job with damaged masters; `changed` is what its ranks report differently from a repaired one."""
    mended = Incident(step=1, guard="rest", site="masters", part="bucket 0", ranks=(STRUCK,), action="mended")
    results = [dataclasses.replace(result, **{"incidents": (mended,), **changed}) for result in HEALTHY]
    results[STRUCK].applications = struck_once()
    return judge(DRAWN, results, HEALTHY, GOLDEN)


def failed(ranks: tuple[int, ...]) -> Judgement:
    """Judge a job that ended with an error that names `ranks`."""
    error = "StateCorrupt: ..."
    return judged(
        incidents=(),
        error=error,
        is_corruption_error=True,
        ended_at=1,
        ranks=ranks,
        parameters=None,
        loss=None,
    )


def test_a_repaired_job_and_an_error_with_the_right_name_have_kept_the_promise_but_not_a_lost_loss() -> None:
    assert judged().violation is None
    assert failed((STRUCK,)).violation is None
    assert judged(loss=math.nan).violation == "ended with a loss that is not finite"
    for ranks, why in ((OTHER,), "somebody else"), ((STRUCK, OTHER), "somebody else"), ((), "nobody"):
        assert str(failed(ranks).violation).endswith(f"to {why}"), ranks


def test_damage_that_takes_itself_back_leaves_nothing_to_be_seen() -> None:
    unseen = "was not detected"
    # Taken back before a guard looked; not so; and where the first strike was mended in between.
    for changes, violation in {"ab ba": None, "ab bc": unseen, "ab bc ca": None, "ab ab ba": unseen}.items():
        strikes = tuple(
            Application(
                fault=DRAWN.fault, opportunity=n, step=0, elements=9, span=(0.0, 1.0), before=b, after=a
            )
            for n, (b, a) in enumerate(changes.split())
        )
        results = [dataclasses.replace(result) for result in HEALTHY]
        results[STRUCK].applications = strikes
        assert judge(DRAWN, results, HEALTHY, GOLDEN).violation == violation, changes


def test_detection_counts_from_the_first_strike_that_a_guard_could_see() -> None:
    site = "shown parameters"
    drawn = next(one for one in draw_faults(0) if (one.fault.site, one.job.strategy) == (site, "zero1"))
    rank = drawn.fault.rank
    found = Incident(step=3, guard="rest", site=site, part="", ranks=(rank,), action="mended")
    healthy = tuple(RankResult(parameters=7, loss=1.0) for _ in range(drawn.job.ranks))
    golden = GoldenRun(trial=Trial(task=Tiny(), job=drawn.job, is_guarded=True, seed=0), results=healthy)
    # In the first one's round, of two micro-batches, nothing is left to be seen at its end.
    for second, violation in {3: None, 4: "took 2 updates to detect"}.items():
        results = [dataclasses.replace(result, incidents=(found,)) for result in healthy]
        results[rank].applications = tuple(
            Application(
                fault=drawn.fault, opportunity=n, step=n // 3, elements=9, span=(0.0, 1.0), before=b, after=a
            )
            for n, b, a in [(2, "a", "b"), (second, "b", "a"), (6, "a", "b")]
        )
        assert judge(drawn, results, healthy, golden).violation == violation


def test_what_damage_does_to_a_job_without_guards_is_told_by_parameters_and_loss() -> None:
    off = {loss: "loss off" for loss in (math.nan, math.inf, 1.0 + 2 * LOSS_OFF, 1.0 - 2 * LOSS_OFF)}
    for loss, harm in {**off, 1.0 + LOSS_OFF / 2: "silent corruption", 1.0: "masked"}.items():
        parameters = 7 if harm == "masked" else 8
        unguarded = [dataclasses.replace(result, parameters=parameters, loss=loss) for result in HEALTHY]
        unguarded[STRUCK].applications = struck_once()
        assert judge(DRAWN, HEALTHY, unguarded, GOLDEN).harm == harm, loss


def test_ranks_that_end_apart_are_wrong_whatever_is_promised() -> None:
    unpromised = next(one for one in draw_faults(0) if one.row.seen_by is None and one.job.ranks == 3)
    apart = [dataclasses.replace(result, parameters=number) for number, result in enumerate(HEALTHY)]
    assert judge(unpromised, apart, apart, GOLDEN).violation == "left ranks with different parameters"
