"""What became of each fault, and whether the promise about it was kept; and the rows of the table."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from experiments.campaign.drawing import DrawnFault
from experiments.campaign.promises import ROWS, Ending, Promise, weakened
from experiments.campaign.trial import GoldenRun, RankResult, Trial
from stretto_lab.faults import Application
from stretto_lab.faults.memory import ON_COMPUTE_LANE

Harm = Literal["masked", "silent corruption", "loss off", "error", "not applied"]
"""What a fault does to a job without guards: nothing in the end; other final parameters; these and a held-out loss off
by more than `LOSS_OFF`; an error of any kind; or it changed no bit."""

Naming = Literal["right", "nobody", "wrong"]
"""Whom a guarded job named: what was struck and nothing else; nobody; or somebody else, perhaps among others."""

LOSS_OFF = 0.01
"""Relative difference from the golden run's held-out loss from which a loss counts as off."""
MAX_UPDATES_TO_DETECT = 1
"""Updates within which damage has to be detected, if a guard is promised to see it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What became of one fault."""

    drawn: DrawnFault
    is_applied: bool
    """Whether bits changed in the guarded job, by digests before and after."""
    is_due: bool
    """Whether the promise is about this damage: bits changed, and in this round a guard watches for it."""
    harm: Harm
    """In the unguarded job."""
    is_detected: bool
    is_named: bool
    """Whether the rank or link that was struck was named, and no other."""
    ending: Ending
    """Of the guarded job."""
    updates_to_detect: int | None
    """From the update during which it struck first to that of the first incident or error."""
    violation: str | None
    """Which part of the promise was broken, and how."""
    story: str
    """What the ranks of the guarded job saw, for people to read."""


def judge(
    drawn: DrawnFault,
    guarded: Sequence[RankResult],
    unguarded: Sequence[RankResult],
    golden: GoldenRun,
) -> Judgement:
    """Compare both jobs of a fault with the golden run.

    Args:
        drawn: The fault.
        guarded: What became of the guarded job, by rank.
        unguarded: The same of the unguarded one.
        golden: The guarded golden run. The unguarded one has the same parameters.
    """
    struck = _applied(drawn, guarded)
    applied = _left_to_see(drawn, struck, golden.trial)
    harm = _harm(drawn, unguarded, golden)
    ending = _ending(guarded, golden)
    detected_at = _detected_at(drawn, guarded, golden)
    taken = None if detected_at is None or not applied else detected_at - (applied[0].step + 1)
    naming = _naming(drawn, guarded, applied)
    is_due = _is_due(drawn, applied, harm, golden.trial)
    violation = (
        _violation(drawn.promise, guarded, golden, ending, taken, naming) if is_due else _parted(guarded)
    )
    return Judgement(
        drawn=drawn,
        is_applied=bool(struck),
        is_due=is_due,
        harm=harm,
        is_detected=detected_at is not None,
        is_named=naming == "right",
        ending=ending,
        updates_to_detect=taken,
        violation=violation,
        story=_story(guarded, ending, violation),
    )


def _applied(drawn: DrawnFault, results: Sequence[RankResult]) -> list[Application]:
    return [application for application in results[drawn.rank].applications if application.changed]


def _harm(drawn: DrawnFault, unguarded: Sequence[RankResult], golden: GoldenRun) -> Harm:
    if not _applied(drawn, unguarded):
        return "not applied"
    ending = _ending(unguarded, golden)
    if ending != "different":
        return "error" if ending == "error" else "masked"
    pairs = zip(unguarded, golden.results, strict=True)
    return "loss off" if any(_is_off(one.loss, other.loss) for one, other in pairs) else "silent corruption"


def _is_off(loss: float | None, healthy: float | None) -> bool:
    if loss is None or healthy is None or not math.isfinite(loss):
        return True
    return abs(loss - healthy) > LOSS_OFF * abs(healthy)


def _ending(results: Sequence[RankResult], golden: GoldenRun) -> Ending:
    if any(result.error is not None for result in results):
        return "error"
    pairs = zip(results, golden.results, strict=True)
    return "identical" if all(one.parameters == other.parameters for one, other in pairs) else "different"


def _detected_at(drawn: DrawnFault, guarded: Sequence[RankResult], golden: GoldenRun) -> int | None:
    """Return the update in which damage was first reported, by an incident or an error."""
    steps = [incident.step for result in guarded for incident in result.incidents]
    steps += [result.ended_at for result in guarded if result.is_corruption_error]
    if steps:
        return min(steps)
    if drawn.fault.site == "broadcast values":
        # They are sent again before there is an update that could report it. What shows is one more broadcast.
        (_, sent), (_, usual) = (
            results[drawn.rank].opportunities["broadcast values"] for results in (guarded, golden.results)
        )
        return 1 if sent > usual else None
    return None


def _naming(drawn: DrawnFault, guarded: Sequence[RankResult], applied: Sequence[Application]) -> Naming:
    """Return whom incidents and errors of all ranks named."""
    incidents = [incident for result in guarded for incident in result.incidents]
    links = {incident.link for incident in incidents if incident.link is not None}
    links |= {link for result in guarded for link in result.links}
    ranks = {rank for incident in incidents if incident.link is None for rank in incident.ranks}
    ranks |= {rank for result in guarded for rank in result.ranks}
    if not links and not ranks:
        return "nobody"
    if drawn.row.seen_by == "verified" and drawn.fault.site != "sum":
        return "right" if not ranks and all(_is_struck(link, drawn, applied) for link in links) else "wrong"
    return "right" if not links and ranks == {drawn.rank} else "wrong"


def _is_struck(link: tuple[int, int], drawn: DrawnFault, applied: Sequence[Application]) -> bool:
    """Return whether damaged bytes came over this link: what a collective brings is one equal part from every rank."""
    if link[1] != drawn.rank:
        return False
    start, stop = link[0] / drawn.job.ranks, (link[0] + 1) / drawn.job.ranks
    return any(first < stop and last > start for first, last in (one.span for one in applied))


def _is_due(drawn: DrawnFault, applied: Sequence[Application], harm: Harm, trial: Trial) -> bool:
    """Return whether the promise is about this damage.

    Guards see what is there when they look. A fault that strikes again may take back what it did before, and the next
    micro-batch may round a flipped bit in a gradient away; then nothing is left to be seen.
    """
    if drawn.row.seen_by is None or _is_taken_back(applied):
        return False
    if drawn.audit is None:
        return bool(applied)
    if harm == "masked":
        return False
    per_round = trial.micro_batches_per_round
    rounds = {application.opportunity // per_round for application in applied}
    return any(drawn.audit.distance(index, drawn.job.ranks) is not None for index in rounds)


def _is_taken_back(applied: Sequence[Application]) -> bool:
    """Return whether the last strike has restored what the first one found, and nobody wrote in between."""
    if not applied or applied[-1].after != applied[0].before:
        return False
    return all(later.before == earlier.after for earlier, later in itertools.pairwise(applied))


def _left_to_see(drawn: DrawnFault, struck: Sequence[Application], trial: Trial) -> Sequence[Application]:
    """Return the strikes but for first ones that were taken back before a guard looked, at the end of their round."""
    if drawn.fault.site not in ON_COMPUTE_LANE:
        return struck
    per_round = trial.micro_batches_per_round
    for count in range(2, len(struck) + 1):
        first = struck[:count]
        if len({one.opportunity // per_round for one in first}) == 1 and _is_taken_back(first):
            return _left_to_see(drawn, struck[count:], trial)
    return struck


def _violation(
    promise: Promise,
    guarded: Sequence[RankResult],
    golden: GoldenRun,
    ending: Ending,
    taken: int | None,
    naming: Naming,
) -> str | None:
    """Say which part of the promise was broken by a job whose damage it is about."""
    if taken is None:
        return "was not detected"
    if naming == "wrong" or (naming == "nobody" and promise.named is not None):
        return "was attributed to somebody else" if naming == "wrong" else "was attributed to nobody"
    if not 0 <= taken <= MAX_UPDATES_TO_DETECT:
        return f"took {taken} updates to detect"
    allowed = {*promise.endings, "identical"}
    if ending not in allowed:
        return f"ended as {ending}, not {' or '.join(sorted(allowed))}"
    if ending == "error":
        # On every rank, but a rank that misses the job's very last record fails alone: the others have ended well.
        pairs = zip(guarded, golden.results, strict=True)
        wrong = [
            rank
            for rank, (result, healthy) in enumerate(pairs)
            if result.error is None and result.parameters != healthy.parameters
        ]
        return f"left ranks {wrong} with other parameters and no error" if wrong else None
    if not all(result.loss is not None and math.isfinite(result.loss) for result in guarded):
        return "ended with a loss that is not finite"
    guards = {incident.guard for result in guarded for incident in result.incidents}
    if guards - {promise.seen_by}:
        return f"was seen by {', '.join(sorted(guards))}, not by {promise.seen_by} alone"
    return _parted(guarded)


def _parted(guarded: Sequence[RankResult]) -> str | None:
    """Say whether ranks that ended without an error ended apart; that is wrong whatever is promised."""
    ends = {result.parameters for result in guarded if result.error is None}
    return "left ranks with different parameters" if len(ends) > 1 else None


def _story(guarded: Sequence[RankResult], ending: Ending, violation: str | None) -> str:
    lines = [f"ended as {ending}" + ("" if violation is None else f"; {violation}")]
    for rank, result in enumerate(guarded):
        lines += [f"rank {rank}: {application}" for application in result.applications[:2]]
        lines += [f"rank {rank}: {result.error}"] if result.error else []
    incidents = dict.fromkeys(str(incident) for result in guarded for incident in result.incidents)
    return "\n".join([*lines, *incidents])


Row = dict[str, Any]


def site_rows(judgements: Sequence[Judgement]) -> list[Row]:
    """Return one row for each promise that was tried, and another one for faults that struck again and again."""
    return [
        _site_row(promise, own, lasts=lasts)
        for promise in ROWS
        for lasts in (False, True)
        if (own := [one for one in judgements if one.drawn.row == promise and one.drawn.lasts == lasts])
    ]


def _site_row(promise: Promise, own: Sequence[Judgement], *, lasts: bool) -> Row:
    applied = [one for one in own if one.is_applied]
    taken = [one.updates_to_detect for one in applied if one.updates_to_detect is not None]
    harms = Counter(one.harm for one in own)
    return {
        "site": promise.site,
        "extent": promise.extent,
        "strategies": promise.strategies,
        "lasts": lasts,
        "guard": promise.seen_by,
        "audit_rate": promise.audit_rate,
        "promised": (weakened(promise) if lasts else promise).summary,  # between two ranks it may be less
        "drawn": len(own),
        "applied": len(applied),
        "harmful": sum(harms[harm] for harm in ("silent corruption", "loss off", "error")),
        "harm": dict(sorted(harms.items())),
        "due": sum(one.is_due for one in own),
        "detected": sum(one.is_detected for one in applied),
        "named": sum(one.is_named for one in applied),
        "identical": sum(one.ending == "identical" for one in applied),
        "error": sum(one.ending == "error" for one in applied),
        "updates_to_detect": max(taken, default=None),
        "broken": [one.drawn.number for one in own if one.violation is not None],
    }
