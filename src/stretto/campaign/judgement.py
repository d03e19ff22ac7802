"""What became of a fault, against the clean twin and against what is promised."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from stretto.campaign.drawing import RANKS, Drawn
from stretto.campaign.promises import Final
from stretto.campaign.trial import Seen
from stretto.campaign.twin import Twin
from stretto.engine.ledger import ledger_of
from stretto.faults import Application
from stretto.records import Verdict
from stretto.strategies import STRATEGIES

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
    """From the update under way when it struck first to that of the first verdict or the error."""
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
    return any(drawn.audit.audit(index, RANKS) is not None for index in rounds)


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
    """Return the update in which damage was first spoken of, by a verdict or an error."""
    steps = [verdict.step for of_rank in guarded for verdict in of_rank.verdicts]
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
    verdicts = [verdict for of_rank in guarded for verdict in of_rank.verdicts]
    if drawn.promise.seen_by == "verified" and drawn.fault.site != "sum":
        links = [verdict.link for verdict in verdicts] + [link for one in guarded for link in one.links]
        return bool(links) and all(_is_struck(link, drawn, applied, len(guarded)) for link in links)
    ranks = [rank for verdict in verdicts for rank in _accused(verdict)]
    ranks += [rank for of_rank in guarded for rank in of_rank.ranks]
    return set(ranks) == {drawn.fault.rank}


def _accused(verdict: Verdict) -> tuple[int, ...]:
    return verdict.ranks if verdict.link is None else (-1,)


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
    guards = {verdict.guard for of_rank in guarded for verdict in of_rank.verdicts}
    if guards - {promise.seen_by}:
        return f"was seen by {', '.join(sorted(guards))}, not by {promise.seen_by} alone"
    return "was laid to somebody else" if promise.named is not None and not is_named else None


def _story(guarded: Sequence[Seen], final: Final, breaks: str | None) -> str:
    lines = [f"ended as {final}" + ("" if breaks is None else f"; {breaks}")]
    for rank, of_rank in enumerate(guarded):
        lines += [f"rank {rank}: {application}" for application in of_rank.applications[:2]]
        lines += [f"rank {rank}: {of_rank.error}"] if of_rank.error else []
    verdicts = dict.fromkeys(str(verdict) for of_rank in guarded for verdict in of_rank.verdicts)
    return "\n".join([*lines, *verdicts])
