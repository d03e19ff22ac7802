"""The rows of campaign.json: faults by what is promised about them, and whether they strike again."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.campaign.drawing import CAMPAIGNED
from stretto.campaign.judgement import Judged
from stretto.campaign.promises import ROWS, STRATEGIES, Promise

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
            **_harm(own),
            "due": sum(one.is_due for one in own),
            "detected": sum(one.is_due and one.is_detected for one in own),
        }
        for pattern, own in sorted(by_pattern.items())
    ]


def _harm(own: Sequence[Judged]) -> Row:
    harms = Counter(one.harm for one in own)
    return {
        "harmful": sum(harms[harm] for harm in ("differs", "loss off", "error")),
        "harm": dict(sorted(harms.items())),
    }


def _row(promise: Promise, own: Sequence[Judged], overheads: Mapping[str, float], *, lasts: bool) -> Row:
    struck = [one for one in own if one.is_applied]
    taken = [one.updates_to_detect for one in struck if one.updates_to_detect is not None]
    strategies = [name for name in CAMPAIGNED if name in STRATEGIES[promise.strategies]]
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
        **_harm(own),
        "due": sum(one.is_due for one in own),
        "detected": sum(one.is_detected for one in struck),
        "named": sum(one.is_named for one in struck),
        "identical": sum(one.final == "identical" for one in struck),
        "ended_with_error": sum(one.final == "error" for one in struck),
        "updates_to_detect": max(taken) if taken else None,
        "overhead": math.fsum(overheads[name] for name in strategies) / len(strategies),
        "broken": [one.drawn.number for one in own if one.breaks is not None],
    }
