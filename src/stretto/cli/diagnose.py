"""`stretto diagnose RECIPE`: is the input the bottleneck, and what would an echo gain?"""

from collections.abc import Sequence

from stretto.cli.launcher import find_ranks
from stretto.cli.options import parse_options
from stretto.echo import Diagnosis
from stretto.recipes import TaskConfig
from stretto.train.configuration import DiagnoseConfig
from stretto.train.diagnosis import diagnose_rank


def diagnose_command(words: Sequence[str]) -> None:
    """Run the command.

    Args:
        words: What follows its name.
    """
    _, job = parse_options("diagnose", words, _configure)
    ranks = find_ranks(job.workers)
    found = ranks.call(diagnose_rank, job)
    if ranks.is_first:
        # All ranks wait for the one whose data come last.
        _print(max(found, key=lambda diagnosis: diagnosis.free_uses))


def _configure(task: TaskConfig) -> DiagnoseConfig[TaskConfig]:
    return DiagnoseConfig(task=task)


def _print(diagnosis: Diagnosis) -> None:
    rows = {
        "L, the loader alone": diagnosis.load_seconds,
        "C + A, the step on a cached batch": diagnosis.step_seconds,
        "A, of it waiting for communication": diagnosis.exposed_seconds,
        "the loop as it is": diagnosis.period_seconds,
    }
    for name, seconds in rows.items():
        print(f"{name:36} {1000 * seconds:9.3f} ms per micro-batch")
    print(f"{'e* = L / (C + A), the free uses':36} {diagnosis.free_uses:9.3f}")
    print(diagnosis.verdict)
    for advice in diagnosis.advice:
        print(f"  before an echo: {advice}")
