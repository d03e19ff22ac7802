"""`stretto doctor`: is this machine's arithmetic, memory and network to be trusted?"""

import json
from collections.abc import Sequence
from pathlib import Path

from stretto.cli.launcher import find_ranks
from stretto.cli.options import parse_alone
from stretto.doctor import Examination, Finding, Report, examine_seat
from stretto.train.environment import describe_environment

UNSOUND = 1


def doctor_command(words: Sequence[str]) -> int:
    """Run the command.

    Args:
        words: What follows its name.

    Returns:
        The process's exit code: 0 where nothing disagrees, 1 where something does.
    """
    examination = parse_alone("doctor", words, Examination())
    ranks = find_ranks(examination.workers)
    report = ranks.call(examine_seat, examination)[0]
    if ranks.is_first:
        _print(report)
        if examination.out is not None:
            _write(report, Path(examination.out))
    return 0 if report.is_sound else UNSOUND


def _print(report: Report) -> None:
    for finding in report.findings:
        mark = "ok " if finding.is_sound else "BAD"
        print(f"{mark}  {finding.check:22} {_whom(finding):36} {finding.detail}")
    print(report.verdict)


def _whom(finding: Finding) -> str:
    if finding.link is not None:
        return f"rank {finding.link[0]} to rank {finding.link[1]}"
    return "all ranks" if finding.rank is None else f"rank {finding.rank}, {finding.device}"


def _write(report: Report, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {**report.as_json(), "environment": describe_environment()}
    (folder / "doctor.json").write_text(json.dumps(content, indent=2) + "\n")
