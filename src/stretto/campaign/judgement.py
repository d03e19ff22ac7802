"""What became of a fault, against the clean twin and against what is promised.

The rows of campaign.json: faults by what is promised about them, and whether they strike again.
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from stretto.campaign.drawing import CAMPAIGNED, RANKS, ROWS, STRATEGIES_OF, Drawn, Final, Promise
from stretto.campaign.trial import Seen, Twin
from stretto.faults import Application
from stretto.records import Incident
from stretto.strategies import STRATEGIES
from stretto.strategies.ledger import ledger_of

Harm = Literal["absorbed", "differs", "loss off", "error", "not applied"]

LOSS_OFF = 0.01
"""Share by which a held-out loss has to differ from the twin's to be called off."""
UPDATES_TO_DETECT = 1
"""After which damage has to be known that is promised to be seen."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What became of one fault."""

    drawn: Drawn
    is_real: bool
    """Whether the guarded job ran on real workers; the other one is always virtual, with equal bits."""
    is_applied: bool
    """Whether bits changed in the guarded job, by digests before and after."""
    is_due: bool
    """Whether the promise speaks of it: bits changed, and somebody watches, in this round."""
    harm: Harm
    """Without guards: nothing; other final parameters; a held-out loss off by more than `LOSS_OFF` too; an error; or
    no bit was changed."""
    is_detected: bool
    is_named: bool
    """Whether the rank or the link that was struck was named, and nobody else."""
    final: Final
    """Of the guarded job."""
    updates_to_detect: int | None
    """From the update under way when it struck first to that of the first incident or the error."""
    breaks: str | None
    """What of the promise does not hold."""
    story: str
    """What the ranks of the guarded job saw, for people."""


def judge(
    drawn: Drawn, guarded: Sequence[Seen], bare: Sequence[Seen], twin: Twin, *, is_real: bool
) -> Judged:
    """Compare both jobs of a fault with their twin, whose parameters are the same with guards and without."""
    applied = [application for application in guarded[drawn.fault.rank].applications if application.changed]
    final = _final(guarded, twin)
    detected_at = _detected_at(drawn, guarded, twin)
    taken = None if detected_at is None or not applied else detected_at - (applied[0].step + 1)
    is_named = _is_named(drawn, guarded, applied)
    harm = _harm(drawn, bare, twin)
    is_due = _is_due(drawn, applied, harm, twin)
    breaks = _breaks(drawn, guarded, twin, final, taken, is_named=is_named) if is_due else None
    return Judged(
        drawn=drawn,
        is_real=is_real,
        is_applied=bool(applied),
        is_due=is_due,
        harm=harm,
        is_detected=detected_at is not None,
        is_named=is_named,
        final=final,
        updates_to_detect=taken,
        breaks=breaks,
        story=_story(guarded, final, breaks),
    )


def _is_due(drawn: Drawn, applied: Sequence[Application], harm: Harm, twin: Twin) -> bool:
    """Return whether the promise speaks of the damage.

    Audits see what a round comes to, if it is drawn, and nothing else: a flipped bit that the next micro-batch's
    rounding takes back is gone by then.
    """
    if drawn.promise.seen_by is None:
        return False
    if drawn.audit is None:
        return bool(applied)
    if harm == "absorbed":
        return False
    opportunities = twin.trial.micro_batches // ledger_of(STRATEGIES[drawn.strategy]()).rounds
    rounds = {application.opportunity // opportunities for application in applied}
    return any(drawn.audit.distance(index, RANKS) is not None for index in rounds)


def _harm(drawn: Drawn, bare: Sequence[Seen], twin: Twin) -> Harm:
    if not any(application.changed for application in bare[drawn.fault.rank].applications):
        return "not applied"
    final = _final(bare, twin)
    if final != "differ":
        return "error" if final == "error" else "absorbed"
    pairs = zip(bare, twin.seen, strict=True)
    return "loss off" if any(_is_off(one.loss, other.loss) for one, other in pairs) else "differs"


def _is_off(loss: float | None, healthy: float | None) -> bool:
    if loss is None or healthy is None or not math.isfinite(loss):
        return True
    return abs(loss - healthy) > LOSS_OFF * abs(healthy)


def _final(seen: Sequence[Seen], twin: Twin) -> Final:
    if any(of_rank.error is not None for of_rank in seen):
        return "error"
    pairs = zip(seen, twin.seen, strict=True)
    return "identical" if all(one.parameters == other.parameters for one, other in pairs) else "differ"


def _detected_at(drawn: Drawn, guarded: Sequence[Seen], twin: Twin) -> int | None:
    """Return the update in which damage was first spoken of, by an incident or an error."""
    steps = [incident.step for of_rank in guarded for incident in of_rank.incidents]
    steps += [of_rank.ended_at for of_rank in guarded if of_rank.names_damage]
    if steps:
        return min(steps)
    # Starting values are sent again before there is an update to report in: what shows is one broadcast more.
    if drawn.fault.site != "broadcast values":
        return None
    (_, made), (_, usual) = (
        of_job[drawn.fault.rank].opportunities["broadcast values"] for of_job in (guarded, twin.seen)
    )
    return 1 if made > usual else None


def _is_named(drawn: Drawn, guarded: Sequence[Seen], applied: Sequence[Application]) -> bool:
    """Return whether what was struck was named on some rank, and nobody else on any."""
    incidents = [incident for of_rank in guarded for incident in of_rank.incidents]
    if drawn.promise.seen_by == "verified" and drawn.fault.site != "sum":
        links = [incident.link for incident in incidents] + [link for one in guarded for link in one.links]
        return bool(links) and all(_is_struck(link, drawn, applied, len(guarded)) for link in links)
    ranks = [rank for incident in incidents for rank in _accused(incident)]
    ranks += [rank for of_rank in guarded for rank in of_rank.ranks]
    return set(ranks) == {drawn.fault.rank}


def _accused(incident: Incident) -> tuple[int, ...]:
    return incident.ranks if incident.link is None else (-1,)


def _is_struck(
    link: tuple[int, int] | None, drawn: Drawn, applied: Sequence[Application], world_size: int
) -> bool:
    """Return whether damage on arrival lay in what came over this link: rows of one length, in rank order."""
    if link is None or link[1] != drawn.fault.rank:
        return False
    first, end = link[0] / world_size, (link[0] + 1) / world_size
    return any(span[0] < end and span[1] > first for span in (one.span for one in applied))


def _breaks(
    drawn: Drawn, guarded: Sequence[Seen], twin: Twin, final: Final, taken: int | None, *, is_named: bool
) -> str | None:
    """Say what of the promise does not hold for damage that it speaks of."""
    promise = drawn.held_to
    allowed = {*promise.final, "identical"}
    if taken is None:
        return "was not detected"
    if not 0 <= taken <= UPDATES_TO_DETECT:
        return f"took {taken} updates to detect"
    if final not in allowed:
        return f"ended as {final}, not {' or '.join(sorted(allowed))}"
    if final == "error":
        # Every rank ends by it, but for those that had ended well before: whoever misses a job's last record is alone.
        silent = [rank for rank, of_rank in enumerate(guarded) if of_rank.error is None]
        wrong = [rank for rank in silent if guarded[rank].parameters != twin.seen[rank].parameters]
        return f"left ranks {wrong} with other parameters and no error" if wrong else None
    guards = {incident.guard for of_rank in guarded for incident in of_rank.incidents}
    if guards - {promise.seen_by}:
        return f"was seen by {', '.join(sorted(guards))}, not by {promise.seen_by} alone"
    return "was laid to somebody else" if promise.named is not None and not is_named else None


def _story(guarded: Sequence[Seen], final: Final, breaks: str | None) -> str:
    lines = [f"ended as {final}" + ("" if breaks is None else f"; {breaks}")]
    for rank, of_rank in enumerate(guarded):
        lines += [f"rank {rank}: {application}" for application in of_rank.applications[:2]]
        lines += [f"rank {rank}: {of_rank.error}"] if of_rank.error else []
    incidents = dict.fromkeys(str(incident) for of_rank in guarded for incident in of_rank.incidents)
    return "\n".join([*lines, *incidents])


Row = dict[str, Any]


def rows(judged: Sequence[Judged], overheads: Mapping[str, float]) -> list[Row]:
    """Return one row per promise and lastingness of which there is a fault.

    Args:
        judged: All faults.
        overheads: Processor time of a guarded clean job over that of one without guards, by strategy.
    """
    found = []
    for promise in ROWS:
        for lasts in (False, True):
            own = [one for one in judged if one.drawn.promise == promise and one.drawn.lasts == lasts]
            if own:
                found.append(_row(promise, own, overheads, lasts=lasts))
    return found


def pattern_rows(judged: Sequence[Judged]) -> list[Row]:
    """Return one row per pattern of damage: what it does where nobody watches, and whether it is seen."""
    by_pattern: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        by_pattern[one.drawn.fault.pattern].append(one)
    return [
        {
            "pattern": pattern,
            "drawn": len(own),
            **_harm_of_row(own),
            "due": sum(one.is_due for one in own),
            "detected": sum(one.is_due and one.is_detected for one in own),
        }
        for pattern, own in sorted(by_pattern.items())
    ]


def _harm_of_row(own: Sequence[Judged]) -> Row:
    harms = Counter(one.harm for one in own)
    return {
        "harmful": sum(harms[harm] for harm in ("differs", "loss off", "error")),
        "harm": dict(sorted(harms.items())),
    }


def _row(promise: Promise, own: Sequence[Judged], overheads: Mapping[str, float], *, lasts: bool) -> Row:
    struck = [one for one in own if one.is_applied]
    taken = [one.updates_to_detect for one in struck if one.updates_to_detect is not None]
    strategies = [name for name in CAMPAIGNED if name in STRATEGIES_OF[promise.strategies]]
    return {
        "site": promise.site,
        "extent": promise.extent,
        "strategies": promise.strategies,
        "lasts": lasts,
        "guard": promise.seen_by,
        "promised": own[0].drawn.held_to.summary,
        "drawn": len(own),
        "applied": len(struck),
        "applied_on_real_workers": sum(one.is_real for one in struck),
        **_harm_of_row(own),
        "due": sum(one.is_due for one in own),
        "detected": sum(one.is_detected for one in struck),
        "named": sum(one.is_named for one in struck),
        "identical": sum(one.final == "identical" for one in struck),
        "ended_with_error": sum(one.final == "error" for one in struck),
        "updates_to_detect": max(taken) if taken else None,
        "overhead": math.fsum(overheads[name] for name in strategies) / len(strategies),
        "broken": [one.drawn.number for one in own if one.breaks is not None],
    }
