"""`stretto campaign [RECIPE]`: seeded faults against guards, and whether these keep their promises."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.campaign import CampaignConfig, Judged, repeat_fault, run_campaign, small
from stretto.cli.options import parse_options
from stretto.cli.telling import tell
from stretto.observe import print_campaign
from stretto.recipes import TaskConfig

RECIPE = "stdlib-gpt"
"""What is trained where no recipe is named."""
BROKEN = 1


def campaign_command(words: Sequence[str]) -> int:
    """Run the command.

    Args:
        words: What follows its name.

    Returns:
        The process's exit code: 0 where every promise was kept, 1 where one was broken or an alarm was false.
    """
    named = bool(words) and not words[0].startswith("-")
    whole = list(words) if named else [RECIPE, *words]
    _, campaign = parse_options("campaign", whole, _configure)
    if campaign.only is not None:
        return _repeat(campaign, campaign.only)
    report = run_campaign(campaign, tell)
    print_campaign(report)
    return _complain(report, whole)


def _complain(report: Mapping[str, Any], words: Sequence[str]) -> int:
    """Print what was not kept, each fault with the line that repeats it, and return the exit code."""
    for alarm in report["alarms"]:
        print(f"false alarm: {alarm}")
    for broken in report["broken"]:
        print(f"broken promise: {broken['story']}")
        print(f"replay: stretto campaign {shlex.join([*words, '--only', str(broken['number'])])}")
    return BROKEN if report["broken"] or report["alarms"] else 0


def _configure(task: TaskConfig) -> CampaignConfig[TaskConfig]:
    return CampaignConfig(task=small(task))


def _repeat(campaign: CampaignConfig[TaskConfig], number: int) -> int:
    judged: Judged = repeat_fault(campaign, number)
    drawn = judged.drawn
    print(f"fault {number}: {drawn.fault} in {drawn.strategy}, moment {drawn.moment:.3f}")
    print(f"promised: {drawn.held_to.summary}")
    print(f"on {'real' if judged.is_real else 'virtual'} workers, unguarded: {judged.harm}")
    print(judged.story)
    return 0 if judged.breaks is None else BROKEN
